"""Numerical differentiation formulas (NDF) of order 1 to 5 with a variable,
quasi-constant step.

A step of length h and order k predicts Σ_{j ≤ k} ∇ʲy from the backward differences ∇ʲy
at the start of the step, and solves

    d = c f(t + h, predicted + d) - ψ,    c = h / α_k,    ψ = Σ_{j ≤ k} γ_j ∇ʲy / α_k

for the correction d. The new state is predicted + d, and d is its ∇^{k+1}.

Shampine & Reichelt, "The MATLAB ODE suite", SIAM J. Sci. Comput. 18 (1997).
"""

import functools
from fractions import Fraction

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._types import DiffraxField, RealScalar

MAX_ORDER = 5
ROWS = MAX_ORDER + 1
"""The number of backward differences ∇⁰ … ∇⁵ that are kept."""

# Coefficients by order: table 1 of Shampine & Reichelt.
_KAPPA = np.array([0, -0.1850, -1 / 9, -0.0823, -0.0415, 0])
_GAMMA = np.hstack((0, np.cumsum(1 / np.arange(1, MAX_ORDER + 1))))
ALPHA = (1 - _KAPPA) * _GAMMA
_ERROR = np.append(_KAPPA * _GAMMA + 1 / np.arange(1, MAX_ORDER + 2), np.inf)


#
# Backward differences, from one step to the next
#


def transition(
    corrected: Int[Array, ""], order: Int[Array, ""], excess: Float[Array, ""]
) -> Float[Array, "rows columns"]:
    """The matrix that takes the history, backward differences and correction of a step
    of order `corrected`, to the next step, of order `order` and `1 + excess` times as
    long. Its first rows give the backward differences, the last two the prediction and
    ψ."""
    powers = jnp.stack(
        [jnp.ones_like(excess)] + [excess**p for p in range(1, MAX_ORDER + 1)]
    )
    matrix = powers @ jnp.asarray(_transitions())[corrected, order]
    return matrix.reshape(ROWS + 2, ROWS + 1)


@functools.cache
def _transitions() -> Float[np.ndarray, "corrected order power entries"]:
    """Matrices C[p] for each pair of orders such that Σ_p excessᵖ C[p] takes the
    history to the next step. The rows are the differences ∇⁰ … ∇⁵, corrected at the
    last step's order and rescaled to a step `1 + excess` times as long; the prediction
    Σ_j ∇ʲ; and ψ = Σ_j γ_j ∇ʲ / α."""
    n = MAX_ORDER + 1
    change = _step_change()
    table = np.zeros((n, n, n, ROWS + 2, ROWS + 1))
    for corrected in range(n):
        correction = _correction(corrected)
        for order in range(1, n):
            for power in range(n):
                rescale = np.zeros((ROWS, ROWS)) if power else np.eye(ROWS)
                rescale[: order + 1, : order + 1] = change[
                    power, : order + 1, : order + 1
                ]
                differences = rescale @ correction
                used = differences[: order + 1]
                table[corrected, order, power] = np.vstack(
                    [
                        differences,
                        used.sum(axis=0),
                        _GAMMA[: order + 1] @ used / ALPHA[order],
                    ]
                )
    # Each matrix is stored as a vector, so that a step reads contiguous memory.
    return table.reshape(n, n, n, -1)


def is_correction() -> Bool[Array, "rows_and_correction 1"]:
    """Marks the last row of the history, which holds the correction."""
    return jnp.arange(ROWS + 1)[:, None] == ROWS


def _correction(order: int) -> Float[np.ndarray, "rows rows_and_correction"]:
    """The matrix from predicted differences and the correction d to the differences at
    the new time, where ∇^{order+1} y = d."""
    matrix = np.eye(ROWS, ROWS + 1)
    if order == 0:
        return matrix
    if order + 2 < ROWS:
        matrix[order + 2] = 0
        matrix[order + 2, [order + 1, ROWS]] = -1, 1
    for i in range(min(order + 2, ROWS)):
        matrix[i] = 0
        matrix[i, i : order + 1] = 1
        matrix[i, ROWS] = 1
    return matrix


