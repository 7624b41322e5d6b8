"""Newton's method for ∇L = 0 in the directions that are certain to be curved.

Where critical points form manifolds, the Hessian has eigenvalues that vanish on the
manifold and are small near it. A Newton step along such a direction is a quotient of
two small numbers and may go anywhere. Kantorovich's condition distinguishes these
directions from curved ones: a Newton step s along eigenvectors whose eigenvalues are at
least |λ| in size finds a nearby critical point if

    2 K ‖s‖ ≤ |λ|,    K = ‖∇³L[s]‖ / ‖s‖,

that is, if the Hessian turns by less than half of λ along s. We require twice as much,
so that a monkey saddle, where Newton's method only halves the distance, does not
qualify. We step along the largest set of directions that qualifies and along no others.
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._core.compiled import jit
from ._flat_loss import FlatLoss, Local, Vector, expansion
from ._krylov import lanczos

MARGIN = 4.0
"""The factor that replaces Kantorovich's 2."""
ROUNDS = 8
"""The largest number of times that K is measured to find the certain directions."""
CERTAIN_PART = 0.5
"""The part of the gradient that must lie along certain directions for a step along
them."""
KRYLOV_SIZE = 96
SHORTEST = 2.0**-20
"""The fraction of a step at which shortening it is given up."""
RESTORING_STEPS = 8
SLIDE_TRIES = 8


class View(eqx.Module):
    """The loss to second order about a point y, along orthonormal directions that span
    the gradient, the most curved first."""

    y: Vector
    loss: Float[Array, ""]
    gradient: Vector
    gradient_norm: Float[Array, ""]
    eigenvalues: Float[Array, " count"]
    slopes: Float[Array, " count"]
    """The gradient's components along the directions."""
    directions: Float[Array, "count n"]
    certain: Bool[Array, " count"]
    """Whether a Newton step may be taken along a direction: true for the first ones."""
    turning: Float[Array, ""]
    """K."""
    floor: Float[Array, ""]
    """The size below which rounding makes an eigenvalue indistinguishable from zero."""
    local: Local | None
    """The loss with its dense Hessian, if that was computed."""

    @property
    def newton(self) -> Float[Array, " count"]:
        """-slope/λ, the components of Newton's step."""
        resolved = jnp.abs(self.eigenvalues) > self.floor
        return jnp.where(
            resolved, -self.slopes / jnp.where(resolved, self.eigenvalues, 1.0), 0.0
        )

    @property
    def norm(self) -> float:
        """‖∇L‖."""
        return float(self.gradient_norm)

    @property
    def certain_norm(self) -> float:
        """The norm of the part of the gradient along certain directions."""
        return float(np.linalg.norm(np.asarray(self.slopes)[np.asarray(self.certain)]))

    @property
    def count(self) -> int:
        """The number of certain directions."""
        return int(np.sum(self.certain))

    def distance_to(self, other: "View") -> float:
        return float(np.linalg.norm(np.asarray(self.y) - np.asarray(other.y)))

    def resolution(self, tolerance: float) -> float:
        """The size below which a slope of `tolerance` makes an eigenvalue uncertain."""
        slope = max(self.norm, tolerance)
        return max(math.sqrt(MARGIN * float(self.turning) * slope), float(self.floor))


@jit
def dense_view(
    flat: FlatLoss, y: Vector, tolerance: Float[Array, ""], gap: Array | None
) -> View:
    """The view along all directions, from the dense Hessian."""
    local = expansion(flat, y)
    order = jnp.argsort(-jnp.abs(local.eigenvalues))
    directions = local.eigenvectors.T[order]
    eigenvalues = local.eigenvalues[order]
    view = _view(y, local.loss, local.gradient, eigenvalues, directions, local)
    return _with_certain(flat, view, tolerance, gap)


@jit
def krylov_view(
    flat: FlatLoss, y: Vector, tolerance: Float[Array, ""], gap: Array | None
) -> View:
    """The view along the directions of Newton's step, found by Lanczos from the
    gradient: one for each multiple eigenvalue, the one along which the gradient has a
    part."""
    loss, gradient = jax.value_and_grad(flat)(y)
    space = lanczos(flat, y, gradient, min(KRYLOV_SIZE, y.size))
    order = jnp.argsort(-jnp.abs(space.ritz))
    view = _view(y, loss, gradient, space.ritz[order], space.vectors[order], None)
    return _with_certain(flat, view, tolerance, gap)


def _view(
    y: Vector,
    loss: Float[Array, ""],
    gradient: Vector,
    eigenvalues: Float[Array, " count"],
    directions: Float[Array, "count n"],
    local: Local | None,
) -> View:
    return View(
        y=y,
        loss=loss,
        gradient=gradient,
        gradient_norm=jnp.linalg.norm(gradient),
        eigenvalues=eigenvalues,
        slopes=directions @ gradient,
        directions=directions,
        certain=jnp.zeros(eigenvalues.shape, bool),
        turning=jnp.zeros(()),
        floor=y.size * np.finfo(float).eps * jnp.abs(eigenvalues[0]),
        local=local,
    )


