"""Newton's method for ∇L = 0 in the directions that are certain to be curved.

Where critical points come in manifolds, the Hessian has eigenvalues that would vanish
on the manifold and, near it, are merely small. A Newton step along such a direction is
a quotient of two small numbers and goes anywhere. What tells these directions from
curved ones is Kantorovich's condition: Newton's step s on eigen-directions whose
eigenvalues are at least |λ| in size finds a critical point near by if

    2 K ‖s‖ ≤ |λ|,    K = ‖∇³L[s]‖ / ‖s‖,

that is, if the Hessian turns by less than half of λ along it. We ask for twice as much
(so that a monkey saddle, where Newton's method just halves the distance, does not
pass), take the largest set of directions that does, and leave the others alone.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ._flat import FlatLoss, Local, Vector, look
from ._krylov import lanczos

MARGIN = 4.0
"""In place of Kantorovich's 2."""
ROUNDS = 8
"""How often K is measured, at most, to find the certain directions."""
CERTAIN_PART = 0.1
"""The part of the gradient that must lie along certain directions for a step there."""
KRYLOV_SIZE = 96
SHORTEST = 2.0**-20
"""A step that must be cut to this part of itself leads nowhere."""
RESTORING_STEPS = 8
SLIDE_TRIES = 8


class View(eqx.Module):
    """The loss about a point y, to second order, along some orthonormal directions,
    the most curved ones first. They span the gradient."""

    y: Vector
    loss: Float[Array, ""]
    gradient: Vector
    gradient_norm: Float[Array, ""]
    eigenvalues: Float[Array, " count"]
    slopes: Float[Array, " count"]
    """The gradient's components along the directions."""
    directions: Float[Array, "count n"]
    certain: Bool[Array, " count"]
    """Along which a Newton step may be taken: the first so many."""
    turning: Float[Array, ""]
    """K."""
    floor: Float[Array, ""]
    """Rounding: what no eigenvalue can be told from zero below."""
    local: Local | None
    """The whole Hessian, if it was written out."""

    @property
    def newton(self) -> Float[Array, " count"]:
        """-slope/λ, the components of Newton's step."""
        resolved = jnp.abs(self.eigenvalues) > self.floor
        return jnp.where(
            resolved, -self.slopes / jnp.where(resolved, self.eigenvalues, 1.0), 0.0
        )

    def norm_along(self, chosen: Bool[Array, " count"]) -> float:
        """The norm of the gradient's part along some directions."""
        return float(jnp.linalg.norm(jnp.where(chosen, self.slopes, 0.0)))

    @property
    def certain_norm(self) -> float:
        return self.norm_along(self.certain)

    @property
    def count(self) -> int:
        return int(jnp.sum(self.certain))

    def resolution(self, tolerance: float) -> float:
        """The size of an eigenvalue that a slope of `tolerance` leaves uncertain."""
        slope = max(float(self.gradient_norm), tolerance)
        return max(float(jnp.sqrt(MARGIN * self.turning * slope)), float(self.floor))


def dense_view(
    flat: FlatLoss, y: Vector, tolerance: Float[Array, ""], gap: Array | None
) -> View:
    """All directions there are."""
    local = look(flat, y)
    order = jnp.argsort(-jnp.abs(local.eigenvalues))
    directions = local.eigenvectors.T[order]
    view = _raw_view(
        flat, y, local.loss, local.gradient, local.eigenvalues[order], directions, local
    )
    return _with_certain(flat, view, tolerance, gap)


def krylov_view(
    flat: FlatLoss, y: Vector, tolerance: Float[Array, ""], gap: Array | None
) -> View:
    """The directions that Newton's step lies in, as Lanczos from the gradient finds
    them: of a multiple eigenvalue one copy, the one that the gradient has a part in."""
    loss, gradient = _value_and_gradient(flat, y)
    space = lanczos(flat, y, gradient, min(KRYLOV_SIZE, y.size))
    order = jnp.argsort(-jnp.abs(space.ritz))
    view = _raw_view(
        flat, y, loss, gradient, space.ritz[order], space.vectors[order], None
    )
    return _with_certain(flat, view, tolerance, gap)


