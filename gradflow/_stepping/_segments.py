"""A solve in segments, all run by the same compiled functions.

A segment is so many steps of `diffrax.diffeqsolve`, whose dense output then yields the
saved times and the share of the energy balance that lie within it. That bounds memory
whatever the number of steps, lets a progress bar and Ctrl-C in between segments, and
keeps what was computed if the solver gives up. The states of the solver and of its step
size controller pass from one segment to the next. The functions named `plain_…` are for
whoever compiles them into something larger.
"""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._core.compiled import ONE_THREAD, compiled
from .._core.ravel import Ravel
from ..problems import AbstractLoss
from ..problems._descent import descent
from ..solvers import (
    PAUSED,
    FixedStepController,
    MeshInterpolation,
    RecentPoints,
    ResumableController,
    has_mesh,
    on_mesh,
)
from ._energy import NODES, EnergyAccount

Dense = diffrax.DenseInterpolation | MeshInterpolation
"""The dense output of a segment."""


SEGMENT_MEMORY = 2**25
"""Bytes of dense output in one segment: about what stays in the cache."""
STEPS_PER_PANEL, SUBPANELS = 32, 4
"""Accepted steps in one panel of the energy's quadrature, and into how many it is split
where it is too coarse. Steps are many to a panel where stability keeps them short."""
SMALLEST_SEGMENT, LARGEST_SEGMENT = STEPS_PER_PANEL, 2**12
"""Steps in one segment, whatever memory they take. Of fewer than a panel has, the
energy's quadrature would cost as much as the steps."""
PANEL_TOLERANCE, LEAST_PANEL_TOLERANCE = 1e-4, 1e-12
"""The error of a panel's integral, relative to L(0), above which it is split: this
fraction of the solver's tolerance, as a finer balance would tell no more of the flow,
and no less than rounding allows."""
EVALUATIONS_PER_PANEL = len(NODES) + 1
BATCHED_NUMBERS = 2**16
"""How many states are evaluated at once: as many as have this many numbers together.
Batching saves overhead where states are small, and costs memory where they are not."""


STEPS_TO_SPARE = 8
"""That may be lost between two renewals of eigenpairs, before a loop of steps ends."""


