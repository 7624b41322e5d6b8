"""An implicit multistep method for gradient flows, without matrices.

The Jacobian of a gradient flow is -∇²L: symmetric, and late in training with a handful
of large eigenvalues above a crowd of small ones. Newton's method for an implicit step
then needs no factorisation, only the top of the spectrum.
"""

from typing import Any, ClassVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

MAX_ORDER = 5
MAX_NEWTON = 4
NEWTON_TOLERANCE = 0.03
"""Of the error allowed in a step, how much Newton's method may leave."""
STRICTNESS = 0.02
"""Errors of a multistep method add up over many steps, so that a step is held to this
fraction of the tolerances: then the error of a whole flow stays near them."""
FIRST_REFRESHES, LATER_REFRESHES, DESPERATE_REFRESHES = 4, 1, 3

# Coefficients by order: Shampine & Reichelt, "The MATLAB ODE suite", table 1.
_KAPPA = np.array([0, -0.1850, -1 / 9, -0.0823, -0.0415, 0])
_GAMMA = np.hstack((0, np.cumsum(1 / np.arange(1, MAX_ORDER + 1))))
_ALPHA = (1 - _KAPPA) * _GAMMA
_ERROR = _KAPPA * _GAMMA + 1 / np.arange(1, MAX_ORDER + 2)


class _NDFInterpolation(diffrax.AbstractLocalInterpolation):
    """The polynomial through the last `order` + 1 points, from backward differences."""

    t0: Any
    t1: Any
    differences: Float[Array, "orders n"]
    order: Float[Array, ""]
    y0: Any
    """For its structure only."""

    def evaluate(self, t0: Any, t1: Any = None, left: bool = True) -> Any:
        if t1 is not None:
            at_t1, at_t0 = self.evaluate(t1), self.evaluate(t0)
            return jax.tree.map(jnp.subtract, at_t1, at_t0)
        h, j = self.t1 - self.t0, jnp.arange(MAX_ORDER)
        # A step of no length occurs only where its outcome is thrown away.
        h = jnp.where(h == 0, 1.0, h)
        factors = (t0 - (self.t1 - h * j)) / (h * (1 + j))
        basis = jnp.where(j < self.order, jnp.cumprod(factors), 0.0)
        _, unravel = ravel_pytree(self.y0)
        return unravel(self.differences[0] + basis @ self.differences[1:])


class _StepTolerances(eqx.Module):
    """What diffrax fills in from the step size controller, as for a root finder."""

    rtol: Any
    atol: Any
    norm: Any


class _State(eqx.Module):
    differences: Float[Array, "rows n"]
    """Backward differences ∇⁰y … ∇⁷y at step size `h`."""
    order: Int[Array, ""]
    h: Float[Array, ""]
    steps_at_h: Int[Array, ""]
    eigenvectors: Float[Array, "rank n"]
    eigenvalues: Float[Array, " rank"]
    age: Int[Array, ""]
    """Steps since the eigenpairs were followed."""


def _adaptive_tolerances() -> Any:
    # diffrax's public way to its sentinel for "as the step size controller has it".
    finder: Any = diffrax.with_stepsize_controller_tols(optx.Newton)()
    return _StepTolerances(finder.rtol, finder.atol, finder.norm)


