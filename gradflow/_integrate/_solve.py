"""From a flow that is wanted, all of it checked, to the flow: segment after segment,
recorded, with checkpoints in between."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .. import solvers
from .._core import machine, storage
from .._core.compiled import CompileClock, make_room_for_code
from .._core.progress import progress_bar
from .._core.ravel import Ravel
from .._stepping._record import Past, Recorder, Watch
from .._stepping._segments import (
    SEGMENT_MEMORY,
    SMALLEST_SEGMENT,
    Equation,
    State,
    advance,
    start,
)
from ..flows._flow import Flow, FlowError, Settings, ended_by, versions
from ._checkpoint import Checkpoint

PARAMS_MEMORY = 2**28
"""Bytes of parameters at saved times that are stored unless more are asked for."""


class Wanted(NamedTuple):
    """A flow to integrate."""

    loss: Callable
    start: PyTree
    """The parameters at time 0."""
    choice: solvers.Choice
    settings: Settings
    times: Float[np.ndarray, " times"]
    save_params: Any
    """None, whether to, or the times at which to."""
    named: tuple[str, ...]
    functions: dict[str, Callable]
    event: Callable | None
    progress: bool
    max_steps: int | None
    throw: bool
    dense_memory: int
    checkpoint: Path | None
    checkpoint_every: float
    earlier: Flow | None = None
    """Its beginning, if it goes on from there."""
    past: Past | None = None
    """What was recorded of that."""


def solve(wanted: Wanted) -> Flow:
    make_room_for_code()
    began, compiling = time.perf_counter(), CompileClock()
    loss, settings, choice = wanted.loss, wanted.settings, wanted.choice
    t1, max_steps = settings.t1, wanted.max_steps
    ravel = Ravel.of(wanted.start)
    y0 = ravel.ravel(wanted.start)
    earlier, past = wanted.earlier, wanted.past
    equation = equation_of(loss, ravel, choice.solver, settings)
    watch = Watch(equation, y0, wanted.named, wanted.functions)
    row = watch.shape
    stored = _stored_times(wanted.save_params, wanted.times, ravel.size)
    memory = _memory_needed(wanted, row, len(stored), ravel.size)
    _refuse_too_much(memory, ravel.size)

    budget = solvers.NO_LIMIT if max_steps is None else max_steps
    state, steps = start(
        equation,
        y0 if earlier is None else ravel.ravel(earlier.final),
        jnp.asarray(t1),
        jnp.asarray(budget),
        jnp.asarray(0.0 if past is None else past.t),
    )
    _refuse_bad_start(state.loss, state.dt)
    record = Recorder(watch, state, wanted.times, stored, wanted.dense_memory)
    tried = 0 if past is None else past.accepted + past.rejected
    if past is not None:
        record.go_on_from(past)
    seconds, checkpoint = 0.0, None
    if wanted.checkpoint is not None:
        of = _identity(wanted, state, stored)
        checkpoint = Checkpoint(wanted.checkpoint, wanted.checkpoint_every, of)
        found = checkpoint.read(state, row)
        if found is not None:
            state, past, seconds = found
            record.go_on_from(past)
    ended = None
    stated = f"{ravel.size:,} numbers, at most {machine.readable(memory['total'])}"
    with progress_bar(t1, wanted.progress, stated) as report:
        while ended is None:
            segment = advance(equation, state, jnp.asarray(t1), steps, wanted.event)
            state = segment.state
            record.add(segment)
            report(record.t, float(state.loss), record.attempted)
            tries = record.attempted - tried
            ended = how_it_ended(state, segment.result, t1, tries, max_steps)
            if checkpoint is not None and ended is None and checkpoint.is_due:
                so_far = seconds + time.perf_counter() - began - compiling.seconds()
                checkpoint.write(state, record.past, so_far)

    result, reason = ended
    snapshots = record.close()
    compile_seconds = compiling.seconds()
    done = counts(choice.solver, state.controller_state.work, record.attempted - tried)
    times = {
        "compile_seconds": compile_seconds,
        "run_seconds": seconds + time.perf_counter() - began - compile_seconds,
    }
    dense = record.dense
    if earlier is not None:
        done, times = _sum(earlier.stats, done), _sum(earlier.stats, times)
        dense = dense if earlier.dense is None else earlier.dense.joined(dense)
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
            **done,
            "num_certificate_evaluations": record.certificate_evaluations,
            **times,
            "dense_until": 0.0 if dense is None else dense.until,
            "memory": memory,
            "balances": record.balances(snapshots),
            "reason": reason,
        },
        result=result,
        certificate=record.certificate(snapshots),
        start=jax.tree.map(np.asarray, ravel.unravel(y0)),
        settings=settings,
        problem=loss,
        solver=choice.solver,
        dense=dense,
        stored_ts=record.params_ts if len(record.params_ts) < len(record.ts) else None,
    )
    if checkpoint is not None and flow.ended_as_wanted:
        checkpoint.remove()
    if wanted.throw and not flow.ended_as_wanted:
        raise FlowError(
            f"The flow {reason}. What was computed until then is in this exception's "
            "`flow`; `throw=False` returns it instead.",
            flow,
        )
    return flow


def equation_of(
    loss: Callable, ravel: Ravel, solver: diffrax.AbstractSolver, settings: Settings
) -> Equation:
    return Equation(
        loss,
        ravel,
        solver,
        jnp.asarray(settings.rtol),
        jnp.asarray(settings.atol),
        None if settings.step is None else jnp.asarray(settings.step),
    )


def how_it_ended(
    state: State,
    result: diffrax.RESULTS,
    t1: float,
    attempted: int,
    max_steps: int | None,
) -> tuple[diffrax.RESULTS, str] | None:
    """The result and, if it is not that the horizon was reached, why; or None if
    there is more to do."""
    t = float(state.t)
    if ended_by(result, diffrax.RESULTS.event_occurred):
        return diffrax.RESULTS.event_occurred, f"stopped at t = {t:.10g} by its event"
    if t >= t1:
        return diffrax.RESULTS.successful, ""
    if max_steps is not None and attempted >= max_steps:
        reason = f"gave up at t = {t:.10g} of {t1:g}, after `max_steps` = {max_steps:,}"
        return diffrax.RESULTS.max_steps_reached, f"{reason} steps"
    if ended_by(result, diffrax.RESULTS.dt_min_reached):
        reason = (
            f"could not go on from t = {t:.10g}: every step was rejected, down to one "
            f"of {float(state.dt):.0e} (is the loss finite and smooth there? "
            f"it is {float(state.loss):.6g})"
        )
        return diffrax.RESULTS.dt_min_reached, reason
    if ended_by(result, diffrax.RESULTS.internal_error):
        reason = (
            f"left the finite numbers after t = {t:.10g}, where the loss was "
            f"{float(state.loss):.6g}: a shorter `step` may hold it"
        )
        return diffrax.RESULTS.internal_error, reason
    if not ended_by(result, diffrax.RESULTS.max_steps_reached):
        why = diffrax.RESULTS[result]
        return diffrax.RESULTS.internal_error, f"broke off at t = {t:.10g}: {why}"
    return None


def counts(solver: Any, work: Any, attempted: int) -> dict[str, int | None]:
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


def _sum(stats: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Added to what was so before; None where either is not known."""
    before = {name: stats.get(name) for name in more}
    return {
        name: None if value is None or before[name] is None else value + before[name]
        for name, value in more.items()
    }


