"""An implicit multistep method for gradient flows, without matrices.

The Jacobian of a gradient flow is -∇²L: symmetric, and late in training with a handful
of large eigenvalues above a crowd of small ones. Newton's method for an implicit step
then needs no factorisation, only the top of the spectrum.
"""

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from ._curvature import Curvature
from ._flat import flat_field
from ._work import CountedError, Verdict, work

MAX_ORDER = 5
ROWS = MAX_ORDER + 1
"""Backward differences ∇⁰ … ∇⁵ that are kept."""
MAX_NEWTON = 6
NEWTON_TOLERANCE = 0.1
"""Of the error allowed in a step, how much Newton's method may leave."""
STRICTNESS = 0.01
"""Errors of a multistep method add up over many steps, so that a step is held to this
fraction of the tolerances: then the error of a whole flow stays near them."""
SLOW = 0.5
"""A contraction of Newton's method that is worth new eigenpairs."""
SMALL, SMALL_RANK, LARGE_RANK = 2**13, 16, 48
RECENT = 5
"""Steps for which eigenpairs count as new: where Newton's method fails with these, more
of the same would not mend it."""
GOING, DONE, FAILED = 1.0, 0.0, -1.0
MAX_CONJUGATE_GRADIENTS, LINEAR_TOLERANCE = 25, 0.02

# Coefficients by order: Shampine & Reichelt, "The MATLAB ODE suite", table 1.
_KAPPA = np.array([0, -0.1850, -1 / 9, -0.0823, -0.0415, 0])
_GAMMA = np.hstack((0, np.cumsum(1 / np.arange(1, MAX_ORDER + 1))))
_ALPHA = (1 - _KAPPA) * _GAMMA
_ERROR = np.append(_KAPPA * _GAMMA + 1 / np.arange(1, MAX_ORDER + 2), np.inf)


class _NDFInterpolation(diffrax.AbstractLocalInterpolation):
    """The polynomial through the new point and the last `order` before it: with
    x = (t - t₀)/h and the backward differences at t₀,

        Σ_{j ≤ order} ∇ʲy · x(x+1)…(x+j-1)/j!  +  d · x(x+1)…(x+order-1)/order!
    """

    t0: Any
    t1: Any
    differences: Float[Array, "orders n"]
    correction: Float[Array, " n"]
    order: Float[Array, ""]
    y0: Any
    """For its structure only."""

    def evaluate(self, t0: Any, t1: Any = None, left: bool = True) -> Any:
        if t1 is not None:
            at_t1, at_t0 = self.evaluate(t1), self.evaluate(t0)
            return jax.tree.map(jnp.subtract, at_t1, at_t0)
        # A step of no length occurs only where its outcome is thrown away.
        h = jnp.where(self.t1 == self.t0, 1.0, self.t1 - self.t0)
        j = jnp.arange(MAX_ORDER + 1)
        factors = ((t0 - self.t0) / h + j - 1) / jnp.maximum(j, 1)
        basis = jnp.cumprod(jnp.where(j == 0, 1.0, factors))
        terms = jnp.where(j <= self.order, basis, 0.0) @ self.differences
        last = jnp.sum(jnp.where(j == self.order, basis, 0.0))
        _, unravel = ravel_pytree(self.y0)
        return unravel(terms + last * self.correction)


class _StepTolerances(eqx.Module):
    """What diffrax fills in from the step size controller, as for a root finder."""

    rtol: Any
    atol: Any
    norm: Any


class _State(eqx.Module):
    history: Float[Array, "rows_and_correction n"]
    """Backward differences ∇⁰y … ∇⁵y before the last step, for steps of length `h`, and
    what it added to what they predict."""
    corrected_order: Int[Array, ""]
    """The order of the last step; zero before the first."""
    order: Int[Array, ""]
    h: Float[Array, ""]
    steps_at_h: Int[Array, ""]
    curvature: Curvature
    age: Int[Array, ""]
    """Steps since the eigenpairs were followed; zero where they are those of the next
    step."""
    rate: Float[Array, ""]
    """At which Newton's method converged."""


def _adaptive_tolerances() -> Any:
    # diffrax's public way to its sentinel for "as the step size controller has it".
    finder: Any = diffrax.with_stepsize_controller_tols(optx.Newton)()
    return _StepTolerances(finder.rtol, finder.atol, finder.norm)


