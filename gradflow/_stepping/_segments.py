"""A solve in segments, all run by the same compiled functions.

A segment is a fixed number of steps of `diffrax.diffeqsolve`. Its dense output then
yields the saved times and the share of the energy balance that lie within it. That
bounds memory whatever the number of steps, lets a progress bar and Ctrl-C in between
segments, and keeps the results so far if the solver gives up. The states of the solver
and of its step size controller pass from one segment to the next. The functions named
`plain_…` are not compiled by themselves: ensembles compile them into a larger one.
"""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._core.compiled import ONE_THREAD, compiled
from ..solvers._internals import (
    PAUSED,
    MeshInterpolation,
    RecentPoints,
    has_mesh,
    on_mesh,
)
from ._equation import Equation
from ._events import Condition, stopping_event

Dense = diffrax.DenseInterpolation | MeshInterpolation
"""The dense output of a segment."""

SEGMENT_MEMORY = 2**25
"""Bytes of dense output in one segment: about as much as stays in the cache."""
SMALLEST_SEGMENT, LARGEST_SEGMENT = 32, 2**12
"""The fewest and most steps in one segment, whatever memory they take. With fewer than
a panel of the energy's quadrature has, that would cost as much as the steps."""
STEPS_TO_SPARE = 8
"""Rejected steps allowed between two renewals of eigenpairs before a loop of steps
ends."""


class State(eqx.Module):
    """The state of a solve between two segments."""

    t: Float[Array, ""]
    y: Float[Array, " n"]
    loss: Float[Array, ""]
    solver_state: PyTree
    controller_state: PyTree
    recent: RecentPoints

    @property
    def dt(self) -> Any:
        """The length of the next step."""
        return self.controller_state.dt


class Segment(eqx.Module):
    """The result of one segment of solver steps."""

    state: State
    dense: Dense
    result: diffrax.RESULTS
    accepted: Int[Array, ""]
    rejected: Int[Array, ""]


def plain_start(
    equation: Equation,
    y0: Float[Array, " n"],
    t1: Float[Array, ""],
    max_steps: Int[Array, ""],
    t0: Float[Array, ""] | None = None,
) -> tuple[State, int]:
    """The state y0 at time t0 (by default 0) with a first step size and a budget of
    `max_steps` attempts; and the number of steps in a segment, from the memory that
    their dense output takes."""
    # The same preparations that diffeqsolve makes, so that every segment, the first one
    # included, gets states of the same structure and one compilation serves all.
    solver: Any = equation.solver
    controller = equation.controller().wrap(jnp.array(1))
    terms = diffrax.ODETerm(equation.vector_field)
    t0 = jnp.zeros((), jnp.float64) if t0 is None else t0
    error_order = solver.error_order(terms) if equation.step is None else None
    tnext, controller_state = controller.init(
        terms, t0, t1, y0, None, None, solver.func, error_order
    )
    controller_state = eqx.tree_at(lambda s: s.budget, controller_state, max_steps)
    tnext = jnp.minimum(tnext, t1)
    solver_state = solver.init(terms, t0, tnext, y0, None)
    state = State(
        t0,
        y0,
        equation.value(y0),
        solver_state,
        controller_state,
        RecentPoints.first(t0, y0),
    )
    fitting = SEGMENT_MEMORY // _bytes_a_step(equation, state, t1)
    steps = max(SMALLEST_SEGMENT, min(LARGEST_SEGMENT, fitting))
    return strongly_typed(state), steps


def _bytes_a_step(equation: Equation, state: State, t1: Float[Array, ""]) -> int:
    """The bytes of dense output that one step takes."""
    if has_mesh(equation.solver):  # known without tracing a solve, which is slow
        return MeshInterpolation.bytes_a_step(state.y.size)
    one_step = eqx.filter_eval_shape(
        _solve, equation, equation.solver, state, t1, 1, None
    )
    return dense_bytes(one_step.interpolation)


start = compiled(plain_start)


def advance(
    equation: Equation,
    state: State,
    t1: Float[Array, ""],
    steps: int,
    event: Condition | None,
) -> Segment:
    """At most `steps` attempted steps from `state` towards t1."""
    small = equation.ravel.size <= ONE_THREAD
    return (_advance_small if small else _advance_large)(
        equation, state, t1, steps, event
    )


def plain_advance(
    equation: Equation,
    state: State,
    t1: Float[Array, ""],
    steps: int,
    event: Condition | None,
) -> Segment:
    if event is None and has_mesh(equation.solver):
        return _advance_on_mesh(equation, state, t1, steps)
    # diffrax locates an event on the dense output of the one step.
    solution = _solve(equation, equation.solver, state, t1, steps, event)
    dense: Any = solution.interpolation
    stats = solution.stats
    return Segment(
        _at_its_end(equation, _reached(state, solution)),
        dense,
        solution.result,
        stats["num_accepted_steps"],
        stats["num_rejected_steps"],
    )


