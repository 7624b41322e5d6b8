"""`LowRankNDF`: the diffrax solver."""

import functools
from typing import ClassVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._flat_field import flat_field
from .._side_channel import AbstractCountingSolver, CountedError, Verdict, work
from .._types import BoolScalar, DiffraxField, RealScalar
from ._curvature import Curvature
from ._formulas import (
    ALPHA,
    MAX_ORDER,
    ROWS,
    NDFInterpolation,
    as_error,
    error_sizes,
    is_correction,
    next_step,
    transition,
)
from ._newton import (
    MAX_NEWTON,
    Implicit,
    Newton,
    VectorMap,
    hessian,
    products_to_follow,
    solve_implicit,
    solve_with_eigenpairs,
)

STRICTNESS = 0.01
"""A step is held to this fraction of the tolerances. The errors of a multistep method
add up over many steps; this keeps the error of a whole flow near the tolerances."""
SLOW = 0.5
"""The rate of Newton's method above which new eigenpairs are worth their cost."""
SMALL, SMALL_RANK, LARGE_RANK = 2**13, 16, 48
RECENT = 5
"""The number of steps for which eigenpairs count as new. Where Newton's method fails
with new eigenpairs, newer ones would not help."""


class State(eqx.Module):
    """The solver's state between two steps."""

    history: Float[Array, "rows_and_correction n"]
    """Backward differences ∇⁰y … ∇⁵y before the last step, for steps of length `h`, and
    the correction that the last step added to its prediction."""
    corrected_order: Int[Array, ""]
    """The order of the last step; zero before the first."""
    order: Int[Array, ""]
    """The order of the next step."""
    h: Float[Array, ""]
    steps_at_h: Int[Array, ""]
    """The number of steps since order or length changed."""
    curvature: Curvature
    age: Int[Array, ""]
    """Steps since the eigenpairs were followed; zero if they are those of the next
    step."""
    rate: Float[Array, ""]
    """The rate at which Newton's method converged."""


Stepped = tuple[PyTree, PyTree, dict[str, PyTree], State, diffrax.RESULTS]
"""The results of a step, as diffrax expects them: the new state, the error estimate,
the data of the dense output, the solver's state and the result code."""


class _StepTolerances(eqx.Module):
    """Tolerances that diffrax fills in from the step size controller, as it does for a
    root finder."""

    rtol: PyTree
    atol: PyTree
    norm: PyTree


def _adaptive_tolerances() -> _StepTolerances:
    # diffrax's public way to its sentinel for "as in the step size controller".
    finder = diffrax.with_stepsize_controller_tols(optx.Newton)()
    return _StepTolerances(finder.rtol, finder.atol, finder.norm)