def _with_certain(
    flat: FlatLoss, view: View, tolerance: Float[Array, ""], gap: Array | None
) -> View:
    if gap is None:
        certain, turning = _kantorovich(flat, view, tolerance)
    else:
        certain, turning = jnp.abs(view.eigenvalues) > gap, view.turning
    return eqx.tree_at(lambda v: (v.certain, v.turning), view, (certain, turning))


Bracket = tuple[
    Int[Array, ""], Int[Array, ""], Int[Array, ""], Float[Array, ""], Int[Array, ""]
]
"""The next r to try, the largest that meets the condition, the smallest that does not,
K and the number of rounds."""


def _kantorovich(
    flat: FlatLoss, view: View, tolerance: Float[Array, ""]
) -> tuple[Bool[Array, " count"], Float[Array, ""]]:
    """The certain directions, and K.

    A slope counts as at least `tolerance`: an eigenvalue is not certain if a shift of
    the point could move it through zero with no slope exceeding the tolerance.

    The condition on the first r directions needs K along their own step. So the largest
    r that meets it is bracketed by one that does and one that does not, and each
    measured K predicts the next r to try.
    """
    sizes = jnp.abs(view.eigenvalues)
    resolved = sizes > view.floor
    slopes = jnp.maximum(jnp.abs(view.slopes), tolerance)
    steps = jnp.where(resolved, slopes / jnp.where(resolved, sizes, 1.0), jnp.inf)
    reach = jnp.sqrt(jnp.cumsum(steps**2))
    # If the step is zero: the direction that the flow would take.
    lowest = view.directions[jnp.argmin(view.eigenvalues)]

    def measure(r: Int[Array, ""]) -> tuple[Int[Array, ""], Float[Array, ""]]:
        """The number of directions that meet the condition with the K of the step along
        the first r, and this K."""
        step = jnp.where(jnp.arange(sizes.size) < r, view.newton, 0.0) @ view.directions
        norm = jnp.linalg.norm(step)
        step = jnp.where(norm > 0, step / jnp.where(norm > 0, norm, 1.0), lowest)
        K = flat.turn(view.y, step)
        return jnp.sum(resolved & (MARGIN * K * reach <= sizes)), K

    def narrow(carry: Bracket) -> Bracket:
        r, yes, no, turning, i = carry
        fulfil, K = measure(r)
        good = fulfil >= r
        yes, no = jnp.where(good, r, yes), jnp.where(good, no, r)
        turning = jnp.where(good | (yes == 0), K, turning)
        # If K refutes this set it suggests a smaller one; halve if that is known.
        smaller = jnp.where(fulfil > yes, fulfil, (yes + no) // 2)
        r = jnp.where(good, jnp.minimum(fulfil, no - 1), smaller)
        return r, yes, no, turning, i + 1

    def is_open(carry: Bracket) -> Bool[Array, ""]:
        r, yes, no, _, i = carry
        return (i == 0) | ((r > yes) & (r < no) & (i < ROUNDS))

    count = jnp.sum(resolved)
    start = (count, jnp.zeros_like(count), count + 1, jnp.zeros(()), jnp.asarray(0))
    _, yes, _, turning, _ = jax.lax.while_loop(is_open, narrow, start)
    return jnp.arange(sizes.size) < yes, turning


Shortened = tuple[Vector, Float[Array, ""], Float[Array, ""]]


@jit
def _newton_step(flat: FlatLoss, view: View) -> tuple[Vector, Float[Array, ""]]:
    """y + ts and t, with Newton's step s along the certain directions and the first
    t = 1, ½, ¼, … at which ‖∇L‖ falls; zero if it falls at none."""
    y, norm = view.y, view.gradient_norm
    step = jnp.where(view.certain, view.newton, 0.0) @ view.directions

    def falls(t: Float[Array, ""], after: Float[Array, ""]) -> Bool[Array, ""]:
        return after <= (1 - 1e-4 * t) * norm

    def goes_on(carry: Shortened) -> Bool[Array, ""]:
        _, t, after = carry
        return ~falls(t, after) & (t > SHORTEST)

    def shorten(carry: Shortened) -> Shortened:
        _, t, _ = carry
        moved = y + 0.5 * t * step
        return moved, 0.5 * t, jnp.linalg.norm(flat.gradient(moved))

    start = (y, jnp.full((), 2.0, y.dtype), jnp.full((), jnp.inf, y.dtype))
    moved, t, after = jax.lax.while_loop(goes_on, shorten, start)
    fell = falls(t, after)
    return jnp.where(fell, moved, y), jnp.where(fell, t, 0.0)


class Stuck(Exception):
    """The search cannot continue; holds the reason and the last view."""

    def __init__(self, reason: str, view: View, steps: int):
        super().__init__(reason)
        self.reason, self.view, self.steps = reason, view, steps


class Newton:
    """A search for a critical point, step by step."""

    def __init__(
        self,
        flat: FlatLoss,
        look_about: Callable[[FlatLoss, Vector, Array, Array | None], View],
        tolerance: float,
        gap: float | None,
        max_steps: int,
    ):
        self.flat, self._look_about = flat, look_about
        self.tolerance, self.gap, self.max_steps = tolerance, gap, max_steps
        self.steps = 0
        """The number of steps so far, of any kind."""

    def view(self, y: Vector) -> View:
        """The loss about y."""
        gap = None if self.gap is None else jnp.asarray(self.gap)
        return self._look_about(self.flat, y, jnp.asarray(self.tolerance), gap)

    def run(self, view: View) -> View:
        """Steps until ‖∇L‖ reaches the tolerance; raises `Stuck` if it does not."""
        # With a gap there are only Newton steps, taken for as long as they help.
        enough = CERTAIN_PART if self.gap is None else 1e-3
        while not view.norm <= self.tolerance:
            if view.certain_norm > enough * view.norm:
                view = self._step(view)
            elif self.gap is None:
                view = self._slide(view)
            else:
                raise Stuck(
                    "the rest of the gradient lies along directions with "
                    f"|λ| ≤ `gap` = {self.gap:g}, along which no step is allowed",
                    view,
                    self.steps,
                )
        return view

    def _count(self, view: View) -> None:
        """Count one more step, or raise `Stuck` if there are none left."""
        if self.steps >= self.max_steps:
            raise Stuck(
                f"`max_steps` = {self.max_steps} steps were not enough",
                view,
                self.steps,
            )
        self.steps += 1

    def _step(self, view: View) -> View:
        """Newton's step along certain directions, shortened until ‖∇L‖ falls."""
        self._count(view)
        y, t = _newton_step(self.flat, view)
        if float(t) == 0:
            raise Stuck("no step reduces the gradient", view, self.steps)
        return self.view(y)

    def _slide(self, view: View) -> View:
        """A step along uncertain directions too, for when most of the gradient lies
        there: a Levenberg-Marquardt step, the shortest that reduces the linear model of
        the gradient by a factor, and then steps back towards the manifold where the
        gradient vanishes along the certain directions.

        Near a degenerate critical point the gradient is of higher order in the
        distance, so that each slide covers a part of the way.
        """
        factor = 0.1
        for _ in range(SLIDE_TRIES):
            self._count(view)
            step = _shortest(view, factor)
            if step is None:
                break
            moved = np.asarray(view.y) + step @ np.asarray(view.directions)
            after = self._restored(jnp.asarray(moved))
            if 1 - after.norm / view.norm > 0.1 * (1 - factor):
                return after
            factor = 1 - 0.25 * (1 - factor)
        if view.certain_norm > 1e-3 * view.norm:
            return self._step(view)
        raise Stuck(
            "the rest of the gradient lies along directions whose curvature cannot be "
            "told from zero, and moving along them does not help",
            view,
            self.steps,
        )

    def _restored(self, y: Vector) -> View:
        """The view after Newton steps from y along the certain directions."""
        view = self.view(y)
        for _ in range(RESTORING_STEPS):
            norm = view.norm
            if norm <= self.tolerance or view.certain_norm <= CERTAIN_PART * norm:
                break
            view = self._step(view)
        return view


def _shortest(view: View, factor: float) -> Float[np.ndarray, " count"] | None:
    """Newton's step along the certain directions, and s = -λ g/(λ² + μ²) along the
    others, with the largest μ at which ‖g + λs‖ ≤ factor · ‖g‖ there; None if there is
    no such μ."""
    eigenvalues, slopes = np.asarray(view.eigenvalues), np.asarray(view.slopes)
    certain, floor = np.asarray(view.certain), float(view.floor)
    rest = ~certain & (np.abs(eigenvalues) > floor)
    lam, g = eigenvalues[rest], slopes[rest]
    if not g.size:
        return None
    # The part along directions without any curvature cannot be reduced.
    uncertain = max(0.0, view.norm**2 - view.certain_norm**2)
    flat = math.sqrt(max(0.0, uncertain - g @ g))
    target = factor * math.sqrt(uncertain)

    def is_small(mu: float) -> bool:
        left = np.linalg.norm(g * mu**2 / (lam**2 + mu**2))
        return bool(math.hypot(left, flat) <= target)

    low, high = floor, 1e3 * float(np.max(np.abs(lam)))
    if not is_small(low):
        return None
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_small(middle) else (low, middle)
    step = np.zeros(rest.shape)
    step[certain] = -slopes[certain] / eigenvalues[certain]
    step[rest] = -lam * g / (lam**2 + low**2)
    return step