def _advance_on_mesh(
    equation: Equation, state: State, t1: Float[Array, ""], steps: int
) -> Segment:
    """A segment of a solver that pauses for new eigenpairs: a loop over short solves,
    each a loop of steps alone, which XLA compiles to one function. That halves the time
    of a step."""
    solver: Any = on_mesh(equation.solver)
    terms = diffrax.ODETerm(equation.vector_field)
    room = min(steps, solver.refresh_every + STEPS_TO_SPARE)
    budget = state.controller_state.budget

    def renewed(state: State) -> State:
        tnext = state.t + jnp.minimum(state.dt, t1 - state.t)
        solver_state, products = solver.renewed(
            terms, state.t, tnext, state.y, None, state.solver_state
        )
        done = state.controller_state.work.hessian_products + products
        return eqx.tree_at(
            lambda s: (s.solver_state, s.controller_state.work.hessian_products),
            state,
            (solver_state, done),
        )

    def is_unfinished(state: State, result: diffrax.RESULTS) -> Bool[Array, ""]:
        full = result == diffrax.RESULTS.max_steps_reached
        within_budget = state.controller_state.budget > 0
        return (state.t < t1) & within_budget & ((result == PAUSED) | full)

    def proceed(carry: tuple[State, MeshInterpolation, Any]) -> Bool[Array, ""]:
        state, dense, result = carry
        return is_unfinished(state, result) & (dense.ts_size - 1 + room <= steps)

    def go_on(carry: tuple[State, MeshInterpolation, Any]) -> tuple:
        state, dense, _ = carry
        solution = _solve(equation, solver, state, t1, room, None)
        state, result = _reached(state, solution), solution.result
        wanted = (result == PAUSED) & is_unfinished(state, result)
        state = jax.lax.cond(wanted, renewed, lambda state: state, state)
        steps_made: Any = solution.interpolation
        return state, dense.extended(steps_made), result

    empty = MeshInterpolation.empty(state.recent, steps)
    end, dense, result = jax.lax.while_loop(
        proceed, go_on, (state, empty, diffrax.RESULTS.max_steps_reached)
    )
    result = diffrax.RESULTS.where(
        is_unfinished(end, result), diffrax.RESULTS.max_steps_reached, result
    )
    result = diffrax.RESULTS.where(end.t >= t1, diffrax.RESULTS.successful, result)
    accepted = dense.ts_size - 1
    return Segment(
        _at_its_end(equation, eqx.tree_at(lambda s: s.recent, end, dense.recent)),
        dense,
        result,
        accepted,
        budget - end.controller_state.budget - accepted,
    )


def _reached(state: State, solution: diffrax.Solution) -> State:
    """The state in which a solve from `state` ended. The loss and the recent points are
    still those of `state`."""
    assert solution.ts is not None
    assert solution.ys is not None
    return strongly_typed(
        State(
            t=solution.ts[-1],
            y=solution.ys[-1],
            loss=state.loss,
            solver_state=solution.solver_state,
            controller_state=solution.controller_state,
            recent=state.recent,
        )
    )


def _at_its_end(equation: Equation, state: State) -> State:
    return eqx.tree_at(lambda s: s.loss, state, equation.value(state.y))


_advance_small = compiled(plain_advance, one_thread=True)
_advance_large = compiled(plain_advance)


def _solve(
    equation: Equation,
    solver: diffrax.AbstractSolver,
    state: State,
    t1: Float[Array, ""],
    steps: int,
    event: Condition | None,
) -> diffrax.Solution:
    return diffrax.diffeqsolve(
        diffrax.ODETerm(equation.vector_field),
        solver,
        state.t,
        t1,
        None,
        state.y,
        saveat=diffrax.SaveAt(
            t1=True, dense=True, solver_state=True, controller_state=True
        ),
        stepsize_controller=equation.controller(state.dt),
        max_steps=steps,
        throw=False,
        solver_state=state.solver_state,
        controller_state=state.controller_state,
        event=None if event is None else stopping_event(equation.ravel, event),
    )


def dense_bytes(dense: PyTree) -> int:
    """The memory of a piece of dense output, from its arrays or their shapes."""
    arrays = (jax.Array, jax.ShapeDtypeStruct)
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(dense)
        if isinstance(leaf, arrays)
    )


def strongly_typed(tree: PyTree) -> PyTree:
    """`tree` with arrays for Python numbers and without JAX's weak types, either of
    which would cause a second compilation."""

    def convert(leaf: Any) -> Any:
        if not eqx.is_array_like(leaf):
            return leaf
        array = jnp.asarray(leaf)
        return jax.lax.convert_element_type(array, array.dtype)

    return jax.tree.map(convert, tree)
