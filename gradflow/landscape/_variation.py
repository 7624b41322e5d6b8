"""linearised_along(): small deviations from a flow."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core import checks
from .._core.checks import Checked
from .._core.ravel import Ravel
from ..problems import checked_loss
from ._flat import Vector

KRYLOV_SIZE = 40
GAUSS = (0.5 - math.sqrt(3) / 6, 0.5 + math.sqrt(3) / 6)
NEAR, FAR = 0.25 + math.sqrt(3) / 6, 0.25 - math.sqrt(3) / 6
ORDER = 3
"""Of the estimated error of a step in its length."""
SAFETY, LEAST_FACTOR, LARGEST_FACTOR = 0.9, 0.2, 3.0
SHORTEST_STEP = 1e-13
"""Relative to the horizon."""
LARGEST, TINY = 1e150, 1e-300


def linearised_along(
    loss: Checked[Callable[[PyTree], Any]],
    reference: Any,
    perturbation: PyTree,
    ts: Any,
    *,
    rtol: Checked[float] = 1e-6,
) -> PyTree:
    """How a small deviation δ from a flow θ(t) grows or decays, to first order:

        δ̇ = -∇²L(θ(t)) δ,

    and δ̇ = Df(θ(t)) δ for a loss whose flow θ̇ = f(θ) is one in a metric of its own.

    About a flow that runs off to infinity there is no critical point whose eigenvalues
    would say when another flow leaves it; this does. The equation is linear: what is
    returned may have any size.

        >>> import jax.numpy as jnp
        >>> from gradflow.landscape import linearised_along
        >>> loss = lambda x: x[0] ** 2 / 2 - x[0] * x[1] ** 2 / 2
        >>> axis = lambda t: jnp.stack([jnp.exp(-t), 0 * t], axis=1)
        >>> delta = linearised_along(loss, axis, jnp.array([0.0, 1.0]), [0.0, 50.0])
        >>> abs(delta[-1, 1] - jnp.e) < 1e-4  # exp(∫ e^-t)
        Array(True, dtype=bool)

    Each step is Magnus's of fourth order without commutators (Blanes & Moan, 2006): the
    exponentials of two mixtures of the Jacobian at Gauss's nodes, each in a Krylov
    space of Jacobian-vector products.

    **Arguments:**

    - `loss`: any callable from parameters to a scalar.
    - `reference`: the flow: a `gradflow.Flow`, or a function from an array of times to
        the parameters then, stacked along a leading axis.
    - `perturbation`: δ(0), of the structure of the parameters.
    - `ts`: increasing times from zero on, within the flow.
    - `rtol`: of a step, relative to the length of δ.

    **Returns:**

    δ at `ts`, with time as the leading axis of every array.
    """
    times = checks.increasing_times("ts", ts)
    if times[0] < 0:
        raise ValueError(f"`ts` must not be negative, got {times[0]:g}.")
    rtol = checks.positive_number("rtol", rtol)
    states = getattr(reference, "at", reference)
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
    size = float(np.linalg.norm(start))
    if size == 0:
        raise ValueError("`perturbation` must not be zero.")

    field = _Field(loss, ravel)
    # Linear: a unit vector and the logarithm of its length never overflow.
    unit, log_size = start / size, math.log(size)
    out = np.zeros((len(times), ravel.size))
    done = int(times[0] == 0)
    out[:done] = start
    t, end, h = 0.0, float(times[-1]), _first_step(field, y0, float(times[-1]))
    while done < len(times):
        target = float(times[done])
        last = t + h * (1 + 1e-9) >= target
        step = target - t if last else h
        nodes = t + step * np.array([*GAUSS, 0.5])
        new, error = _step(field, _states(states, ravel, nodes), unit, step)
        error /= rtol
        # An error of zero asks for the largest factor, one of NaN for the least.
        factor = SAFETY * max(error, TINY) ** (-1 / ORDER)
        factor = min(factor, LARGEST_FACTOR) if factor > LEAST_FACTOR else LEAST_FACTOR
        if not error <= 1:
            h = step * min(factor, SAFETY)
            if h < SHORTEST_STEP * end:
                raise RuntimeError(
                    "The deviation could not be followed beyond "
                    f"t = {t:g}: no step of time was short enough."
                )
            continue
        t = target if last else t + step
        length = float(np.linalg.norm(new))
        if length == 0:
            raise RuntimeError(f"The deviation vanished in rounding by t = {t:g}.")
        unit, log_size = new / length, log_size + math.log(length)
        # A step that was cut short to reach a time says little of what is possible.
        h = max(h, step * factor) if last else step * factor
        if last:
            if log_size > math.log(LARGEST):
                raise ValueError(
                    "`ts` must end before the deviation leaves the floating numbers, "
                    f"which it does by t = {t:g}."
                )
            out[done] = math.exp(log_size) * unit
            done += 1
    return jax.tree.map(np.asarray, jax.vmap(ravel.unravel)(jnp.asarray(out)))


def _states(
    states: Callable, ravel: Ravel, times: Float[np.ndarray, " k"]
) -> Float[Array, "k n"]:
    found = states(times)
    shapes = [(len(times), *shape) for shape in ravel.shapes]
    leaves = jax.tree.leaves(found)
    if [np.shape(leaf) for leaf in leaves] != shapes:
        raise ValueError(
            "`reference` must give parameters of the shapes of `perturbation`, stacked "
            f"along time, {shapes}, got {[np.shape(leaf) for leaf in leaves]}."
        )
    return jnp.concatenate(
        [jnp.asarray(leaf, jnp.float64).reshape(len(times), -1) for leaf in leaves],
        axis=1,
    )


class _Field(eqx.Module):
    """θ̇ as a function of the flat parameters."""

    loss: Callable
    ravel: Ravel = eqx.field(static=True)

    def __call__(self, y: Vector) -> Vector:
        params = self.ravel.unravel(y)
        gradient = jax.grad(lambda p: jnp.asarray(self.loss(p), jnp.float64))(params)
        return self.ravel.ravel(self.loss.velocity(params, gradient))


def _first_step(field: _Field, y: Vector, end: float) -> float:
    """Of the length in which the Jacobian acts once."""
    norm = float(_jacobian_norm(field, y))
    return min(end, 1 / norm) if norm > 0 and np.isfinite(norm) else end


@eqx.filter_jit
def _jacobian_norm(field: _Field, y: Vector) -> Float[Array, ""]:
    product = jax.linearize(field, y)[1]

    def iterate(_: Any, v: Vector) -> Vector:
        w = product(v / jnp.linalg.norm(v))
        return jnp.where(jnp.any(w != 0), w, v)

    noise = jax.random.normal(jax.random.key(0), y.shape, y.dtype)
    return jnp.linalg.norm(jax.lax.fori_loop(0, 12, iterate, noise))


def _step(
    field: _Field, states: Float[Array, "3 n"], delta: np.ndarray, h: float
) -> tuple[np.ndarray, float]:
    """δ after a step, and its error by comparison with one of second order."""
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
    """exp(a Df(y) + b Df(z))v in the Krylov space of v, and how much leaves it."""
    # XLA takes minutes to compile the exponential of a matrix, SciPy a moment to
    # compute it; imported here, as it is slow to import.
    from scipy.linalg import expm

    (y, z), (a, b) = states, map(jnp.asarray, weights)
    basis, H = map(np.asarray, _arnoldi(field, y, z, a, b, jnp.asarray(v)))
    size = H.shape[1]
    length = float(np.linalg.norm(v))
    # Bordered by a column, the exponential also holds the integral whose last entry
    # says how much would leave (Saad, 1992).
    bordered = np.zeros((size + 1, size + 1))
    bordered[:, :size] = H
    if not np.all(np.isfinite(bordered)):
        return v, np.inf
    E = expm(bordered)
    return length * (E[:size, 0] @ basis[:size]), length * abs(float(E[size, 0]))


@eqx.filter_jit
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

    def extend(j: Any, carry: Any) -> Any:
        basis, H = carry
        w = a * at_y(basis[j]) + b * at_z(basis[j])
        first = basis @ w
        w = w - first @ basis
        second = basis @ w  # once more, as rounding leaves some
        w = w - second @ basis
        norm = jnp.linalg.norm(w)
        # Where the space is exhausted what is left is rounding, not a direction.
        scale = jnp.linalg.norm(first + second)
        real = norm > 1e-14 * (scale + norm)
        column = (first + second).at[j + 1].set(jnp.where(real, norm, 0.0))
        new = jnp.where(real, w / jnp.where(real, norm, 1.0), 0.0)
        return basis.at[j + 1].set(new), H.at[:, j].set(column)

    return jax.lax.fori_loop(0, size, extend, (basis, H))