class LowRankNDF(diffrax.AbstractImplicitSolver, diffrax.AbstractAdaptiveSolver):
    """Numerical differentiation formulas of order 1 to 5 with a variable,
    quasi-constant step (Shampine & Reichelt 1997), for vector fields whose Jacobian is
    symmetric: gradient flows ẏ = -∇L(y).

    An implicit step solves y - c f(y) = ψ by Newton iterations with the inverse of
    I + cH, H = ∇²L, taken as

        (1 + cμ)⁻¹ (I - VᵀV) + Vᵀ (I + cΛ)⁻¹ V,

    where the rows of V and Λ are the top `rank` eigenpairs of H, followed along the
    flow by subspace iteration on batched Hessian-vector products, and 2μ is the least
    of Λ, which bounds what V leaves out. The iteration contracts however stiff the rest
    is, so that too small a `rank` costs steps, but never a stall. No n×n matrix is
    formed; memory is (rank + 15)·n numbers.

    Use it with `diffrax.PIDController` at its default coefficients: order and step size
    are chosen together, in here, and handed to the controller as the error that makes
    it choose this step size.
    """

    rank: int = 12
    refresh_every: int = 10
    """Accepted steps after which the eigenpairs are followed; earlier where Newton
    fails."""
    root_finder: Any = eqx.field(default_factory=_adaptive_tolerances)
    root_find_max_steps: int = MAX_NEWTON

    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar = _NDFInterpolation

    def order(self, terms: diffrax.AbstractTerm) -> int:
        return MAX_ORDER

    def error_order(self, terms: diffrax.AbstractTerm) -> int:
        # The controller's factor is then safety / error: see `_next_factor`.
        return 1

    def func(self, terms: diffrax.AbstractTerm, t0: Any, y0: Any, args: Any) -> Any:
        return terms.vf(t0, y0, args)

    def init(
        self, terms: diffrax.AbstractTerm, t0: Any, t1: Any, y0: Any, args: Any
    ) -> _State:
        y, field = _flat_field(terms, t0, t1, y0, args)
        h = t1 - t0
        rows = jnp.zeros((MAX_ORDER + 3, y.size), y.dtype)
        rank = min(self.rank, y.size)
        noise = jax.random.normal(jax.random.key(0), (rank, y.size), y.dtype)
        V, eigenvalues = _follow_eigenpairs(field, y, noise, FIRST_REFRESHES)
        zero = jnp.zeros((), jnp.int32)
        return _State(
            differences=rows.at[0].set(y).at[1].set(h * field(y)),
            order=zero + 1,
            h=jnp.asarray(h),
            steps_at_h=zero,
            eigenvectors=V,
            eigenvalues=eigenvalues,
            age=zero,
        )

    def step(
        self,
        terms: diffrax.AbstractTerm,
        t0: Any,
        t1: Any,
        y0: Any,
        args: Any,
        solver_state: _State,
        made_jump: Any,
    ) -> tuple[Any, Any, dict[str, Any], _State, diffrax.RESULTS]:
        _, unravel = ravel_pytree(y0)
        y_start, field = _flat_field(terms, t0, t1, y0, args)
        h, k = t1 - t0, solver_state.order
        changed = jnp.abs(h / solver_state.h - 1) > 1e-10
        D = jax.lax.cond(
            changed,
            lambda D: _rescaled(D, k, h / solver_state.h),
            lambda D: D,
            solver_state.differences,
        )
        steps_at_h = jnp.where(changed, 0, solver_state.steps_at_h)

        # Predict, then correct by Newton's method.
        used = jnp.arange(MAX_ORDER + 1) <= k
        alpha = jnp.asarray(_ALPHA)[k]
        predicted = jnp.where(used, 1.0, 0.0) @ D[: MAX_ORDER + 1]
        psi = (jnp.where(used, _GAMMA, 0.0) @ D[: MAX_ORDER + 1]) / alpha
        c = h / alpha
        rtol, atol = self.root_finder.rtol, self.root_finder.atol
        tolerance = STRICTNESS * (atol + rtol * jnp.abs(predicted))

        def newton(V: Array, eigenvalues: Array) -> tuple[Array, Array, Array]:
            return _newton(field, predicted, psi, c, V, eigenvalues, tolerance)

        def follow(V: Array, iterations: int) -> tuple[Array, Array]:
            return _follow_eigenpairs(field, y_start, V, iterations)

        due = solver_state.age >= self.refresh_every
        V, eigenvalues = jax.lax.cond(
            due,
            lambda: follow(solver_state.eigenvectors, LATER_REFRESHES),
            lambda: (solver_state.eigenvectors, solver_state.eigenvalues),
        )
        y, d, at_once = newton(V, eigenvalues)

        def again() -> tuple[Array, ...]:
            better = follow(V, DESPERATE_REFRESHES)
            return (*better, *newton(*better))

        V, eigenvalues, y, d, converged = jax.lax.cond(
            at_once, lambda: (V, eigenvalues, y, d, at_once), again
        )

        # Judge, choose the next order and step.
        D = _advanced(D, d, k)
        tolerance = atol + rtol * jnp.maximum(jnp.abs(y), jnp.abs(y_start))
        accepted, factor, next_order = _next_factor(
            D, d, k, STRICTNESS * tolerance, converged, steps_at_h + 1
        )
        # The controller multiplies the step by safety / ‖error / tolerance‖.
        error = jnp.where(accepted, 0.9, 0.9 * (1 + 1e-9)) / factor * tolerance
        state = _State(
            differences=D,
            order=next_order,
            h=jnp.asarray(h),
            steps_at_h=jnp.where(next_order == k, steps_at_h + 1, 0),
            eigenvectors=V,
            eigenvalues=eigenvalues,
            age=jnp.where(due | ~at_once, 0, solver_state.age + 1),
        )
        dense = {
            "differences": D[: MAX_ORDER + 1],
            # Not a whole number, as diffrax fills what is not yet saved with infinity.
            "order": k.astype(y.dtype),
            "y0": y0,
        }
        return unravel(y), unravel(error), dense, state, diffrax.RESULTS.successful