@eqx.filter_jit
def _value_and_gradient(flat: FlatLoss, y: Vector) -> tuple[Float[Array, ""], Vector]:
    return jax.value_and_grad(flat)(y)


def _raw_view(
    flat: FlatLoss,
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
    if gap is not None:
        certain = jnp.abs(view.eigenvalues) > gap
        turning = view.turning
    else:
        certain, turning = _kantorovich(flat, view, tolerance)
    return eqx.tree_at(lambda v: (v.certain, v.turning), view, (certain, turning))


@eqx.filter_jit
def _kantorovich(
    flat: FlatLoss, view: View, tolerance: Float[Array, ""]
) -> tuple[Bool[Array, " count"], Float[Array, ""]]:
    """Which directions are certain, and K.

    A slope counts as `tolerance` at least: an eigenvalue that a shift of the point
    could send through zero, with no slope exceeding the tolerance, is not certain.

    The condition on the first r directions needs K along their own step, so the largest
    r that fulfils it is searched for between one that does and one that does not, by
    what each K that was measured makes of the others.
    """
    sizes = jnp.abs(view.eigenvalues)
    resolved = sizes > view.floor
    slopes = jnp.maximum(jnp.abs(view.slopes), tolerance)
    steps = jnp.where(resolved, slopes / jnp.where(resolved, sizes, 1.0), jnp.inf)
    reach = jnp.sqrt(jnp.cumsum(steps**2))
    # Where there is no step to speak of, the way that the flow would take.
    lowest = view.directions[jnp.argmin(view.eigenvalues)]

    def measure(r: Array) -> tuple[Array, Array]:
        """How many directions fulfil the condition with K along the first r's step."""
        step = jnp.where(jnp.arange(sizes.size) < r, view.newton, 0.0) @ view.directions
        norm = jnp.linalg.norm(step)
        step = jnp.where(norm > 0, step / jnp.where(norm > 0, norm, 1.0), lowest)
        K = flat.turn(view.y, step)
        return jnp.sum(resolved & (MARGIN * K * reach <= sizes)), K

    def narrow(carry: Any) -> Any:
        r, yes, no, turning, i = carry
        fulfil, K = measure(r)
        good = fulfil >= r
        yes, no = jnp.where(good, r, yes), jnp.where(good, no, r)
        turning = jnp.where(good | (yes == 0), K, turning)
        # A set that K refutes names a smaller one; halve if that is known already.
        smaller = jnp.where(fulfil > yes, fulfil, (yes + no) // 2)
        r = jnp.where(good, jnp.minimum(fulfil, no - 1), smaller)
        return r, yes, no, turning, i + 1

    def is_open(carry: Any) -> Any:
        r, yes, no, _, i = carry
        return (i == 0) | ((r > yes) & (r < no) & (i < ROUNDS))

    count = jnp.sum(resolved)
    start = (count, jnp.zeros_like(count), count + 1, jnp.zeros(()), 0)
    _, yes, _, turning, _ = jax.lax.while_loop(is_open, narrow, start)
    return jnp.arange(sizes.size) < yes, turning


@eqx.filter_jit
def _backtracked(
    flat: FlatLoss, y: Vector, step: Vector, norm: Float[Array, ""]
) -> tuple[Vector, Float[Array, ""]]:
    """y + t·step for the first t = 1, ½, ¼ … at which ‖∇L‖ falls; t is zero if none
    is."""

    def falls_not(carry: Any) -> Any:
        _, t, after = carry
        return ~(after <= (1 - 1e-4 * t) * norm) & (t > SHORTEST)

    def shorten(carry: Any) -> Any:
        _, t, _ = carry
        moved = y + 0.5 * t * step
        return moved, 0.5 * t, jnp.linalg.norm(flat.gradient(moved))

    start = (y, jnp.asarray(2.0), jnp.asarray(jnp.inf))
    moved, t, after = jax.lax.while_loop(falls_not, shorten, start)
    fell = after <= (1 - 1e-4 * t) * norm
    return jnp.where(fell, moved, y), jnp.where(fell, t, 0.0)


class Stuck(Exception):
    """The search can go no farther; the reason, in words, and where it was."""

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
        """How many steps have been taken, of any kind."""

    def view(self, y: Vector) -> View:
        gap = None if self.gap is None else jnp.asarray(self.gap)
        return self._look_about(self.flat, y, jnp.asarray(self.tolerance), gap)

    def run(self, view: View) -> View:
        while not view.gradient_norm <= self.tolerance:
            norm = float(view.gradient_norm)
            if view.certain_norm > CERTAIN_PART * norm:
                view = self._step(view)
            elif self.gap is None:
                view = self._slide(view)
            elif view.certain_norm > 0.01 * self.tolerance + 1e-3 * norm:
                view = self._step(view)
            else:
                raise Stuck(
                    "what is left of the gradient lies along directions with "
                    f"|λ| ≤ `gap` = {self.gap:g}, in which it may not move",
                    view,
                    self.steps,
                )
        return view

    def _count(self, view: View) -> None:
        if self.steps >= self.max_steps:
            raise Stuck(
                f"`max_steps` = {self.max_steps} were not enough", view, self.steps
            )
        self.steps += 1

    def _step(self, view: View) -> View:
        """Newton's step along certain directions, shortened until ‖∇L‖ falls."""
        self._count(view)
        step = jnp.where(view.certain, view.newton, 0.0) @ view.directions
        y, t = _backtracked(self.flat, view.y, step, view.gradient_norm)
        if t == 0:
            raise Stuck("no step makes the gradient smaller", view, self.steps)
        return self.view(y)

    def _slide(self, view: View) -> View:
        """A step along uncertain directions, where the gradient has no part to speak of
        elsewhere: Levenberg and Marquardt's, the shortest that makes the linear model
        of the gradient smaller by a factor; then back onto the manifold where the
        gradient vanishes along the certain ones.

        Near a degenerate critical point the gradient is of higher order in the
        distance; each slide then covers a part of the way.
        """
        factor = 0.1
        for _ in range(SLIDE_TRIES):
            self._count(view)
            step = _shortest(view, factor)
            if step is None:
                break
            after = self._restored(view.y + step @ view.directions)
            fell = 1 - float(after.gradient_norm / view.gradient_norm)
            if fell > 0.1 * (1 - factor):
                return after
            factor = 1 - 0.25 * (1 - factor)
        raise Stuck(
            "what is left of the gradient lies along directions whose curvature "
            "cannot be told from zero, and moving along them does not help",
            view,
            self.steps,
        )

    def _restored(self, y: Vector) -> View:
        view = self.view(y)
        for _ in range(RESTORING_STEPS):
            norm = float(view.gradient_norm)
            if norm <= self.tolerance or view.certain_norm <= CERTAIN_PART * norm:
                break
            view = self._step(view)
        return view


def _shortest(view: View, factor: float) -> Float[Array, " count"] | None:
    """s = -λ g/(λ² + μ²) along uncertain directions, with the largest μ at which
    ‖g + λs‖ ≤ factor · ‖g‖; None if there is none."""
    lam = np.asarray(view.eigenvalues)
    floor = float(view.floor)
    rest = ~np.asarray(view.certain) & (np.abs(lam) > floor)
    lam, g = lam[rest], np.asarray(view.slopes)[rest]
    if not g.size:
        return None

    def left(mu: float) -> float:
        return float(np.linalg.norm(g * mu**2 / (lam**2 + mu**2)))

    low, high = floor, 1e3 * float(np.max(np.abs(lam)))
    # What lies in directions without any curvature stays.
    flat = np.sqrt(max(0.0, float(view.gradient_norm) ** 2 - g @ g))
    target = factor * float(view.gradient_norm)
    if np.hypot(left(low), flat) > target:
        return None
    for _ in range(60):
        middle = np.sqrt(low * high)
        low, high = (
            (low, middle) if np.hypot(left(middle), flat) > target else (middle, high)
        )
    step = np.zeros(rest.shape)
    step[rest] = -lam * g / (lam**2 + low**2)
    return jnp.asarray(step)