def _step_change() -> Float[np.ndarray, "power rows rows"]:
    """The matrix that rescales differences to a step `1 + excess` times as long, as a
    polynomial in `excess` (Shampine & Reichelt); exact where `excess` is zero."""
    n = MAX_ORDER + 1

    def polynomials(ratio: tuple[int, int]) -> list[list[list[Fraction]]]:
        """Entry (i, j) is Π_{l ≤ i} (l - 1 - j·r) / l with r = ratio[0] + ratio[1]·x,
        as coefficients of powers of x."""
        out = []
        for i in range(n):
            row = []
            for j in range(n):
                entry = [Fraction(1)] + [Fraction(0)] * (n - 1)
                for step in range(1, i + 1):
                    constant = Fraction(step - 1 - j * ratio[0], step)
                    slope = Fraction(-j * ratio[1], step)
                    entry = [
                        constant * entry[p] + (slope * entry[p - 1] if p else 0)
                        for p in range(n)
                    ]
                row.append(entry)
            out.append(row)
        return out

    R, U = polynomials((1, 1)), polynomials((1, 0))
    return np.array(
        [
            [
                [
                    float(sum(R[i][m][p] * U[m][j][0] for m in range(n)))
                    for i in range(n)
                ]
                for j in range(n)
            ]
            for p in range(n)
        ]
    )


#
# Error estimates, and the choice of order and step size
#


def error_sizes(
    d: Float[Array, " n"],
    rows: Float[Array, "rows n"],
    order: Int[Array, ""],
    weights: Float[Array, " n"],
) -> Float[Array, "3"]:
    """Error estimates at the order below, this order and the order above, from the
    differences in the first rows of `rows`. Above the highest order it is infinite."""
    around = jax.lax.dynamic_slice_in_dim(rows, order, 2)
    scaled = [x * weights for x in (around[0] + d, d, d - around[1])]
    sizes = jnp.sqrt(jnp.stack([x @ x for x in scaled]) / d.size)
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(_ERROR), order - 1, 3) * sizes


def next_step(
    errors: Float[Array, "3"],
    order: Int[Array, ""],
    converged: Bool[Array, ""],
    steps_at_h: Int[Array, ""],
) -> tuple[Bool[Array, ""], Float[Array, ""], Int[Array, ""]]:
    """Whether the step is accepted, the factor to the next step's length, and the next
    step's order."""
    accepted = converged & (errors[1] <= 1)
    orders = order + jnp.arange(-1, 2)
    factors = jnp.maximum(errors, 1e-10) ** (-1.0 / (orders + 1))
    factors = jnp.where((orders >= 1) & (orders <= MAX_ORDER), factors, 0.0)
    best = 0.9 * jnp.max(factors)
    # A change of step costs accuracy in the differences: only when it is worth it.
    change = (steps_at_h > order) & (best > 1.2)
    next_order = jnp.where(accepted & change, order + jnp.argmax(factors) - 1, order)
    grown = jnp.where(change, jnp.minimum(best, 5.0), 1.0)
    shrunk = jnp.where(converged, jnp.clip(0.9 * factors[1], 0.2, 0.9), 0.4)
    return accepted, jnp.where(accepted, grown, shrunk), next_order.astype(jnp.int32)


def as_error(
    accepted: Bool[Array, ""],
    factor: Float[Array, ""],
    y0: Float[Array, " n"],
    y1: Float[Array, " n"],
    rtol: RealScalar,
    atol: RealScalar,
) -> Float[Array, " n"]:
    """The error for which `diffrax.PIDController`, which multiplies the step by
    safety / ‖error / tolerance‖, makes the same decision."""
    tolerance = atol + rtol * jnp.maximum(jnp.abs(y0), jnp.abs(y1))
    return jnp.where(accepted, 0.9, 0.9 * (1 + 1e-9)) / factor * tolerance


#
# Dense output
#


class NDFInterpolation(diffrax.AbstractLocalInterpolation):
    """The polynomial through the new point and the last `order` points before it: with
    x = (t - t₀)/h and the backward differences at t₀,

        Σ_{j ≤ order} ∇ʲy · x(x+1)…(x+j-1)/j!  +  d · x(x+1)…(x+order-1)/order!
    """

    t0: DiffraxField
    t1: DiffraxField
    differences: Float[Array, "orders n"]
    correction: Float[Array, " n"]
    order: Float[Array, ""]
    y0: PyTree
    """Used only for its structure."""

    def evaluate(
        self, t0: RealScalar, t1: RealScalar | None = None, left: bool = True
    ) -> PyTree:
        if t1 is not None:
            at_t1, at_t0 = self.evaluate(t1), self.evaluate(t0)
            return jax.tree.map(jnp.subtract, at_t1, at_t0)
        # A step of length zero occurs only where its result is discarded.
        h = jnp.where(self.t1 == self.t0, 1.0, self.t1 - self.t0)
        j = jnp.arange(MAX_ORDER + 1)
        factors = ((t0 - self.t0) / h + j - 1) / jnp.maximum(j, 1)
        basis = jnp.cumprod(jnp.where(j == 0, 1.0, factors))
        terms = jnp.where(j <= self.order, basis, 0.0) @ self.differences
        last = jnp.sum(jnp.where(j == self.order, basis, 0.0))
        _, unravel = ravel_pytree(self.y0)
        return unravel(terms + last * self.correction)