def _flat_field(
    terms: diffrax.AbstractTerm, t0: Any, t1: Any, y0: Any, args: Any
) -> tuple[Float[Array, " n"], Any]:
    """The state as one vector, and the vector field at t1 on such vectors."""
    y, unravel = ravel_pytree(y0)
    h = t1 - t0
    control = terms.contr(t0, t1)
    # Per unit of time, whatever the direction of time is.
    unit = jax.tree.map(lambda x: x / jnp.where(h == 0, 1.0, h), control)

    def field(y: Float[Array, " n"]) -> Float[Array, " n"]:
        return ravel_pytree(terms.vf_prod(t1, unravel(y), args, unit))[0]

    return y, field


def _follow_eigenpairs(
    field: Any, y: Float[Array, " n"], V: Float[Array, "rank n"], iterations: int
) -> tuple[Float[Array, "rank n"], Float[Array, " rank"]]:
    """Subspace iteration for the top eigenpairs of H = -∂f/∂y, warm-started from the
    rows of V, and a Rayleigh-Ritz step."""
    _, jvp = jax.linearize(field, y)
    hessian = jax.vmap(lambda v: -jvp(v))
    for _ in range(iterations):
        Q, _ = jnp.linalg.qr(hessian(V).T)
        V = Q.T
    S = V @ hessian(V).T
    eigenvalues, rotation = jnp.linalg.eigh(0.5 * (S + S.T))
    return rotation.T @ V, eigenvalues


def _newton(
    field: Any,
    predicted: Float[Array, " n"],
    psi: Float[Array, " n"],
    c: Float[Array, ""],
    V: Float[Array, "rank n"],
    eigenvalues: Float[Array, " rank"],
    tolerance: Float[Array, " n"],
) -> tuple[Float[Array, " n"], Float[Array, " n"], Bool[Array, ""]]:
    """Solve d = c f(predicted + d) - ψ: the new state, d, and whether it converged."""
    complete = V.shape[0] == V.shape[1]
    mu = jnp.where(complete, 0.0, 0.5 * jnp.min(jnp.abs(eigenvalues)))
    rest = 1 / (1 + c * mu)
    # Where curvature is so negative that I + cH nears a singularity, the step is too
    # long to be accepted; the floor keeps the iteration finite until it is shortened.
    top = 1 / jnp.maximum(1 + c * eigenvalues, 0.2) - rest

    def proceed(carry: tuple) -> Bool[Array, ""]:
        iteration, _, _, converged, diverged, _ = carry
        return (iteration < MAX_NEWTON) & ~converged & ~diverged

    def iterate(carry: tuple) -> tuple:
        iteration, y, d, _, _, previous = carry
        residual = c * field(y) - psi - d
        change = rest * residual + (top * (V @ residual)) @ V
        size = jnp.sqrt(jnp.mean((change / tolerance) ** 2))
        first = iteration == 0
        rate = jnp.where(first, 0.0, size / jnp.where(previous == 0, 1.0, previous))
        remaining = MAX_NEWTON - iteration - 1
        hopeless = rate**remaining / (1 - rate) * size > NEWTON_TOLERANCE
        diverged = (~first & ((rate >= 1) | hopeless)) | ~jnp.isfinite(size)
        close = jnp.where(
            first,
            size < 1e-2 * NEWTON_TOLERANCE,
            rate / (1 - rate) * size < NEWTON_TOLERANCE,
        )
        y = jnp.where(diverged, y, y + change)
        d = jnp.where(diverged, d, d + change)
        return iteration + 1, y, d, close & ~diverged, diverged, size

    false = jnp.zeros((), bool)
    start = (jnp.zeros((), jnp.int32), predicted, jnp.zeros_like(predicted))
    _, y, d, converged, _, _ = jax.lax.while_loop(
        proceed, iterate, (*start, false, false, jnp.zeros((), predicted.dtype))
    )
    return y, d, converged