class AbstractLowRankNDF(diffrax.AbstractImplicitSolver, AbstractCountingSolver):
    """The method of `LowRankNDF`, whatever its dense output."""

    rank: int | None = None
    """The largest number of eigenpairs that are followed. By default 16, and 48 where a
    state has more than 8,192 numbers: there they save more in evaluations than they
    cost in arithmetic."""
    refresh_every: int = 30
    """The largest number of steps before the eigenpairs are followed again."""
    counts_work: bool = False
    """Whether the error estimate comes with a count of the work, for
    `ResumableController`."""
    pauses: bool = False
    """Whether a step that needs new eigenpairs ends the solve, so that the caller can
    call `renewed` and continue: see `_side_channel.py`. Needs `counts_work`."""
    root_finder: DiffraxField = eqx.field(default_factory=_adaptive_tolerances)
    root_find_max_steps: DiffraxField = MAX_NEWTON

    term_structure: ClassVar = diffrax.AbstractTerm
    starting_evaluations: ClassVar[int] = 1

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
        """The approximate memory in bytes of a solve with a state of `size` numbers,
        without its dense output: four histories, and three sets of eigenvectors in
        single precision and as many in double precision while they are renewed."""
        return 8 * size * (4 * (ROWS + 1) + 9 * self._rank(size) // 2)

    def _rank(self, size: int) -> int:
        default = SMALL_RANK if size <= SMALL else LARGE_RANK
        return min(default if self.rank is None else self.rank, size)

    def order(self, terms: PyTree) -> int:
        return MAX_ORDER

    def error_order(self, terms: PyTree) -> int:
        # The controller's factor is then safety / error: see `as_error`.
        return 1

    def func(
        self, terms: diffrax.AbstractTerm, t0: RealScalar, y0: PyTree, args: PyTree
    ) -> PyTree:
        return terms.vf(t0, y0, args)

    def init(
        self,
        terms: diffrax.AbstractTerm,
        t0: RealScalar,
        t1: RealScalar,
        y0: PyTree,
        args: PyTree,
    ) -> State:
        y, at = flat_field(terms, t0, t1, y0, args)
        h, zero = jnp.asarray(t1 - t0), jnp.zeros((), jnp.int32)
        history = jnp.zeros((ROWS + 1, y.size), y.dtype)
        return State(
            history=history.at[0].set(y).at[1].set(h * at(t0, y)),
            corrected_order=zero,
            order=zero + 1,
            h=h,
            steps_at_h=zero,
            # Nothing is known yet: if the first step fails, it finds the eigenpairs.
            curvature=Curvature.unknown(y.size, self._rank(y.size)),
            age=zero + 1,
            rate=jnp.ones(()),
        )

    def _attempt(
        self,
        terms: diffrax.AbstractTerm,
        t0: RealScalar,
        t1: RealScalar,
        y0: PyTree,
        args: PyTree,
        state: State,
    ) -> Stepped:
        """One step, with all data for dense output."""
        _, unravel = ravel_pytree(y0)
        y_start, at = flat_field(terms, t0, t1, y0, args)
        k, h = state.order, t1 - t0
        rows, equation, steps_at_h = self._prepare(
            functools.partial(at, t1), y_start, h, state
        )
        steady = steps_at_h > 0
        rate = jnp.where(steady, state.rate, 1.0)
        slow = steady & (state.rate > SLOW) & (state.rate < 1) & (state.age >= RECENT)
        due = slow | (state.age >= self.refresh_every)
        newton, curvature, renewed = self._solve(equation, state, due, rate)
        d = newton.d
        errors = error_sizes(d, rows, k, equation.weights)
        accepted, factor, next_order = next_step(
            errors, k, newton.converged, steps_at_h + 1
        )
        new_state = State(
            # In the prediction's place: cheaper than a concatenation.
            history=jnp.where(is_correction(), d[None], rows[: ROWS + 1]),
            corrected_order=k,
            order=next_order,
            h=jnp.asarray(h),
            steps_at_h=jnp.where(next_order == k, steps_at_h + 1, 0),
            curvature=curvature,
            age=jnp.where(renewed, 0, state.age + 1),
            rate=jnp.where(renewed, 1.0, newton.rate),
        )
        y = equation.predicted + d
        dense = {
            "differences": rows[:ROWS],
            "correction": d,
            # A float, because diffrax fills unused entries with infinity.
            "order": k.astype(y.dtype),
            "y0": y0,
        }
        if self.counts_work:
            outcome = self._counted(accepted, factor, newton, due, state)
        else:
            rtol, atol = self.root_finder.rtol, self.root_finder.atol
            outcome = unravel(as_error(accepted, factor, y_start, y, rtol, atol))
        return unravel(y), outcome, dense, new_state, diffrax.RESULTS.successful

    def _prepare(
        self,
        field: VectorMap,
        y_start: Float[Array, " n"],
        h: RealScalar,
        state: State,
    ) -> tuple[Float[Array, "rows n"], Implicit, Int[Array, ""]]:
        """The differences, prediction and ψ of a step of length h; the step's equation;
        and the number of steps at this length so far."""
        excess = jnp.asarray(h / state.h - 1)
        # Rounding of the times alone is not a change of step.
        steps_at_h = jnp.where(jnp.abs(excess) > 1e-6, 0, state.steps_at_h)
        coefficients = transition(state.corrected_order, state.order, excess)
        rows = coefficients @ state.history
        predicted, psi = rows[ROWS], rows[ROWS + 1]
        c = jnp.asarray(h) / jnp.asarray(ALPHA)[state.order]
        tolerance = self.root_finder.atol + self.root_finder.rtol * jnp.abs(y_start)
        weights = 1 / (STRICTNESS * tolerance)
        return rows, Implicit(field, predicted, psi, c, weights), steps_at_h

    def _solve(
        self,
        equation: Implicit,
        state: State,
        due: Bool[Array, ""],
        rate: Float[Array, ""],
    ) -> tuple[Newton, Curvature, Bool[Array, ""]]:
        """The correction, the eigenpairs for the next step and whether they are new."""
        if not self.pauses:
            return solve_implicit(equation, state.curvature, due, rate)
        newton = solve_with_eigenpairs(
            equation, state.curvature, state.age < RECENT, rate
        )
        return newton, state.curvature, jnp.zeros((), bool)

    def _counted(
        self,
        accepted: Bool[Array, ""],
        factor: Float[Array, ""],
        newton: Newton,
        due: Bool[Array, ""],
        state: State,
    ) -> CountedError:
        failed = ~newton.converged
        # With new eigenpairs there is nothing more to try than a shorter step.
        lost = failed & (state.age == 0) if self.pauses else failed
        done = work(
            evaluations=newton.evaluations,
            hessian_products=newton.products,
            newton_failures=lost,
        )
        again = paused = jnp.zeros((), bool)
        if self.pauses:
            again = failed & ~lost
            paused = again | due
        numbers = (accepted, jnp.where(again, 1.0, factor), paused, again)
        return CountedError(Verdict(*(x.astype(factor.dtype) for x in numbers)), done)

    def renewed(
        self,
        terms: diffrax.AbstractTerm,
        t0: RealScalar,
        t1: RealScalar,
        y0: PyTree,
        args: PyTree,
        solver_state: State,
    ) -> tuple[State, Float[Array, ""]]:
        """The state with the eigenpairs of the next step, from t0 to t1, and the number
        of Hessian products they took: for a solver that `pauses`."""
        state = solver_state
        h = jnp.asarray(t1 - t0)
        _, at = flat_field(terms, t0, t1, y0, args)
        rows = transition(state.corrected_order, state.order, h / state.h - 1)
        predicted = rows[ROWS] @ state.history
        fitted = state.curvature.fitted(h / jnp.asarray(ALPHA)[state.order])
        followed = fitted.followed(hessian(functools.partial(at, t1), predicted))
        # Where the field is not finite at the prediction, the old eigenpairs stay.
        # Otherwise NaNs would remain: these eigenpairs count as new, so a retry of the
        # step does not compute others.
        sound = followed.is_finite
        followed = jax.tree.map(
            lambda new, old: jnp.where(sound, new, old), followed, fitted
        )
        new = eqx.tree_at(
            lambda s: (s.curvature, s.age, s.rate),
            state,
            (followed, jnp.zeros_like(state.age), jnp.ones_like(state.rate)),
        )
        return new, products_to_follow(fitted)


class LowRankNDF(AbstractLowRankNDF):
    """Numerical differentiation formulas of order 1 to 5 with a variable,
    quasi-constant step (Shampine & Reichelt 1997), for vector fields whose Jacobian is
    symmetric: gradient flows ẏ = -∇L(y).

    An implicit step solves y - c f(y) = ψ by Newton iterations with an approximate
    inverse of I + cH, H = ∇²L, from the top eigenpairs of H (see `Curvature`), as many
    as matter to the step and at most `rank`. These are followed along the flow by
    Hessian-vector products, which are finite differences of the vector field, whenever
    Newton's method becomes slow and at the latest after `refresh_every` steps. Where
    Newton's method fails, the same step is tried with new eigenpairs, then with
    conjugate gradients on the whole of I + cH, preconditioned by that inverse; only
    then is it shortened. No n×n matrix is formed, and memory is linear in n: see
    `memory`.

    Use it with `diffrax.PIDController` at its default coefficients: the solver chooses
    order and step size together, and passes the controller the error for which it
    chooses this step size.
    """

    interpolation_cls: ClassVar = NDFInterpolation

    def step(
        self,
        terms: diffrax.AbstractTerm,
        t0: RealScalar,
        t1: RealScalar,
        y0: PyTree,
        args: PyTree,
        solver_state: State,
        made_jump: BoolScalar,
    ) -> Stepped:
        return self._attempt(terms, t0, t1, y0, args, solver_state)
