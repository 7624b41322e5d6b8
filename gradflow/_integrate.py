"""integrate(): a loss, a start and a horizon in, a flow out."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from . import _checks, solvers
from ._checks import Checked
from ._compile_clock import CompileClock
from ._flow import Flow, FlowError, Settings, set_integrate_again
from ._metric import is_euclidean
from ._progress import progress_bar
from ._ravel import Ravel
from ._record import Recorder, Watch
from ._segments import Equation, Segment, advance, start

SMALLEST_SCALE = 1e-8
"""The least root mean square of the parameters that the default `atol` follows."""
SMALLEST_RTOL = 1e-14
DEFAULT_TIMES = 200
POWER_ITERATIONS = 60
LARGEST_DEFAULT_OBSERVABLE = 2**16
"""Numbers in an observable at one time, above which it must be asked for by name."""


def integrate(
    loss: Checked[Callable[[PyTree], Any]],
    params: PyTree,
    t1: Checked[float],
    *,
    ts: Any = None,
    solver: Any = "auto",
    rtol: Checked[float] = 1e-8,
    atol: Checked[float | None] = None,
    observables: Checked[
        Mapping[str, Callable[[PyTree], Any]] | Iterable[str] | None
    ] = None,
    event: Checked[Callable[[PyTree], Any] | None] = None,
    progress: bool = False,
    max_steps: Checked[int | None] = None,
    throw: bool = True,
    dense_memory: Checked[int] = 2**28,
    step: Checked[float | None] = None,
) -> Flow:
    """Integrate the gradient flow θ̇ = -∇L(θ) from `params` at time 0 to time `t1`.

    **Arguments:**

    - `loss`: any callable from parameters to a scalar; a `Problem` brings its conserved
        quantities and observables along. Compiled code is reused for problems of the
        same shapes, and for the same function object otherwise.
    - `params`: where the flow starts; any pytree of floating arrays.
    - `t1`: the horizon.
    - `ts`: increasing times in [0, t1] at which to save. By default 0 and 200
        geometrically spaced times, as learning lives on a logarithmic clock.
    - `solver`: a name (`gradflow.solvers.names()`) or an adaptive diffrax solver.
    - `rtol`, `atol`: tolerances of a step, for each entry of the parameters. By default
        `atol` follows the initial scale: 1e-3·rtol times the root mean square of
        `params`, or times 1e-8 where that is smaller (a start at zero).
    - `observables`: functions of the parameters to watch, by name, or names among
        `loss.observables`. By default all of these but those with more than 65,536
        numbers each time.
    - `event`: a condition on the parameters that ends the flow: where a real function
        crosses zero, or after the first step at which a boolean one holds.
    - `progress`: whether to show a progress bar, on the logarithmic clock.
    - `max_steps`: give up after so many attempted steps; by default never.
    - `throw`: whether a solve that cannot go on raises a `FlowError`, whose `flow`
        holds what was computed, or returns that flow.
    - `dense_memory`: bytes of dense output to keep for `Flow.at`.
    - `step`: the length of a step of `rk4` and `euler`, which take steps of one length;
        by default 1/λ_max at the start, which may well be too long later on.

    **Returns:**

    A `Flow`.
    """
    t1 = _checks.positive_number("t1", t1)
    times = _saved_times(ts, t1)
    solvers.resolve(solver)
    rtol = _checks.positive_number("rtol", rtol)
    if rtol < SMALLEST_RTOL:
        raise ValueError(
            f"`rtol` must be at least {SMALLEST_RTOL:g}, as double precision holds no "
            f"more, got {rtol:g}."
        )
    if atol is not None:
        atol = _checks.positive_number("atol", atol, zero_allowed=True)
    if max_steps is not None:
        max_steps = _checks.whole_number("max_steps", max_steps)
    dense_memory = _checks.whole_number("dense_memory", dense_memory, least=0)
    if step is not None:
        step = _checks.positive_number("step", step)
    _checks.scalar_loss(loss, params)
    named, functions = _chosen_observables(loss, params, observables)
    _check_event(event, params)

    began, compiling = time.perf_counter(), CompileClock()
    ravel = Ravel.of(params)
    y0 = ravel.ravel(params)
    choice = solvers.resolve(solver, ravel.size, is_euclidean(loss))
    if atol is None:
        rms = math.sqrt(float(jnp.mean(y0**2)))
        atol = 1e-3 * rtol * max(rms, SMALLEST_SCALE)
    if choice.takes_fixed_steps:
        step = _stable_step(loss, ravel, y0) if step is None else step
    elif step is not None:
        raise ValueError(
            f"`step` must be None but for solvers with steps of one length "
            f"({', '.join(solvers.FIXED_STEP)}), got {step:g} with {choice.name}."
        )
    equation = Equation(
        loss,
        ravel,
        choice.solver,
        jnp.asarray(rtol),
        jnp.asarray(atol),
        None if step is None else jnp.asarray(step),
    )
    budget = solvers.NO_LIMIT if max_steps is None else max_steps
    state, steps = start(equation, y0, jnp.asarray(t1), jnp.asarray(budget))
    _refuse_bad_start(state.loss, state.dt)
    record = Recorder(Watch(equation, y0, named, functions), state, times, dense_memory)
    ended = None
    with progress_bar(t1, progress) as report:
        while ended is None:
            segment = advance(equation, state, jnp.asarray(t1), steps, event)
            state = segment.state
            record.add(segment)
            report(record.t, float(state.loss), record.attempted)
            ended = _how_it_ended(segment, t1, record.attempted, max_steps)

    result, reason = ended
    snapshots = record.close()
    compile_seconds = compiling.seconds()
    flow = Flow(
        ts=record.ts,
        params=snapshots.params,
        loss=np.asarray(snapshots.loss),
        speed=np.asarray(snapshots.speed),
        observables=snapshots.observables,
        stats={
            "solver": choice.name,
            "choice": choice.reason,
            "num_accepted_steps": record.accepted,
            "num_rejected_steps": record.rejected,
            **_counts(choice.solver, state.controller_state.work, record.attempted),
            "num_certificate_evaluations": record.certificate_evaluations,
            "compile_seconds": compile_seconds,
            "run_seconds": time.perf_counter() - began - compile_seconds,
            "dense_until": record.dense_until,
            "reason": reason,
        },
        result=result,
        certificate=record.certificate(snapshots),
        start=jax.tree.map(np.asarray, ravel.unravel(y0)),
        settings=Settings(t1, choice.name, rtol, atol, step),
        problem=loss,
        solver=choice.solver,
        dense=record.dense,
    )
    fine = (diffrax.RESULTS.successful, diffrax.RESULTS.event_occurred)
    if throw and not any(result == code for code in fine):
        raise FlowError(
            f"The flow {reason}. What was computed until then is in this exception's "
            "`flow`; `throw=False` returns it instead.",
            flow,
        )
    return flow


def _how_it_ended(
    segment: Segment, t1: float, attempted: int, max_steps: int | None
) -> tuple[diffrax.RESULTS, str] | None:
    """The result and, if it is not that the horizon was reached, why; or None if
    there is more to do."""
    t = float(segment.state.t)
    if segment.result == diffrax.RESULTS.event_occurred:
        return diffrax.RESULTS.event_occurred, f"stopped at t = {t:.10g} by its event"
    if t >= t1:
        return diffrax.RESULTS.successful, ""
    if max_steps is not None and attempted >= max_steps:
        reason = f"gave up at t = {t:.10g} of {t1:g}, after `max_steps` = {max_steps:,}"
        return diffrax.RESULTS.max_steps_reached, f"{reason} steps"
    if segment.result == diffrax.RESULTS.dt_min_reached:
        reason = (
            f"could not go on from t = {t:.10g}: every step was rejected, down to one "
            f"of {float(segment.state.dt):.0e} (is the loss finite and smooth there? "
            f"it is {float(segment.state.loss):.6g})"
        )
        return diffrax.RESULTS.dt_min_reached, reason
    if segment.result == diffrax.RESULTS.internal_error:
        reason = (
            f"left the finite numbers after t = {t:.10g}, where the loss was "
            f"{float(segment.state.loss):.6g}: a shorter `step` may hold it"
        )
        return diffrax.RESULTS.internal_error, reason
    if segment.result != diffrax.RESULTS.max_steps_reached:
        why = diffrax.RESULTS[segment.result]
        return diffrax.RESULTS.internal_error, f"broke off at t = {t:.10g}: {why}"
    return None


def _counts(solver: Any, work: Any, attempted: int) -> dict[str, int | None]:
    """The work of a solve, as far as it is known."""
    if getattr(solver, "counts_work", False):
        return {
            # The choice of the first step size takes two.
            "num_evaluations": int(work.evaluations) + 2 + solver.starting_evaluations,
            "num_hessian_products": int(work.hessian_products),
            "num_newton_failures": int(work.newton_failures),
        }
    return {
        "num_evaluations": solvers.count_evaluations(solver, attempted),
        "num_hessian_products": None,
        "num_newton_failures": None,
    }


@eqx.filter_jit
def _largest_curvature(
    loss: Callable, ravel: Ravel, y: Float[Array, " n"]
) -> Float[Array, ""]:
    """|λ|_max of the Hessian, by the power method."""
    gradient = jax.grad(lambda y: jnp.asarray(loss(ravel.unravel(y)), jnp.float64))

    def iterate(_: Any, v: Float[Array, " n"]) -> Float[Array, " n"]:
        product = jax.jvp(gradient, (y,), (v / jnp.linalg.norm(v),))[1]
        return jnp.where(jnp.any(product != 0), product, v)

    noise = jax.random.normal(jax.random.key(0), y.shape, y.dtype)
    return jnp.linalg.norm(jax.lax.fori_loop(0, POWER_ITERATIONS, iterate, noise))


def _stable_step(loss: Callable, ravel: Ravel, y: Float[Array, " n"]) -> float:
    largest = float(_largest_curvature(loss, ravel, y))
    if not (np.isfinite(largest) and largest > 0):
        raise ValueError(
            "`step` must be given, as the curvature at `params`, from which it would "
            f"follow, is {largest:g}."
        )
    return 1 / largest


def same_solver(
    settings: Settings, solver: diffrax.AbstractSolver | None
) -> str | diffrax.AbstractSolver:
    """What to ask `integrate` for to have a flow's solver again: its name where that
    says all, else the object itself."""
    named = settings.solver in solvers.names()
    if solver is None and not named:  # a loaded flow knows only its solver's name
        raise ValueError(
            f"The flow was integrated by {settings.solver!r}, which goes by no "
            "name here: give it as `Flow.load(path, solver=...)`."
        )
    if solver is None or (
        named and eqx.tree_equal(solver, solvers.resolve(settings.solver).solver)
    ):
        return settings.solver
    return solver


def _integrate_again(
    loss: Callable,
    settings: Settings,
    solver: diffrax.AbstractSolver | None,
    params: PyTree,
    t0: float,
    t1: float,
) -> Float[Array, " n"]:
    """The flat state at t1 of the flow that is at `params` at t0."""
    ravel = Ravel.of(params)
    equation = Equation(
        loss,
        ravel,
        solvers.resolve(same_solver(settings, solver)).solver,
        jnp.asarray(settings.rtol),
        jnp.asarray(settings.atol),
        None if settings.step is None else jnp.asarray(settings.step),
    )
    # The flow does not know what time it is, so that it may start at zero again.
    span = jnp.asarray(t1 - t0)
    state, steps = start(
        equation, ravel.ravel(params), span, jnp.asarray(solvers.NO_LIMIT)
    )
    ended = None
    while ended is None:
        segment = advance(equation, state, span, steps, None)
        state = segment.state
        ended = _how_it_ended(segment, float(span), 0, None)
    result, reason = ended
    if result != diffrax.RESULTS.successful:
        raise RuntimeError(f"Integrated again from t = {t0:.10g}, the flow {reason}.")
    return state.y


set_integrate_again(_integrate_again)


#
# Checks, before any work starts
#


def _saved_times(ts: Any, t1: float) -> Float[np.ndarray, " times"]:
    if ts is None:
        return np.append(0.0, np.geomspace(1e-5 * t1, t1, DEFAULT_TIMES))
    times = _checks.increasing_times("ts", ts)
    if times[0] < 0 or times[-1] > t1:
        raise ValueError(
            f"`ts` must lie between 0 and `t1` = {t1:g}, got times from {times[0]:g} "
            f"to {times[-1]:g}."
        )
    return times


class _AllObservables(eqx.Module):
    loss: Any

    def __call__(self, params: PyTree) -> dict[str, Any]:
        return {name: f(params) for name, f in self.loss.observables.items()}


def _chosen_observables(
    loss: Any, params: PyTree, observables: Any
) -> tuple[tuple[str, ...], dict[str, Callable]]:
    """Names among the loss's own observables, and functions of the user's."""
    if isinstance(observables, Mapping):
        for name, function in observables.items():
            if not isinstance(name, str) or not callable(function):
                raise ValueError(
                    "`observables` must map names to functions of the parameters, got "
                    f"{name!r}: {function!r}."
                )
        return (), dict(observables)
    if observables is None:
        if not hasattr(loss, "observables"):
            return (), {}
        shapes = _checks.shape_of_result(_AllObservables(loss), params)
        sizes = {
            name: sum(leaf.size for leaf in jax.tree.leaves(shape))
            for name, shape in shapes.items()
        }
        return tuple(k for k, n in sizes.items() if n <= LARGEST_DEFAULT_OBSERVABLE), {}
    if not isinstance(observables, Iterable):
        raise ValueError(
            "`observables` must map names to functions of the parameters, or list "
            f"names of the loss's own, got {observables!r}."
        )
    known = getattr(loss, "observables", {})
    names = (observables,) if isinstance(observables, str) else tuple(observables)
    for name in names:
        if name not in known:
            raise ValueError(
                f"`observables` must name observables of the loss "
                f"({', '.join(known) or 'it has none'}), got {name!r}."
            )
    return names, {}


def _check_event(event: Any, params: PyTree) -> None:
    if event is None:
        return
    if not callable(event):
        raise ValueError(
            f"`event` must be a function of the parameters, got {type(event).__name__}."
        )
    value = _checks.shape_of_result(event, params)
    if not _checks.is_scalar(value, "fb"):
        raise ValueError(
            f"`event` must return a real scalar or a boolean, got {value!r}."
        )
    now: Any = event(jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params))
    if np.isnan(now):
        raise ValueError("`event` must be a number at `params`, got NaN.")


def _refuse_bad_start(loss: Float[Array, ""], dt: Float[Array, ""]) -> None:
    if not np.isfinite(loss):
        raise ValueError(
            f"`loss` must be finite at `params`, where the flow starts; it is {loss}."
        )
    if not np.isfinite(dt):
        raise ValueError("`loss` must have a finite gradient at `params`; it has not.")
