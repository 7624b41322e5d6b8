"""gradflow's solvers as contestants: each in one compiled `diffeqsolve`, and the whole
of `gradflow.integrate`."""

import dataclasses
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from _contestants import (
    ATOL,
    Absent,
    Contestant,
    Deadline,
    Factory,
    GaveUp,
    Work,
    over,
)
from _external_solvers import EULER_ALPHAS, LARGEST_DENSE, RK4_ALPHAS, too_large
from _problems import Flow, VectorField
from jaxtyping import Array, Float

import gradflow
from gradflow._core.compiled import ONE_THREAD, compiled
from gradflow.solvers import _internals

DENSE = ("kvaerno3", "kvaerno5")
"""Solvers that form n×n matrices."""
SLOWER_BY_COUNTING = 3
"""A counted run calls the host at every evaluation, so it may take this many times the
budget. The timed runs must keep to the budget itself."""


class Tally:
    """Counts evaluations and products in compiled code by calling the host, batches
    included, and tells diffrax when a deadline has passed."""

    def __init__(self) -> None:
        self.deadline = Deadline()
        self.evaluations = self.products = 0

    def reset(self) -> None:
        self.evaluations = self.products = 0

    def _tick(self, kind: str, x: Array) -> Array:
        """x, after a call to the host that counts every member of a batch."""

        def call(first: Any) -> np.ndarray:
            setattr(self, kind, getattr(self, kind) + int(np.prod(np.shape(first))))
            return np.zeros(np.shape(first))

        zero = jax.pure_callback(
            call,
            jax.ShapeDtypeStruct((), x.dtype),
            jax.lax.stop_gradient(x[0]),
            vmap_method="broadcast_all",
        )
        return x + zero

    def counted(self, field: VectorField) -> Callable[[Array], Array]:
        @jax.custom_jvp
        def evaluate(y: Array) -> Array:
            return field(self._tick("evaluations", y))

        @evaluate.defjvp
        def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
            (y,), (v,) = primals, tangents
            return evaluate(y), field.product(y, self._tick("products", v))

        return evaluate

    def late(self, t: Any, y: Any, args: Any, **_: Any) -> Any:
        """A diffrax event: whether the deadline has passed."""

        def call(t: Any) -> np.ndarray:
            return np.asarray(time.perf_counter() > self.deadline.at)

        return jax.pure_callback(call, jax.ShapeDtypeStruct((), bool), t)


def _diffeqsolve(
    field: Callable[[Array], Array],
    solver: diffrax.AbstractSolver,
    y0: Float[Array, " n"],
    ts: Float[Array, " times"],
    setting: Float[Array, ""],
    stiffness: Float[Array, ""],
    event: diffrax.Event | None = None,
) -> diffrax.Solution:
    adaptive = not isinstance(solver, gradflow.solvers.RK4 | diffrax.Euler)
    controller: Any = diffrax.ConstantStepSize()
    if adaptive:
        controller = _internals.ResumableController(setting, ATOL * setting)
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: field(y)),
        solver,
        0.0,
        ts[-1],
        None if adaptive else setting / stiffness,
        y0,
        saveat=diffrax.SaveAt(ts=ts, controller_state=event is not None),
        stepsize_controller=controller,
        event=event,
        max_steps=None,
        throw=False,
    )


def _compiled(function: Callable, n: int) -> Any:
    """`function`, compiled with the options that `integrate` uses."""
    return compiled(function, one_thread=n <= ONE_THREAD)


@dataclasses.dataclass
class CompiledSolver(Contestant):
    """A named solver in one compiled `diffrax.diffeqsolve`."""

    flow: Flow = None  # pyright: ignore
    solver: Any = None
    stiffness: float = 1.0

    def __post_init__(self) -> None:
        self.field = self.flow.field
        self.tally = Tally()
        began = time.perf_counter()
        # A fresh function: `auto` is one of the other solvers, and compiling it again
        # would hit the cache and seem to take no time.
        solve: Any = _diffeqsolve
        fresh = _compiled(lambda *arguments: solve(*arguments), self.flow.size)
        arguments = self._arguments(self.flow.start(0), self.settings[0])
        self.executable = fresh.lower(self.field, self.solver, *arguments).compile()
        self.compile_seconds = time.perf_counter() - began

    def _arguments(self, y0: np.ndarray, setting: float) -> tuple[Array, ...]:
        return tuple(map(jnp.asarray, (y0, self.flow.ts, setting, self.stiffness)))

    def solve(self, y0: np.ndarray, setting: float) -> np.ndarray:
        arguments = self._arguments(y0, setting)
        return _states(self.executable(self.field, self.solver, *arguments))

    def rehearse(self, y0: np.ndarray, setting: float, budget: float) -> Work:
        tally, (field, solver, executable) = self.tally, self._rehearsal
        tally.reset()
        tally.deadline.set(SLOWER_BY_COUNTING * budget)
        arguments = self._arguments(y0, setting)
        solution = executable(field, solver, *arguments, self._event)
        if solution.result == diffrax.RESULTS.event_occurred:
            raise over(budget)
        _states(solution)
        return counts(solver, solution, tally, y0.size)

    @cached_property
    def _rehearsal(self) -> tuple[Callable[[Array], Array], Any, Any]:
        """A vector field and a solver, at least one of which counts the work, and the
        solve compiled with them and with a deadline."""
        field, solver = self.field, self.solver
        counted = isinstance(solver, _internals.AbstractCountingSolver)
        if not counted and _internals.count_evaluations(solver, 1) is None:
            field = self.tally.counted(field)
        arguments = self._arguments(self.flow.start(0), self.settings[0])
        solve = _compiled(_diffeqsolve, self.flow.size)
        lowered = solve.lower(field, solver, *arguments, self._event)
        return field, solver, lowered.compile()

    @cached_property
    def _event(self) -> diffrax.Event:
        return diffrax.Event(self.tally.late)