def _rescaled(
    D: Float[Array, "rows n"], order: Int[Array, ""], ratio: Float[Array, ""]
) -> Float[Array, "rows n"]:
    """Differences for a step that is `ratio` times as long (Shampine & Reichelt)."""
    size = MAX_ORDER + 1
    used = jnp.arange(size) <= order
    change = _step_change(ratio) @ _step_change(jnp.ones((), D.dtype))
    change = jnp.where(used[:, None] & used[None, :], change, jnp.eye(size))
    return jnp.concatenate([change.T @ D[:size], D[size:]])


def _step_change(ratio: Float[Array, ""]) -> Float[Array, "orders orders"]:
    i, j = jnp.arange(1, MAX_ORDER + 1)[:, None], jnp.arange(1, MAX_ORDER + 1)[None, :]
    factors = jnp.pad((i - 1 - ratio * j) / i, ((1, 0), (1, 0)))
    return jnp.cumprod(factors.at[0].set(1.0), axis=0)


def _advanced(
    D: Float[Array, "rows n"], d: Float[Array, " n"], order: Int[Array, ""]
) -> Float[Array, "rows n"]:
    """Differences at the new time, where ∇^{order+1} y = d."""
    D = D.at[order + 2].set(d - D[order + 1]).at[order + 1].set(d)
    i, j = jnp.arange(MAX_ORDER + 3)[:, None], jnp.arange(MAX_ORDER + 3)[None, :]
    # Each difference gains all that are above it, up to order + 1.
    gains = (j >= i) & (j <= order + 1)
    return jnp.where(i <= order + 1, gains, i == j).astype(D.dtype) @ D


def _next_factor(
    D: Float[Array, "rows n"],
    d: Float[Array, " n"],
    order: Int[Array, ""],
    tolerance: Float[Array, " n"],
    converged: Bool[Array, ""],
    steps_at_h: Int[Array, ""],
) -> tuple[Bool[Array, ""], Float[Array, ""], Int[Array, ""]]:
    """Whether the step is accepted, the factor of the next step, and its order."""

    def size(x: Float[Array, " n"]) -> Float[Array, ""]:
        return jnp.sqrt(jnp.mean((x / tolerance) ** 2))

    def factor(error: Float[Array, ""], of_order: Any) -> Float[Array, ""]:
        return jnp.maximum(error, 1e-10) ** (-1.0 / (of_order + 1))

    constants = jnp.asarray(_ERROR)
    error = constants[order] * size(d)
    accepted = converged & (error <= 1)
    lower = constants[order - 1] * size(D[order])
    upper = constants[jnp.minimum(order + 1, MAX_ORDER)] * size(D[order + 2])
    factors = jnp.stack(
        [
            jnp.where(order > 1, factor(lower, order - 1), 0.0),
            factor(error, order),
            jnp.where(order < MAX_ORDER, factor(upper, order + 1), 0.0),
        ]
    )
    best = 0.9 * jnp.max(factors)
    # A change of step costs accuracy in the differences: only when it is worth it.
    change = (steps_at_h > order) & (best > 1.2)
    next_order = jnp.where(accepted & change, order + jnp.argmax(factors) - 1, order)
    grown = jnp.where(change, jnp.minimum(best, 5.0), 1.0)
    shrunk = jnp.where(converged, jnp.clip(0.9 * factors[1], 0.2, 0.9), 0.4)
    return accepted, jnp.where(accepted, grown, shrunk), next_order.astype(jnp.int32)