class LowRankNDF(diffrax.AbstractImplicitSolver, diffrax.AbstractAdaptiveSolver):
    """Numerical differentiation formulas of order 1 to 5 with a variable,
    quasi-constant step (Shampine & Reichelt 1997), for vector fields whose Jacobian is
    symmetric: gradient flows ẏ = -∇L(y).

    An implicit step solves y - c f(y) = ψ by Newton iterations with an approximate
    inverse of I + cH, H = ∇²L, from the top eigenpairs of H (see `Curvature`), as many
    as matter to the step and at most `rank`. They are followed along the flow on
    Hessian-vector products, as differences of the vector field, when Newton's method
    gets slow and at the latest after `refresh_every` steps. Where it fails, the same
    step is tried with new eigenpairs, then with conjugate gradients on the whole of
    I + cH, preconditioned by that inverse; only then is it shortened. No n×n matrix is
    formed, and memory is linear in n: see `memory`.

    Use it with `diffrax.PIDController` at its default coefficients: order and step size
    are chosen together, in here, and handed to the controller as the error that makes
    it choose this step size.
    """

    rank: int | None = None
    """The most eigenpairs that are followed; by default 16, and 48 where a state has
    more than 8,192 numbers: they cost more evaluations there than arithmetic."""
    refresh_every: int = 30
    counts_work: bool = False
    """Whether the error estimate comes with a count, for `ResumableController`."""
    pauses: bool = False
    """Whether a step that wants new eigenpairs ends the solve, with what it has, for
    whoever then calls `renewed` and goes on: a loop of steps without this rare and
    large piece of work compiles to something much faster. Needs `counts_work`."""
    root_finder: Any = eqx.field(default_factory=_adaptive_tolerances)
    root_find_max_steps: int = MAX_NEWTON

    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar = _NDFInterpolation
    starting_evaluations: ClassVar = 1
    """By `init`."""

    def __check_init__(self) -> None:
        given = {"refresh_every": self.refresh_every}
        if self.rank is not None:
            given["rank"] = self.rank
        for name, value in given.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`{name}` must be a whole number of at least 1, got {value!r}."
                )

    def memory(self, size: int) -> int:
        """Bytes that a solve of so many numbers takes, but for its dense output: four
        states, three of their eigenvectors in single precision, and as many in double
        where these are renewed."""
        return 8 * size * (4 * (ROWS + 1) + 9 * self._rank(size) // 2)

    def _rank(self, size: int) -> int:
        default = SMALL_RANK if size <= SMALL else LARGE_RANK
        return min(default if self.rank is None else self.rank, size)

    def order(self, terms: diffrax.AbstractTerm) -> int:
        return MAX_ORDER

    def error_order(self, terms: diffrax.AbstractTerm) -> int:
        # The controller's factor is then safety / error: see `_as_error`.
        return 1

    def func(self, terms: diffrax.AbstractTerm, t0: Any, y0: Any, args: Any) -> Any:
        return terms.vf(t0, y0, args)

    def init(
        self, terms: diffrax.AbstractTerm, t0: Any, t1: Any, y0: Any, args: Any
    ) -> _State:
        y, at = flat_field(terms, t0, t1, y0, args)
        h, zero = jnp.asarray(t1 - t0), jnp.zeros((), jnp.int32)
        history = jnp.zeros((ROWS + 1, y.size), y.dtype)
        return _State(
            history=history.at[0].set(y).at[1].set(h * at(t0, y)),
            corrected_order=zero,
            order=zero + 1,
            h=h,
            steps_at_h=zero,
            # Nothing is known yet: the first step's failure will see to it, if any.
            curvature=Curvature.unknown(y.size, self._rank(y.size)),
            age=zero + 1,
            rate=jnp.ones(()),
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
        y_start, at = flat_field(terms, t0, t1, y0, args)
        field = functools.partial(at, t1)
        state, k = solver_state, solver_state.order
        h = t1 - t0
        excess = h / state.h - 1
        # The clock's rounding alone is not a change of step.
        steps_at_h = jnp.where(jnp.abs(excess) > 1e-6, 0, state.steps_at_h)
        coefficients = _transition(state.corrected_order, k, excess)
        rows = coefficients @ state.history
        predicted, psi = rows[ROWS], rows[ROWS + 1]
        c = h / jnp.asarray(_ALPHA)[k]
        rtol, atol = self.root_finder.rtol, self.root_finder.atol
        tolerance = atol + rtol * jnp.abs(y_start)
        weights = 1 / (STRICTNESS * tolerance)

        steady = steps_at_h > 0
        equation = _Implicit(field, predicted, psi, c, weights)
        rate = jnp.where(steady, state.rate, 1.0)
        slow = steady & (state.rate > SLOW) & (state.rate < 1) & (state.age >= RECENT)
        due = slow | (state.age >= self.refresh_every)
        if self.pauses:
            newton = _solve_with_eigenpairs(
                equation, state.curvature, state.age < RECENT, rate
            )
            curvature, renewed = state.curvature, jnp.zeros((), bool)
        else:
            newton, curvature, renewed = _solve_implicit(
                equation, state.curvature, due, rate
            )
        d = newton.d
        error = _sizes(d, rows, k, weights)
        accepted, factor, next_order = _next_step(
            error, k, newton.converged, steps_at_h + 1
        )
        new_state = _State(
            # In the prediction's place: cheaper than to concatenate them.
            history=jnp.where(_is_correction(), d[None], rows[: ROWS + 1]),
            corrected_order=k,
            order=next_order,
            h=jnp.asarray(h),
            steps_at_h=jnp.where(next_order == k, steps_at_h + 1, 0),
            curvature=curvature,
            age=jnp.where(renewed, 0, state.age + 1),
            rate=jnp.where(renewed, 1.0, newton.rate),
        )
        y = predicted + d
        dense = {
            "differences": rows[:ROWS],
            "correction": d,
            # Not a whole number, as diffrax fills what is not yet saved with infinity.
            "order": k.astype(y.dtype),
            "y0": y0,
        }
        if self.counts_work:
            done = work(
                evaluations=newton.evaluations,
                hessian_products=newton.products,
                newton_failures=self._is_lost(newton.converged, state),
            )
            verdict = self._verdict(accepted, factor, newton.converged, due, state)
            outcome: Any = CountedError(verdict, done)
        else:
            outcome = unravel(_as_error(accepted, factor, y_start, y, rtol, atol))
        return unravel(y), outcome, dense, new_state, diffrax.RESULTS.successful

    def _is_lost(self, converged: Bool[Array, ""], state: _State) -> Bool[Array, ""]:
        """Whether an attempt failed for which no more can be done."""
        return ~converged & (state.age == 0) if self.pauses else ~converged

    def _verdict(
        self,
        accepted: Bool[Array, ""],
        factor: Float[Array, ""],
        converged: Bool[Array, ""],
        due: Bool[Array, ""],
        state: _State,
    ) -> Verdict:
        again = paused = jnp.zeros((), bool)
        if self.pauses:
            again = ~converged & ~self._is_lost(converged, state)
            paused = again | due
        numbers = (accepted, jnp.where(again, 1.0, factor), paused, again)
        return Verdict(*(x.astype(factor.dtype) for x in numbers))

    def renewed(
        self,
        terms: diffrax.AbstractTerm,
        t0: Any,
        t1: Any,
        y0: Any,
        args: Any,
        solver_state: _State,
    ) -> tuple[_State, Float[Array, ""]]:
        """The state with the eigenpairs of the next step, from t0 to t1, and how many
        Hessian products they took: for a solver that `pauses`."""
        state = solver_state
        h = t1 - t0
        _, at = flat_field(terms, t0, t1, y0, args)
        rows = _transition(state.corrected_order, state.order, h / state.h - 1)
        predicted = rows[ROWS] @ state.history
        fitted = state.curvature.fitted(h / jnp.asarray(_ALPHA)[state.order])
        followed = fitted.followed(_hessian(functools.partial(at, t1), predicted))
        # Where the prediction lies beyond what the field can bear, the eigenpairs stay:
        # no later step would come by others, as these count as new.
        sound = followed.is_finite
        followed = jax.tree.map(
            lambda new, old: jnp.where(sound, new, old), followed, fitted
        )
        new = eqx.tree_at(
            lambda s: (s.curvature, s.age, s.rate),
            state,
            (followed, jnp.zeros_like(state.age), jnp.ones_like(state.rate)),
        )
        return new, _products_of(fitted)


def _hessian_product(
    field: Callable, y: Float[Array, " n"], value: Float[Array, " n"]
) -> Callable:
    """v ↦ Hv with H = -∂f/∂y at y, by a difference of f to its `value` there.

    It is wrong by some 1e-8 of H, which is plenty for what approximates an inverse, and
    costs an evaluation: differentiating f, a gradient, costs two to four of them
    (n = 4,096 and 136,192), and takes longer to compile.
    """

    def product(v: Float[Array, " n"]) -> Float[Array, " n"]:
        step = _displacement(y, v)
        return (value - field(y + step * v)) / step

    return product


def _displacement(y: Float[Array, " n"], v: Float[Array, " n"]) -> Float[Array, ""]:
    """How many v away from y a difference is taken."""
    scale = jnp.sqrt(jnp.finfo(y.dtype).eps) * (1 + jnp.linalg.norm(y))
    return scale / jnp.maximum(jnp.linalg.norm(v), 1e-300)


def _products_of(fitted: Curvature) -> Float[Array, ""]:
    """What it takes to follow the eigenpairs: a product each, and the value that these
    are differences to."""
    return fitted.active.astype(jnp.float64) + 1


def _hessian(
    field: Callable, y: Float[Array, " n"]
) -> Callable[[Float[Array, "rank n"], Int[Array, ""]], Float[Array, "rank n"]]:
    """H at y, to be multiplied by the first so many of some vectors, by differences as
    in `_hessian_product`; the other rows are zero."""

    def products(V: Float[Array, "rank n"], count: Int[Array, ""]) -> Any:
        def multiply(i: Any, carry: tuple) -> tuple:
            """The first turn yields the value that the others are differences to: alone
            it would be no part of a loop that is compiled whole."""
            value, W = carry
            row = jnp.maximum(i - 1, 0)
            step = _displacement(y, V[row])
            moved = field(y + jnp.where(i == 0, 0.0, step) * V[row])
            value = jnp.where(i == 0, moved, value)
            return value, W.at[row].set((value - moved) / step)

        # One by one: several at once are no faster on a CPU, and beyond its cache
        # slower.
        start = jnp.zeros_like(y), jnp.zeros_like(V)
        return jax.lax.fori_loop(0, count + 1, multiply, start)[1]

    return products


class _Implicit(eqx.Module):
    """The equation d = c f(predicted + d) - ψ, and how accurately to solve it."""

    field: Callable = eqx.field(static=True)
    predicted: Float[Array, " n"]
    psi: Float[Array, " n"]
    c: Float[Array, ""]
    weights: Float[Array, " n"]

    def residual(self, d: Float[Array, " n"]) -> Float[Array, " n"]:
        return self.c * self.field(self.predicted + d) - self.psi - d

    def size(self, d: Float[Array, " n"]) -> Float[Array, ""]:
        """One where it is as large as the tolerance."""
        scaled = d * self.weights
        return jnp.sqrt(scaled @ scaled / d.size)

    def matrix(self, d: Float[Array, " n"], residual: Float[Array, " n"]) -> Callable:
        """v ↦ (I + cH)v at predicted + d, where the residual is known."""
        value = (residual + self.psi + d) / self.c
        product = _hessian_product(self.field, self.predicted + d, value)
        return lambda v: v + self.c * product(v)


class _Newton(eqx.Module):
    """What Newton's method came to, and what it took."""

    d: Float[Array, " n"]
    converged: Bool[Array, ""]
    rate: Float[Array, ""]
    evaluations: Float[Array, ""]
    products: Float[Array, ""]

    def after(self, before: "_Newton") -> "_Newton":
        """With the work of an earlier attempt at the same equation."""
        return _Newton(
            self.d,
            self.converged,
            self.rate,
            before.evaluations + self.evaluations,
            before.products + self.products,
        )


def _solve_implicit(
    equation: _Implicit,
    curvature: Curvature,
    due: Bool[Array, ""],
    rate: Float[Array, ""],
) -> tuple[_Newton, Curvature, Bool[Array, ""]]:
    """Newton's method with the eigenpairs at hand; where it fails, with new ones, then
    with conjugate gradients. Also the eigenpairs for the next step, and whether they
    are new, as they are when `due`."""
    inverse = curvature.inverse(equation.c)
    newton = _newton(equation, rate, lambda _, residual: (inverse(residual), 0))

    def follow(carry: tuple[_Newton, Curvature, Bool[Array, ""]]) -> tuple:
        newton, curvature, _ = carry
        fitted = curvature.fitted(equation.c)
        followed = fitted.followed(_hessian(equation.field, equation.predicted))
        before = eqx.tree_at(lambda n: n.products, newton, _products_of(fitted))
        recent, rate = jnp.ones((), bool), jnp.ones(())
        last = jax.lax.cond(
            newton.converged,
            lambda: before,
            lambda: _solve_with_eigenpairs(equation, followed, recent, rate).after(
                before
            ),
        )
        return last, followed, jnp.zeros((), bool)

    renew = due | ~newton.converged
    newton, curvature, _ = jax.lax.while_loop(
        lambda carry: carry[2], follow, (newton, curvature, renew)
    )
    return newton, curvature, renew


def _solve_with_eigenpairs(
    equation: _Implicit,
    curvature: Curvature,
    recent: Bool[Array, ""],
    rate: Float[Array, ""],
) -> _Newton:
    """Newton's method with these eigenpairs; where it fails though they are `recent`,
    with conjugate gradients.

    Both in one loop: each more place at which the field is evaluated is compiled by
    itself, and this is half of what there is to compile of a step."""
    inverse = curvature.inverse(equation.c)

    def attempt(carry: tuple[_Newton, Int[Array, ""]]) -> tuple:
        before, attempts = carry
        exactly = attempts > 0

        def solve(d: Array, residual: Array) -> tuple[Array, Array]:
            change = inverse(residual)
            return jax.lax.cond(
                exactly,
                lambda: _conjugate_gradients(
                    equation.matrix(d, residual), inverse, residual, change
                ),
                lambda: (change, jnp.zeros((), jnp.int32)),
            )

        newton = _newton(equation, before.rate, solve).after(before)
        # With conjugate gradients it says nothing of how fast the eigenpairs alone
        # would converge; nor does it of another attempt.
        kept = newton.converged & ~exactly
        rate = jnp.where(kept, newton.rate, jnp.ones(()))
        return eqx.tree_at(lambda n: n.rate, newton, rate), attempts + 1

    def is_open(carry: tuple[_Newton, Int[Array, ""]]) -> Bool[Array, ""]:
        newton, attempts = carry
        return (attempts == 0) | (recent & ~newton.converged & (attempts == 1))

    nothing = jnp.zeros(())
    start = _Newton(
        jnp.zeros_like(equation.psi), jnp.zeros((), bool), rate, nothing, nothing
    )
    return jax.lax.while_loop(is_open, attempt, (start, jnp.zeros((), jnp.int32)))[0]


def _packed(*numbers: Any) -> Float[Array, " numbers"]:
    """One array for all: each more is an operation more in a compiled loop."""
    return jnp.stack([jnp.asarray(x, jnp.float64) for x in numbers])


def _newton(
    equation: _Implicit, expected_rate: Float[Array, ""], solve: Callable
) -> _Newton:
    """Newton's method for d, with changes `solve(d, residual)` of which also the number
    of Hessian products is known."""

    def proceed(carry: tuple) -> Bool[Array, ""]:
        _, status = carry
        return status[0] == GOING

    def iterate(carry: tuple) -> tuple:
        d, (_, previous, rate, iteration, products) = carry
        change, used = solve(d, equation.residual(d))
        size = equation.size(change)
        rate = jnp.where(iteration == 0, rate, size / previous)
        left = jnp.where(rate < 1, rate / (1 - rate), jnp.inf) * size
        close = (left < NEWTON_TOLERANCE) | (size < 1e-2 * NEWTON_TOLERANCE)
        # What would be left after the last iteration.
        far = rate ** (MAX_NEWTON - 1 - iteration) * left > NEWTON_TOLERANCE
        hopeless = (iteration > 0) & far | ~jnp.isfinite(size)
        state = jnp.where(close, DONE, jnp.where(hopeless, FAILED, GOING))
        return d + change, _packed(state, size, rate, iteration + 1, products + used)

    d, (state, _, rate, evaluations, products) = jax.lax.while_loop(
        proceed,
        iterate,
        (jnp.zeros_like(equation.psi), _packed(GOING, 1.0, expected_rate, 0, 0)),
    )
    return _Newton(d, state == DONE, rate, evaluations, products)


def _conjugate_gradients(
    product: Callable,
    inverse: Callable,
    right: Float[Array, " n"],
    z: Float[Array, " n"],
) -> tuple[Float[Array, " n"], Int[Array, ""]]:
    """(I + cH)⁻¹ right by preconditioned conjugate gradients, and the products it took.
    The preconditioner's z = `inverse(right)` is known.

    I + cH is positive definite at every step length that follows an unstable direction
    accurately; where it is not, the iteration stops with what it has, which is at least
    what the preconditioner gives."""

    def proceed(carry: tuple) -> Bool[Array, ""]:
        _, _, _, rz, iteration = carry
        return (rz > LINEAR_TOLERANCE**2 * start) & (
            iteration < MAX_CONJUGATE_GRADIENTS
        )

    def iterate(carry: tuple) -> tuple:
        x, r, p, rz, iteration = carry
        q = product(p)
        curvature = p @ q
        least = jnp.where(iteration == 0, 1.0, 0.0)
        alpha = jnp.where(curvature > 0, rz / curvature, least)
        x, r = x + alpha * p, r - alpha * q
        z = inverse(r)
        new = jnp.where(curvature > 0, r @ z, 0.0)
        return x, r, z + new / rz * p, new, iteration + 1

    start = right @ z
    x, _, _, _, iterations = jax.lax.while_loop(
        proceed,
        iterate,
        (jnp.zeros_like(right), right, z, start, jnp.zeros((), jnp.int32)),
    )
    # No iteration is made from what is not a number, or where the preconditioner is not
    # positive: that must not pass for a solution.
    sound = jnp.isfinite(start) & ((start > 0) | ~jnp.any(right))
    return jnp.where(sound, x, jnp.nan), iterations


@functools.cache
def _transitions() -> np.ndarray:
    """Matrices C[p] for each pair of orders, such that Σ_p excessᵖ C[p] takes the
    history to the next step: the differences ∇⁰ … ∇⁵, corrected at the last step's
    order and rescaled to a step 1 + excess as long; the prediction Σ_j ∇ʲ; and
    ψ = Σ_j γ_j ∇ʲ / α."""
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
                        _GAMMA[: order + 1] @ used / _ALPHA[order],
                    ]
                )
    # The matrices as vectors: so, what a step reads of them lies in one piece.
    return table.reshape(n, n, n, -1)