def counts(solver: Any, solution: Any, tally: Tally, n: int) -> Work:
    """The work of a rehearsed solve: counted by the solver, derived from its tableau,
    or otherwise counted by calls to the host."""
    steps = int(solution.stats["num_steps"])
    if isinstance(solver, _internals.AbstractCountingSolver):
        done = solution.controller_state.work
        numbers = (done.evaluations, done.hessian_products, done.factorisations)
        return Work(steps, *map(int, numbers))
    known = _internals.count_evaluations(solver, steps)
    if known is not None:
        return Work(steps, known, 0, 0)
    dense = isinstance(solver, diffrax.AbstractDIRK)
    factorisations = tally.products // n if dense else 0
    return Work(steps, tally.evaluations, tally.products, factorisations)


def _states(solution: diffrax.Solution) -> np.ndarray:
    ys = np.asarray(solution.ys)
    if solution.result != diffrax.RESULTS.successful:
        raise GaveUp(diffrax.RESULTS[solution.result] or "the solve failed")
    if not np.all(np.isfinite(ys)):
        raise GaveUp("the solution is not finite")
    return ys


@dataclasses.dataclass
class Integrate(Contestant):
    """`gradflow.integrate` as users call it, with observables and certificate."""

    flow: Flow = None  # pyright: ignore
    solver: str = "auto"

    def __post_init__(self) -> None:
        self.ravel = self.flow.field.ravel

    def _call(self, y0: np.ndarray, setting: float, **options: Any) -> gradflow.Flow:
        return gradflow.integrate(
            self.flow.loss,
            self.ravel.unravel(jnp.asarray(y0)),
            self.flow.t1,
            ts=self.flow.ts,
            solver=self.solver,
            rtol=setting,
            atol=ATOL * setting,
            **options,
        )

    def solve(self, y0: np.ndarray, setting: float) -> np.ndarray:
        flow = self._call(y0, setting)
        leaves = jax.tree.leaves(flow.params)
        return np.concatenate([np.reshape(x, (len(x), -1)) for x in leaves], axis=1)

    def rehearse(self, y0: np.ndarray, setting: float, budget: float) -> Work:
        if self.compile_seconds is None:
            first = self._call(y0, setting, max_steps=1, throw=False)
            self.compile_seconds = first.stats["compile_seconds"]
        try:
            stats = self._call(y0, setting).stats
        except gradflow.FlowError as error:
            raise GaveUp(str(error)) from error
        steps = stats["num_accepted_steps"] + stats["num_rejected_steps"]
        return Work(steps, stats["num_evaluations"], stats["num_hessian_products"] or 0)


def contestants(flow: Flow, stiffness: float) -> dict[str, Factory]:
    """gradflow's solvers by name, and `integrate` itself."""

    def compiled_solver(name: str) -> Contestant | Absent:
        if name in DENSE and flow.size > LARGEST_DENSE:
            return Absent(name, too_large(flow.size))
        choice = _internals.resolve(name, flow.size, flow.symmetric)
        common: dict[str, Any] = {
            "ours": True,
            "flow": flow,
            "solver": choice.solver,
            "stiffness": stiffness,
        }
        if not choice.takes_fixed_steps:
            return CompiledSolver(name, **common)
        alphas = EULER_ALPHAS if name == "euler" else RK4_ALPHAS
        return CompiledSolver(name, knob="α", settings=alphas, **common)

    def whole() -> Contestant:
        return Integrate("integrate(auto)", ours=True, flow=flow)

    named = {n: partial(compiled_solver, n) for n in gradflow.solvers.names()}
    return {**named, "integrate(auto)": whole}
