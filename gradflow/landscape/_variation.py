"""linearised_along(): small deviations from a flow."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._core import checks
from .._core.checks import Checked
from .._core.compiled import jit
from .._core.power_method import power_method, random_vector
from .._core.ravel import Ravel
from .._core.types import AnyArray
from ..problems import AbstractLoss, checked_loss
from ._flat_loss import Vector

KRYLOV_SIZE = 40
NORM_ITERATIONS = 12
GAUSS = (0.5 - math.sqrt(3) / 6, 0.5 + math.sqrt(3) / 6)
NEAR, FAR = 0.25 + math.sqrt(3) / 6, 0.25 - math.sqrt(3) / 6
ORDER = 3
"""The order of a step's estimated error in the step's length."""
SAFETY, LEAST_FACTOR, LARGEST_FACTOR = 0.9, 0.2, 3.0
SHORTEST_STEP = 1e-13
"""The length below which a step is given up, relative to the horizon."""
LARGEST, TINY = 1e150, 1e-300

FunctionOfTime = Callable[[Float[np.ndarray, " k"]], PyTree]
"""From an array of times to the parameters then, stacked along a leading axis."""


@runtime_checkable
class Trajectory(Protocol):
    """An object that knows its parameters as a function of time, as a `Flow` does."""

    def at(self, t: Float[np.ndarray, " k"], /) -> PyTree:
        """The parameters at the times `t`, stacked along a leading axis."""
        ...


def linearised_along(
    loss: Checked[Callable[[PyTree], AnyArray]],
    reference: Checked[FunctionOfTime | Trajectory],
    perturbation: PyTree,
    ts: Checked[Sequence[float] | AnyArray],
    *,
    rtol: Checked[float] = 1e-6,
) -> PyTree:
    """The growth or decay of a small deviation δ from a flow θ(t), to first order:

        δ̇ = -∇²L(θ(t)) δ,

    and δ̇ = Df(θ(t)) δ for a loss whose flow θ̇ = f(θ) has a metric of its own.

    A flow that tends to infinity has no critical point whose eigenvalues would tell
    when another flow leaves it; this function does. The equation is linear, so that the
    result may have any size.

        >>> import jax.numpy as jnp
        >>> from gradflow.landscape import linearised_along
        >>> loss = lambda x: x[0] ** 2 / 2 - x[0] * x[1] ** 2 / 2
        >>> axis = lambda t: jnp.stack([jnp.exp(-t), 0 * t], axis=1)
        >>> delta = linearised_along(loss, axis, jnp.array([0.0, 1.0]), [0.0, 50.0])
        >>> bool(abs(delta[-1, 1] - jnp.e) < 1e-4)  # exp(∫ e^-t)
        True

    Each step is a commutator-free Magnus step of order four (Blanes & Moan, 2006): the
    exponentials of two linear combinations of the Jacobians at the Gauss nodes, each in
    a Krylov space of Jacobian-vector products.

    **Arguments:**

    - `loss`: any callable from parameters to a scalar.
    - `reference`: the flow θ(t): a function from an array of times to the parameters
        then, stacked along a leading axis, or an object whose method `at` is such a
        function, as a `gradflow.Flow`.
    - `perturbation`: δ(0), with the structure of the parameters.
    - `ts`: increasing times, not negative and within the flow.
    - `rtol`: the error allowed in a step, relative to the length of δ.

    **Returns:**

    δ at `ts`, with time as the leading axis of every array.
    """
    times = checks.increasing_times("ts", ts)
    if times[0] < 0:
        raise ValueError(f"`ts` must not be negative, got {times[0]:g}.")
    rtol = checks.positive_number("rtol", rtol)
    states = reference.at if isinstance(reference, Trajectory) else reference
    if not callable(states):
        raise ValueError(
            "`reference` must be a Flow or a function of an array of times, got "
            f"{type(reference).__name__}."
        )
    checks.floating_parameters("perturbation", perturbation)
    ravel = Ravel.of(perturbation)
    y0 = _states(states, ravel, np.zeros(1))[0]
    if not np.all(np.isfinite(y0)):
        raise ValueError("`reference` must be finite, got NaN or infinity at t = 0.")
    loss = checked_loss(loss, ravel.unravel(y0))
    start = np.asarray(ravel.ravel(perturbation))
    if not np.any(start):
        raise ValueError("`perturbation` must not be zero.")
    out = _follow(
        _Field(loss, ravel), lambda t: _states(states, ravel, t), start, times, rtol
    )
    return jax.tree.map(np.asarray, jax.vmap(ravel.unravel)(jnp.asarray(out)))


def _follow(
    field: "_Field",
    states: Callable[[Float[np.ndarray, " k"]], Float[Array, "k n"]],
    start: Float[np.ndarray, " n"],
    times: Float[np.ndarray, " times"],
    rtol: float,
) -> Float[np.ndarray, "times n"]:
    """The deviation at `times`, by adaptive steps along the flat reference `states`."""
    # The equation is linear: a unit vector and the logarithm of its length never
    # overflow.
    size = float(np.linalg.norm(start))
    unit, log_size = start / size, math.log(size)
    out = np.zeros((len(times), start.size))
    done = int(times[0] == 0)
    out[:done] = start
    t, end = 0.0, float(times[-1])
    h = _first_step(field, states(np.zeros(1))[0], end)
    while done < len(times):
        target = float(times[done])
        last = t + h * (1 + 1e-9) >= target
        step = target - t if last else h
        nodes = t + step * np.array([*GAUSS, 0.5])
        new, error = _step(field, states(nodes), unit, step)
        error /= rtol
        # An error of zero gives the largest factor, NaN the least.
        factor = SAFETY * max(error, TINY) ** (-1 / ORDER)
        factor = min(factor, LARGEST_FACTOR) if factor > LEAST_FACTOR else LEAST_FACTOR
        if not error <= 1:
            h = step * min(factor, SAFETY)
            if h < SHORTEST_STEP * end:
                raise RuntimeError(
                    "The deviation could not be followed beyond "
                    f"t = {t:g}: no time step was short enough."
                )
            continue
        t = target if last else t + step
        length = float(np.linalg.norm(new))
        if length == 0:
            raise RuntimeError(f"The deviation underflowed to zero at t = {t:g}.")
        unit, log_size = new / length, log_size + math.log(length)
        # A step that was cut short to reach a saved time does not show how long a step
        # may be.
        h = max(h, step * factor) if last else step * factor
        if last:
            if log_size > math.log(LARGEST):
                raise ValueError(
                    "`ts` must end before the deviation overflows, which it does at "
                    f"t = {t:g}."
                )
            out[done] = math.exp(log_size) * unit
            done += 1
    return out


def _states(
    states: FunctionOfTime, ravel: Ravel, times: Float[np.ndarray, " k"]
) -> Float[Array, "k n"]:
    """The reference flow at some times, as flat vectors."""
    found = states(times)
    shapes = [(len(times), *shape) for shape in ravel.shapes]
    leaves = jax.tree.leaves(found)
    if [np.shape(leaf) for leaf in leaves] != shapes:
        raise ValueError(
            "`reference` must return parameters of the shapes of `perturbation`, "
            f"stacked along time, {shapes}, got {[np.shape(leaf) for leaf in leaves]}."
        )
    return jnp.concatenate(
        [jnp.asarray(leaf, jnp.float64).reshape(len(times), -1) for leaf in leaves],
        axis=1,
    )


class _Field(eqx.Module):
    """θ̇ as a function of the flat parameters."""

    loss: AbstractLoss
    ravel: Ravel = eqx.field(static=True)

    def __call__(self, y: Vector) -> Vector:
        params = self.ravel.unravel(y)
        gradient = jax.grad(lambda p: jnp.asarray(self.loss(p), jnp.float64))(params)
        return self.ravel.ravel(self.loss.velocity(params, gradient))


def _first_step(field: _Field, y: Vector, end: float) -> float:
    """The time in which the Jacobian changes a vector by about its length."""
    norm = float(_jacobian_norm(field, y))
    return min(end, 1 / norm) if norm > 0 and np.isfinite(norm) else end


@jit
def _jacobian_norm(field: _Field, y: Vector) -> Float[Array, ""]:
    product = jax.linearize(field, y)[1]
    return power_method(product, random_vector(y), NORM_ITERATIONS).size


def _step(
    field: _Field, states: Float[Array, "3 n"], delta: np.ndarray, h: float
) -> tuple[np.ndarray, float]:
    """δ after a step, and its error by comparison with a step of order two."""
    near, far, middle = states
    half, leak_1 = _exponential(field, (near, far), (h * NEAR, h * FAR), delta)
    whole, leak_2 = _exponential(field, (near, far), (h * FAR, h * NEAR), half)
    crude, leak_3 = _exponential(field, (middle, middle), (h, 0.0), delta)
    size = max(float(np.linalg.norm(whole)), float(np.linalg.norm(delta)))
    error = float(np.linalg.norm(whole - crude)) + leak_1 + leak_2 + leak_3
    return whole, error / size


def _exponential(
    field: _Field,
    states: tuple[Vector, Vector],
    weights: tuple[float, float],
    v: np.ndarray,
) -> tuple[np.ndarray, float]:
    """exp(a Df(y) + b Df(z))v in the Krylov space of v, and the size of the part that
    leaves it."""
    # XLA takes minutes to compile the exponential of a matrix (jaxlib 0.10.2), SciPy a
    # moment to compute it. It is imported here because its import is slow.
    from scipy.linalg import expm

    (y, z), (a, b) = states, map(jnp.asarray, weights)
    basis, H = map(np.asarray, _arnoldi(field, y, z, a, b, jnp.asarray(v)))
    size = H.shape[1]
    length = float(np.linalg.norm(v))
    # Bordered by a column, the exponential also contains the integral whose last entry
    # is the part that leaves the space (Saad, 1992).
    bordered = np.zeros((size + 1, size + 1))
    bordered[:, :size] = H
    if not np.all(np.isfinite(bordered)):
        return v, np.inf
    E = expm(bordered)
    return length * (E[:size, 0] @ basis[:size]), length * abs(float(E[size, 0]))


@jit
def _arnoldi(
    field: _Field,
    y: Vector,
    z: Vector,
    a: Float[Array, ""],
    b: Float[Array, ""],
    v: Vector,
) -> tuple[Float[Array, "rows n"], Float[Array, "rows m"]]:
    """An orthonormal basis of v, Av, A²v, … for A = a Df(y) + b Df(z), and A in it."""
    size = min(KRYLOV_SIZE, v.size)
    at_y, at_z = (jax.linearize(field, x)[1] for x in (y, z))
    basis = jnp.zeros((size + 1, v.size), v.dtype).at[0].set(v / jnp.linalg.norm(v))
    H = jnp.zeros((size + 1, size), v.dtype)

    def extend(
        j: Int[Array, ""],
        carry: tuple[Float[Array, "rows n"], Float[Array, "rows m"]],
    ) -> tuple[Float[Array, "rows n"], Float[Array, "rows m"]]:
        basis, H = carry
        w = a * at_y(basis[j]) + b * at_z(basis[j])
        first = basis @ w
        w = w - first @ basis
        second = basis @ w  # once more, because rounding leaves a part
        w = w - second @ basis
        norm = jnp.linalg.norm(w)
        # Where the space is exhausted, the rest is rounding and not a direction.
        scale = jnp.linalg.norm(first + second)
        real = norm > 1e-14 * (scale + norm)
        column = (first + second).at[j + 1].set(jnp.where(real, norm, 0.0))
        new = jnp.where(real, w / jnp.where(real, norm, 1.0), 0.0)
        return basis.at[j + 1].set(new), H.at[:, j].set(column)

    return jax.lax.fori_loop(0, size, extend, (basis, H))