def _is_correction() -> Bool[Array, "rows_and_correction 1"]:
    return jnp.arange(ROWS + 1)[:, None] == ROWS


def _correction(order: int) -> np.ndarray:
    """From predicted differences and the correction d to the differences at the new
    time, where ∇^{order+1} y = d."""
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


def _step_change() -> np.ndarray:
    """Polynomials in `excess`: coefficient p of the matrix that takes differences to a
    step 1 + excess times as long (Shampine & Reichelt), exact where it is zero."""
    n = MAX_ORDER + 1

    def polynomials(excess: tuple[int, int]) -> list[list[list[Fraction]]]:
        """Entry (i, j) is Π_{l ≤ i} (l - 1 - j·ratio) / l, ratio = excess."""
        out = []
        for i in range(n):
            row = []
            for j in range(n):
                entry = [Fraction(1)] + [Fraction(0)] * (n - 1)
                for step in range(1, i + 1):
                    constant = Fraction(step - 1 - j * excess[0], step)
                    slope = Fraction(-j * excess[1], step)
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


def _transition(
    corrected: Int[Array, ""], order: Int[Array, ""], excess: Float[Array, ""]
) -> Float[Array, "rows columns"]:
    powers = jnp.stack(
        [jnp.ones_like(excess)] + [excess**p for p in range(1, MAX_ORDER + 1)]
    )
    transition = powers @ jnp.asarray(_transitions())[corrected, order]
    return transition.reshape(ROWS + 2, ROWS + 1)