class Equation(eqx.Module):
    """θ̇ = -∇L(θ) on the flat state y, with the solver and its tolerances.

    Tolerances are arrays: another value is no reason to compile anew.
    """

    loss: AbstractLoss
    ravel: Ravel = eqx.field(static=True)
    solver: diffrax.AbstractSolver
    rtol: Float[Array, ""]
    atol: Float[Array, ""]
    step: Float[Array, ""] | None = None
    """The length of every step, if they have one."""

    def value(self, y: Float[Array, " n"]) -> Float[Array, ""]:
        return self.loss.in_double(self.ravel.unravel(y))

    def vector_field(self, t: Any, y: Float[Array, " n"], args: Any = None) -> Any:
        # The gradient of the pytree, ravelled: differentiating through `unravel` would
        # pad every leaf's gradient to the length of y and add them up.
        _, velocity, _ = descent(self.loss, self.ravel.unravel(y))
        return self.ravel.ravel(velocity)

    def loss_and_power(
        self, y: Float[Array, " n"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """L and -dL/dt, which is ‖∇L‖² in the loss's metric."""
        value, _, power = descent(self.loss, self.ravel.unravel(y))
        return value, power

    @property
    def batch_size(self) -> int:
        return states_at_once(self.ravel.size)

    def controller(
        self, first: Float[Array, ""] | None = None
    ) -> ResumableController | FixedStepController:
        """Of the lengths of steps, the first one of which may be known."""
        if self.step is not None:
            return FixedStepController(self.step)
        return ResumableController(rtol=self.rtol, atol=self.atol, first=first)


def states_at_once(size: int) -> int:
    """How many states of so many numbers are evaluated together: a power of two, so
    that it divides the number of snapshots."""
    fitting = max(1, min(32, BATCHED_NUMBERS // size))
    return 2 ** (fitting.bit_length() - 1)


class State(eqx.Module):
    """Where a solve stands between two segments."""

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
    """What so many steps brought."""

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
    """The state y0 at time t0, by default 0, with a first step size and the number of
    steps that may be tried; and how many steps a segment has, from the memory that
    their dense output takes."""
    # The same preparations that diffeqsolve makes, so that every segment, the first
    # one too, is handed states of the same structure and one compilation serves all.
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
    """Of dense output."""
    if has_mesh(equation.solver):  # known without tracing a solve, which takes a while
        return MeshInterpolation.bytes_a_step(state.y.size)
    one_step = eqx.filter_eval_shape(
        _solve, equation, equation.solver, state, t1, 1, None
    )
    return _bytes(one_step.interpolation)


start = compiled(plain_start)


def advance(
    equation: Equation,
    state: State,
    t1: Float[Array, ""],
    steps: int,
    event: Callable[[PyTree], Any] | None,
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
    event: Callable[[PyTree], Any] | None,
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
    """A segment by a solver that pauses for new eigenpairs: a loop over short solves,
    which are loops of steps alone. These XLA compiles to one function each, so that a
    step takes half the time."""
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
    """Where a solve from `state` ended, but for what the dense output says of it."""
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
    event: Callable[[PyTree], Any] | None,
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
        event=None if event is None else _stopping_event(equation, event),
    )


def _stopping_event(equation: Equation, condition: Callable) -> diffrax.Event:
    def cond_fn(t: Any, y: Any, args: Any, **_: Any) -> Any:
        return jnp.asarray(condition(equation.ravel.unravel(y)))

    # A real event is located to rounding: it is worth no less accuracy than the flow it
    # is found on. A boolean one has no root between two steps.
    value = eqx.filter_eval_shape(cond_fn, 0.0, jnp.zeros(equation.ravel.size), None)
    if value.dtype.kind == "b":
        return diffrax.Event(cond_fn)
    return diffrax.Event(cond_fn, _Bracket(rtol=1e-14, atol=1e-300))


class _Bracket(optx.Bisection):
    """Bisection until the bracket is short, whatever the value there.

    The stock one also wants |value| < atol. A bound on that needs the event's scale,
    which nobody knows, and in rounded numbers a value may change its sign without ever
    being zero.
    """

    def terminate(
        self,
        fn: Any,
        y: Any,
        args: Any,
        options: dict[str, Any],
        state: Any,
        tags: frozenset[object],
    ) -> tuple[Bool[Array, ""], optx.RESULTS]:
        short = state.upper - state.lower < self.atol + self.rtol * jnp.abs(y)
        return short, optx.RESULTS.successful


def plain_balance(
    equation: Equation,
    account: EnergyAccount,
    dense: Dense,
    end: Float[Array, ""],
) -> EnergyAccount:
    """The energy balance carried over a segment that ended at time `end`."""

    # One by one they are a loop that XLA's CPU compiler turns into one function.
    batch = None if jax.default_backend() == "cpu" else equation.batch_size

    def at(t: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return equation.loss_and_power(dense.evaluate(t))

    tolerance = jnp.maximum(PANEL_TOLERANCE * equation.rtol, LEAST_PANEL_TOLERANCE)
    last = jnp.asarray(dense.ts_size - 1)
    few = STEPS_PER_PANEL // SUBPANELS

    def add(carry: tuple[Array, Array, EnergyAccount]) -> tuple:
        """The next panel, or how many short ones are to take its place. Both kinds in
        one loop: what evaluates them is compiled once."""
        first, short, account = carry
        ends = first + jnp.where(short > 0, few, STEPS_PER_PANEL)
        start, stop = (
            jnp.minimum(dense.ts[jnp.minimum(step, last)], end)
            for step in (first, ends)
        )
        added = account.add_panel(start, stop, at, batch)
        error = added.quadrature_error - account.quadrature_error
        coarse = error > tolerance * jnp.abs(account.initial_loss)
        split = coarse & (short == 0)
        kept = jax.tree.map(lambda a, b: jnp.where(split, a, b), account, added)
        kept = eqx.tree_at(lambda account: account.panels, kept, added.panels)
        left = jnp.where(split, SUBPANELS, jnp.maximum(short - 1, 0))
        return jnp.where(split, first, ends), left, kept

    zero = jnp.zeros((), last.dtype)
    return jax.lax.while_loop(
        lambda carry: carry[0] < last, add, (zero, zero, account)
    )[2]


balance = compiled(plain_balance)


def dense_bytes(dense: Dense) -> int:
    """The memory that a piece of dense output takes."""
    return _bytes(dense)


def _bytes(tree: PyTree) -> int:
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if hasattr(leaf, "dtype")
    )


def strongly_typed(tree: PyTree) -> PyTree:
    """With arrays for Python numbers and without JAX's weak types: either would make a
    second compilation necessary."""

    def convert(leaf: Any) -> Any:
        if not eqx.is_array_like(leaf):
            return leaf
        array = jnp.asarray(leaf)
        return jax.lax.convert_element_type(array, array.dtype)

    return jax.tree.map(convert, tree)