def _identity(
    wanted: Wanted, state: Any, stored: Float[np.ndarray, " stored"]
) -> dict[str, Any]:
    """What a checkpoint is of. A loss of a user's own is known by its value and the
    first step's length, which follows from its gradient."""
    loss, settings = wanted.loss, wanted.settings
    known = storage.can_pack(loss)
    return {
        "loss": (
            storage.digest(loss) if known else [float(state.loss), float(state.dt)]
        ),
        "params": storage.digest(jax.tree.leaves(wanted.start)),
        **settings._asdict(),
        "ts": storage.digest(wanted.times),
        "save_params": storage.digest(stored),
        "observables": sorted({*wanted.named, *wanted.functions}),
        # Not what it prints as: that may have an address in it.
        "event": getattr(wanted.event, "__name__", type(wanted.event).__name__),
        "max_steps": wanted.max_steps,
        "flow": (
            None
            if wanted.earlier is None
            else storage.digest(jax.tree.leaves(wanted.earlier.final))
        ),
        "versions": versions(),
    }


def _stored_times(
    save_params: Any, times: Float[np.ndarray, " times"], size: int
) -> Float[np.ndarray, " stored"]:
    """At which of the saved times the parameters are stored; the end is in any case."""
    if save_params is None:
        return times[thinned(len(times), PARAMS_MEMORY // (8 * size))]
    if isinstance(save_params, bool):
        return times if save_params else times[:0]
    return save_params


def thinned(count: int, fitting: int) -> Int[np.ndarray, " kept"]:
    """Which of `count` to keep where so many fit: evenly, with the first and last."""
    kept = min(count, max(2, fitting))
    return np.unique(np.linspace(0, count - 1, kept).round().astype(int))


def _memory_needed(
    wanted: Wanted, row: PyTree, stored: int, size: int
) -> dict[str, int]:
    """Bytes, about: what the solver works on, a segment's dense output and its copy,
    the dense output that is kept, and what is saved; not what the loss itself takes."""
    solver: Any = wanted.choice.solver
    a_step = 8 * size * (1 if solvers.has_mesh(solver) else 8)
    # Events are located on the dense output of a step, which is not the mesh's.
    rows = 8 if solvers.has_mesh(solver) and wanted.event is not None else 1
    params = sum(8 * leaf.size for leaf in jax.tree.leaves(row.params))
    saved = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(row))
    parts = {
        "solver": solvers.memory(solver, size),
        "segments": 2 * rows * max(SEGMENT_MEMORY, SMALLEST_SEGMENT * a_step),
        "dense": wanted.dense_memory,
        # The rows are joined in the end.
        "saved": 2 * (len(wanted.times) * (saved - params) + (stored + 1) * params),
    }
    return {**parts, "total": sum(parts.values())}


#
# Checks, before any work starts
#


def _refuse_too_much(memory: dict[str, int], size: int) -> None:
    available = machine.available_memory()
    if memory["total"] > available:
        parts = {k: machine.readable(v) for k, v in memory.items()}
        raise ValueError(
            f"a flow of {size:,} numbers takes about {parts['total']}, and "
            f"{machine.readable(available)} are available: {parts['solver']} for the "
            f"solver, {parts['segments']} for its latest steps, {parts['dense']} for "
            f"dense output (`dense_memory`) and {parts['saved']} for what is saved (at "
            "`ts`: `observables`, and as `save_params` says the parameters)."
        )


def _refuse_bad_start(loss: Float[Array, ""], dt: Float[Array, ""]) -> None:
    if not np.isfinite(loss):
        raise ValueError(
            f"`loss` must be finite at `params`, where the flow starts; it is {loss}."
        )
    if not np.isfinite(dt):
        raise ValueError("`loss` must have a finite gradient at `params`; it has not.")