def _sizes(
    d: Float[Array, " n"],
    rows: Float[Array, "rows n"],
    order: Int[Array, ""],
    weights: Float[Array, " n"],
) -> Float[Array, "3"]:
    """Error estimates of the order below, this order and the order above, from the
    differences that `rows` begin with. There is none above the highest order."""
    around = jax.lax.dynamic_slice_in_dim(rows, order, 2)
    scaled = [x * weights for x in (around[0] + d, d, d - around[1])]
    sizes = jnp.sqrt(jnp.stack([x @ x for x in scaled]) / d.size)
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(_ERROR), order - 1, 3) * sizes


def _next_step(
    errors: Float[Array, "3"],
    order: Int[Array, ""],
    converged: Bool[Array, ""],
    steps_at_h: Int[Array, ""],
) -> tuple[Bool[Array, ""], Float[Array, ""], Int[Array, ""]]:
    """Whether the step is accepted, the factor of the next step, and its order."""
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


def _as_error(
    accepted: Bool[Array, ""],
    factor: Float[Array, ""],
    y0: Float[Array, " n"],
    y1: Float[Array, " n"],
    rtol: Any,
    atol: Any,
) -> Float[Array, " n"]:
    """The error for which `diffrax.PIDController` decides likewise: it multiplies the
    step by safety / ‖error / tolerance‖."""
    tolerance = atol + rtol * jnp.maximum(jnp.abs(y0), jnp.abs(y1))
    return jnp.where(accepted, 0.9, 0.9 * (1 + 1e-9)) / factor * tolerance
