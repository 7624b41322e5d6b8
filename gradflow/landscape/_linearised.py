"""linearised_flow(): the flow of a loss's quadratic model about a point."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core import checks
from .._core.checks import Checked
from .._core.compiled import jit
from .._core.ravel import Ravel, path_name
from .._core.types import AnyArray
from ..problems import checked_loss
from ._critical_point import DENSE_SIZE, CriticalPoint
from ._flat_loss import FlatLoss, Vector, flat_loss, look, refuse_not_finite
from ._krylov import Lanczos, lanczos

KRYLOV_SIZE = 96
RELATIVE_ERROR = 1e-10
"""The total error of a matrix-free flow, relative to the largest entry of θ - θ*."""
QUADRATURE_NODES = 64
SHORTEST_PART = 2.0**-40
LARGEST = 1e150
"""The size beyond which the squares of a flow would overflow."""


def linearised_flow(
    loss: Checked[Callable[[PyTree], AnyArray]],
    critical_point: Checked[CriticalPoint | PyTree],
    params: PyTree,
    ts: Checked[Sequence[float] | AnyArray],
) -> PyTree:
    """The flow that starts at `params`, linearised about a critical point θ*:

        θ(t) = θ* + exp(Jt)(θ(0) - θ*),    J = -∇²L(θ*).

        >>> import jax.numpy as jnp
        >>> from gradflow.landscape import linearised_flow
        >>> saddle = lambda x: 0.5 * (x[0] ** 2 - x[1] ** 2)
        >>> linearised_flow(saddle, jnp.zeros(2), jnp.ones(2), [0.0, jnp.log(2.0)])
        array([[1. , 1. ],
               [0.5, 2. ]])

    In general this is the flow of the quadratic model of L about θ*, θ̇ = -g - H(θ - θ*)
    with g = ∇L(θ*) and H = ∇²L(θ*). So the point need not be critical: the result
    includes the term -∫₀ᵗ exp(Js)g ds of its gradient, which is zero where g is.

    Up to 1,500 parameters, and whenever `critical_point` has the whole spectrum, the
    Hessian is diagonalised. Otherwise the exponential is applied in Krylov spaces of
    Hessian-vector products, in as many time steps as it takes to keep the error within
    1e-10 of the largest entry of θ - θ*.

    **Arguments:**

    - `loss`: any callable from parameters to a scalar.
    - `critical_point`: θ*, a `CriticalPoint` or parameters.
    - `params`: θ(0), parameters of the same shapes.
    - `ts`: increasing times, not negative.

    **Returns:**

    The parameters at `ts`, with time as the leading axis of every array.
    """
    times = checks.increasing_times("ts", ts)
    if times[0] < 0:
        raise ValueError(f"`ts` must not be negative, got {times[0]:g}.")
    known = critical_point if isinstance(critical_point, CriticalPoint) else None
    centre = critical_point if known is None else known.params
    checked_loss(loss, params)
    checks.floating_parameters("critical_point", centre)
    _check_alike(centre, params)
    flat, y = flat_loss(loss, centre)
    start = flat.ravel.ravel(params) - y
    if known is not None and known.eigenvectors.shape[1] == y.size:
        gradient = _gradient(flat, y)
        deviations = _modes(
            known.eigenvalues, known.eigenvectors, gradient, start, times
        )
    elif y.size <= DENSE_SIZE:
        local = look(flat, y)
        refuse_not_finite(local.gradient, local.eigenvalues)
        deviations = _modes(
            local.eigenvalues, local.eigenvectors, local.gradient, start, times
        )
    else:
        deviations = _matrix_free(flat, y, start, times)
    _refuse_overflow(deviations, times)
    trajectory = np.asarray(y)[None, :] + deviations
    return jax.tree.map(
        np.asarray, jax.vmap(flat.ravel.unravel)(jnp.asarray(trajectory))
    )


@jit
def _gradient(flat: FlatLoss, y: Vector) -> Vector:
    return flat.gradient(y)


def _check_alike(centre: PyTree, params: PyTree) -> None:
    """Raise a `ValueError` if the two points differ in structure or shapes."""
    ours, theirs = Ravel.of(centre), Ravel.of(params)
    if ours.treedef != theirs.treedef:
        raise ValueError(
            "`params` must have the structure of `critical_point`, "
            f"{ours.treedef}, got {theirs.treedef}."
        )
    if ours.shapes != theirs.shapes:
        places, _ = jtu.tree_flatten_with_path(centre)
        for (path, _), a, b in zip(places, ours.shapes, theirs.shapes, strict=True):
            if a != b:
                raise ValueError(
                    f"`params{path_name(path, prefix='.')}` must have the shape that "
                    f"it has in `critical_point`, {a}, got {b}."
                )


def _refuse_overflow(deviations: np.ndarray, times: np.ndarray) -> None:
    finite = np.all(np.isfinite(deviations), axis=1)
    if not np.all(finite):
        raise ValueError(
            "`ts` must end before the linear flow overflows, which it does at "
            f"t = {times[int(np.argmin(finite))]:g}."
        )


def _growth(rates: np.ndarray, times: np.ndarray) -> np.ndarray:
    """∫₀ᵗ e^(-λs) ds for every time and rate λ, accurate for small λt too."""
    x = -rates[None, :] * times[:, None]
    safe = np.where(x == 0, 1.0, x)
    with np.errstate(over="ignore"):
        return times[:, None] * np.where(x == 0, 1.0, np.expm1(safe) / safe)


def _modes(
    eigenvalues: Float[AnyArray, " n"],
    eigenvectors: Float[AnyArray, "n n"],
    gradient: Vector,
    start: Vector,
    times: np.ndarray,
) -> Float[np.ndarray, "times n"]:
    """θ(t) - θ* mode by mode: c(0) e^(-λt) - g ∫₀ᵗ e^(-λs) ds."""
    rates, V = np.asarray(eigenvalues), np.asarray(eigenvectors)
    c, g = V.T @ np.asarray(start), V.T @ np.asarray(gradient)
    with np.errstate(over="ignore", invalid="ignore"):
        decay = np.exp(-rates[None, :] * times[:, None])
        return (decay * c - _growth(rates, times) * g) @ V.T


class _Stretch(NamedTuple):
    """The linear flow from δ, which is δ + ∫₀ᵗ exp(Js)v ds with the velocity v at δ.

    The integral is applied to v alone, so one Krylov space, that of v, serves both the
    exponential and the term of the gradient."""

    delta: np.ndarray
    speed: float
    space: Lanczos

    @staticmethod
    def start(flat: FlatLoss, y: Vector, delta: np.ndarray) -> "_Stretch":
        """The stretch that starts at y + δ."""
        size = min(KRYLOV_SIZE, y.size)
        speed, space = _krylov_space(flat, y, jnp.asarray(delta), size)
        refuse_not_finite(speed, space.ritz)
        return _Stretch(delta, float(speed), jax.tree.map(np.asarray, space))

    def at(self, spans: np.ndarray) -> Float[np.ndarray, "spans n"]:
        """δ after each of these spans of time."""
        with np.errstate(over="ignore", invalid="ignore"):
            along = (
                self.speed
                * _growth(np.asarray(self.space.ritz), spans)
                * self.space.first
            )
            return self.delta[None, :] + along @ self.space.vectors

    def error(self, span: float) -> float:
        """‖v‖ β ∫₀ᵗ e^(μ(t-s)) |eᵀ ∫₀ˢ exp(-Tr) dr e₁| ds: the part that leaves the
        Krylov space, growing at the largest rate μ in that space (Saad, SIAM J. Numer.
        Anal. 29, 1992)."""
        ritz = np.asarray(self.space.ritz)
        s = np.linspace(0.0, span, QUADRATURE_NODES + 1)
        growth = max(0.0, -float(np.min(ritz)))
        with np.errstate(over="ignore", invalid="ignore"):
            leaking = np.abs(_growth(ritz, s) @ (self.space.first * self.space.last))
            carried = np.exp(growth * (span - s)) * leaking
        return self.speed * float(self.space.beta) * float(np.trapezoid(carried, s))

    def affordable(self, whole: float, rate: float, largest: float) -> float | None:
        """The longest of `whole`, half of it, a quarter, … in which the error grows at
        most at `rate` times the size of δ; None if there is none."""
        span = whole
        while span >= SHORTEST_PART * whole:
            reached = np.max(np.abs(self.at(np.array([span]))))
            size = max(largest, float(reached))
            if np.isfinite(size) and self.error(span) <= rate * span * size:
                return span
            span *= 0.5
        return None


def _matrix_free(
    flat: FlatLoss, y: Vector, start: Vector, times: np.ndarray
) -> Float[np.ndarray, "times n"]:
    """θ(t) - θ*, stretch by stretch: each covers the times up to where its error would
    exceed its share."""
    out = np.zeros((len(times), y.size))
    t, delta, done = 0.0, np.asarray(start), int(times[0] == 0)
    out[:done] = delta
    largest = float(np.max(np.abs(delta)))
    while done < len(times):
        if largest > LARGEST:
            out[done:] = np.inf
            break
        stretch = _Stretch.start(flat, y, delta)
        whole = times[-1] - t
        span = stretch.affordable(whole, RELATIVE_ERROR / times[-1], largest)
        if span is None:
            raise RuntimeError(
                f"The linear flow could not be followed beyond t = {t:g} without the "
                "dense Hessian: no time step was short enough."
            )
        upto = len(times) if span == whole else int(np.searchsorted(times, t + span))
        out[done:upto] = stretch.at(times[done:upto] - t)
        t, delta, done = t + span, stretch.at(np.array([span]))[0], upto
        largest = max(largest, float(np.max(np.abs(delta))))
    return out


@jit
def _krylov_space(
    flat: FlatLoss, y: Vector, delta: Vector, size: int
) -> tuple[Float[Array, ""], Lanczos]:
    """The norm of the velocity -g - Hδ, and its Krylov space."""
    gradient, product = jax.jvp(flat.gradient, (y,), (delta,))
    velocity = -gradient - product
    return jnp.linalg.norm(velocity), lanczos(flat, y, velocity, size)
