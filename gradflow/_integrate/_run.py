"""From a request to a flow: segment after segment, recorded, with checkpoints."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._core import machine
from .._core.compiled import RunClock, make_room_for_code
from .._core.progress import progress_bar
from .._core.ravel import Ravel
from .._stepping import (
    Equation,
    Outcome,
    Recorder,
    State,
    Statistics,
    Watch,
    advance,
    counted_work,
    how_it_ended,
    start,
    versions,
)
from ..flows import Flow, FlowError
from ..solvers import _internals as solvers
from ._checkpoint import Checkpoint, identity
from ._memory import memory_of_flow, refuse_large_flow
from ._request import Request

PARAMS_MEMORY = 2**28
"""Bytes of parameters at saved times that are stored unless more are asked for."""


def run(request: Request) -> Flow:
    """Integrate the flow that was requested."""
    make_room_for_code()
    clock = RunClock()
    origin = request.origin
    ravel = Ravel.of(origin.start)
    y0 = ravel.ravel(origin.start)
    equation = Equation.of(request.loss, ravel, request.choice.solver, request.settings)
    watch = Watch(equation, y0, request.named, request.functions)
    stored = _stored_times(request, ravel.size)
    memory = memory_of_flow(request, watch.shape, len(stored), ravel.size)
    refuse_large_flow(memory, ravel.size)

    state, steps = _begin(request, equation, y0)
    record = Recorder(watch, state, request.times, stored, request.dense_memory)
    if request.past is not None:
        record.continue_from(request.past)
    before = record.attempted
    checkpoint = None
    if request.checkpoint is not None:
        of = identity(request, state, stored)
        checkpoint = Checkpoint(request.checkpoint, request.checkpoint_every, of)
        found = checkpoint.read(state, watch.shape)
        if found is not None:
            state, past, clock.earlier = found
            record.continue_from(past)
    t1, ended = jnp.asarray(request.settings.t1), None
    stated = f"{ravel.size:,} numbers, at most {machine.readable(memory['total'])}"
    with progress_bar(request.settings.t1, request.progress, stated) as report:
        while ended is None:
            segment = advance(equation, state, t1, steps, request.event)
            state = segment.state
            record.add(segment)
            report(record.t, float(state.loss), record.attempted)
            tries = record.attempted - before
            ended = how_it_ended(
                state, segment.result, float(t1), tries, request.max_steps
            )
            if checkpoint is not None and ended is None and checkpoint.is_due:
                checkpoint.write(state, record.past, clock.run_seconds)

    work = state.controller_state.work
    outcome = _outcome(request, record, clock, memory, ended, work, before)
    # In double precision, whatever the user passed.
    began_at = jax.tree.map(np.asarray, ravel.unravel(y0))
    flow = Flow.of(origin._replace(start=began_at), outcome, request.earlier)
    if checkpoint is not None and flow.ended_as_wanted:
        checkpoint.remove()
    if request.throw and not flow.ended_as_wanted:
        raise FlowError(
            f"The flow {flow.stats.reason}. What was computed until then is in this "
            "exception's `flow`; `throw=False` returns it instead.",
            flow,
        )
    return flow


def _outcome(
    request: Request,
    record: Recorder,
    clock: RunClock,
    memory: dict[str, int],
    ended: tuple[diffrax.RESULTS, str],
    work: solvers.Work,
    before: int,
) -> Outcome:
    """All that was recorded, with the work since `before` attempted steps."""
    (result, reason), snapshots = ended, record.close()
    return Outcome(
        ts=record.ts,
        params_ts=record.params_ts,
        params=snapshots.params,
        loss=np.asarray(snapshots.loss),
        speed=np.asarray(snapshots.speed),
        observables=snapshots.observables,
        result=result,
        stats=Statistics(
            solver=request.choice.name,
            choice=request.choice.reason,
            num_accepted_steps=record.accepted,
            num_rejected_steps=record.rejected,
            **counted_work(request.choice, work, record.attempted - before),
            num_certificate_evaluations=record.certificate_evaluations,
            compile_seconds=clock.compile_seconds,
            run_seconds=clock.run_seconds,
            memory=memory,
            reason=reason,
            notes=request.notes,
            versions=versions(),
        ),
        continuation=record.continuation(snapshots),
        pieces=record.pieces,
    )


def _begin(
    request: Request, equation: Equation, y0: Float[Array, " n"]
) -> tuple[State, int]:
    """The state from which the solve starts, and the number of steps in a segment."""
    limit = request.max_steps
    earlier, past = request.earlier, request.past
    state, steps = start(
        equation,
        y0 if earlier is None else equation.ravel.ravel(earlier.final),
        jnp.asarray(request.settings.t1),
        jnp.asarray(solvers.NO_LIMIT if limit is None else limit),
        jnp.asarray(0.0 if past is None else past.t),
    )
    if not np.isfinite(state.loss):
        raise ValueError(
            "`loss` must be finite at `params`, where the flow starts; it is "
            f"{state.loss}."
        )
    if not np.isfinite(state.dt):
        raise ValueError(
            "`loss` must have a finite gradient at `params`, where the flow starts; it "
            "does not."
        )
    return state, steps


def _stored_times(request: Request, size: int) -> Float[np.ndarray, " stored"]:
    """The saved times at which the parameters are stored; the end always is."""
    times, wanted = request.times, request.save_params
    if wanted is None:
        return times[thinned(len(times), PARAMS_MEMORY // (8 * size))]
    if isinstance(wanted, bool):
        return times if wanted else times[:0]
    return wanted


def thinned(count: int, fitting: int) -> Int[np.ndarray, " kept"]:
    """Indices of at most `fitting` of `count` things (but at least two), evenly spread,
    with the first and the last."""
    kept = min(count, max(2, fitting))
    return np.unique(np.linspace(0, count - 1, kept).round().astype(int))
