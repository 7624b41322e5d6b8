"""integrate_ensemble(): many flows in, one compiled loop over them, an Ensemble out."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from .. import solvers
from .._core import checks, machine
from .._core.checks import Checked
from .._core.compiled import ONE_THREAD, CompileClock, make_room_for_code
from .._core.progress import count_bar
from .._core.ravel import Ravel
from .._stepping._record import Snapshot, Watch, balances, certificate
from .._stepping._segments import EVALUATIONS_PER_PANEL, Equation, states_at_once
from ..flows._ensemble import Ensemble, EnsembleError
from ..flows._flow import Flow, Settings
from ..problems._loss import as_loss, checked_loss
from ._factorisations import factorised
from ._integrate import (
    check_event,
    check_rtol,
    chosen_observables,
    default_atol,
    saved_times,
)
from ._members import member, number_of_members, one_for_each, same_kind, stacked
from ._solve import PARAMS_MEMORY, counts, how_it_ended, thinned
from ._whole_flow import Common, Members, Outcome, some_flows_large, some_flows_small

SEGMENT_MEMORY = 2**19
"""Bytes of dense output in a segment: it is used at once and stays in the cache."""
FEWEST_STEPS, MOST_STEPS = 64, 512
"""In a segment."""
SNAPSHOTS_AT_ONCE = 16
"""At most, and one where several threads take them: see `threads`."""
MEMBERS_AT_A_CALL = 8
"""That one call of compiled code integrates one after another: enough that the call is
nothing beside them, few enough to show progress and to keep all threads busy."""


def integrate_ensemble(
    problem: Any,
    params_batch: PyTree,
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
    save_params: Checked[bool | None] = None,
    threads: Checked[int | None] = None,
    batch: Checked[int | None] = None,
) -> Ensemble:
    """Integrate many gradient flows of one kind: over seeds, and over losses of equal
    structure, such as problems on chains of equal size.

    A whole flow, with its snapshots and certificate, is one compiled function, and a
    loop over the members is compiled around it; so a member takes its own steps, and
    one that ends early or fails costs the others nothing. `integrate` would bring the
    same flows, one by one and slower.

    **Arguments:**

    - `problem`: a loss for all members, as for `integrate`, or a list of one for each:
        what differs between them must be numbers in arrays of equal shape.
    - `params_batch`: where the members start: parameters with a leading axis of members
        in every array, as `gradflow.stack` makes of a list.
    - `t1`, `ts`, `solver`, `rtol`, `observables`, `event`, `max_steps`: as for
        `integrate`; solvers with steps of one length are not for ensembles.
    - `atol`: as for `integrate`; by default each member has its own.
    - `progress`: whether to show a bar, with the rate and the time left, and before it
        what memory the ensemble takes. More than there is is refused in any case.
    - `throw`: whether an `EnsembleError` is raised if members could not go on; it holds
        the ensemble, with the other members and what was computed of these.
    - `save_params`: whether the parameters are stored at every saved time. By default
        at as many as fit in 256 MB for all members; the end is always stored.
    - `threads`: how many members are integrated at a time, by default as many as the
        process has cores; one where a single flow keeps several busy, where members
        step together, or where observables factorise batches of matrices (jaxlib 0.10.2
        was seen to wait for itself for ever when two threads do so).
    - `batch`: how many members step together, in lockstep; by default one on CPUs,
        where that is fastest, and 64 elsewhere.

    **Returns:**

    An `Ensemble`.
    """
    t1 = checks.positive_number("t1", t1)
    times = saved_times(ts, t1)
    solvers.resolve(solver)
    rtol = check_rtol(rtol)
    if atol is not None:
        atol = checks.positive_number("atol", atol, zero_allowed=True)
    if max_steps is not None:
        max_steps = checks.whole_number("max_steps", max_steps)
    size = number_of_members(params_batch)
    losses = one_for_each(problem, size)
    first: Any = member(params_batch, 0)
    losses = [as_loss(loss, "problem") for loss in losses]
    checked_loss(losses[0], first, "problem", "params_batch")
    for i, loss in enumerate(losses[1:] if len(losses) > 1 else ()):
        same_kind(losses[0], loss, i + 1)
    named, functions = chosen_observables(losses[0], first, observables)
    check_event(event, first)
    ravel = Ravel.of(first)
    choice = solvers.resolve(solver, ravel.size, losses[0].is_euclidean)
    if choice.takes_fixed_steps:
        raise ValueError(
            "`solver` must be adaptive for an ensemble, as each member chooses its own "
            f"steps, got {choice.name!r}."
        )
    # As `ravel` would, all at once.
    leaves = [np.reshape(leaf, (size, -1)) for leaf in jax.tree.leaves(params_batch)]
    y0 = np.concatenate(leaves, axis=1, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(y0).all(axis=1))
    if bad.size:
        raise ValueError(
            f"`params_batch` must be finite, but member {bad[0]} is not"
            f"{f' ({bad.size} in all)' if bad.size > 1 else ''}."
        )
    stored = _stored_places(save_params, times, ravel.size, size)
    small = ravel.size <= ONE_THREAD
    on_cpu = jax.default_backend() == "cpu"
    batch = checks.whole_number(
        "batch", (1 if on_cpu else 64) if batch is None else batch
    )
    if threads is None:
        watched = [losses[0].observables[name] for name in named]
        alone = batch > 1 or not (small and on_cpu)
        alone = alone or any(
            axes > 2
            for function in (*watched, *functions.values())
            for axes in factorised(function, first)
        )
        threads = 1 if alone else len(machine.cores())
    threads = checks.whole_number("threads", threads)

    make_room_for_code()
    began, compiling = time.perf_counter(), CompileClock()
    shared, varying = stacked(losses)
    tolerances = default_atol(y0, rtol) if atol is None else atol
    fitting = SEGMENT_MEMORY // (8 * ravel.size)
    common = Common(
        loss=shared,
        ravel=ravel,
        solver=choice.solver,
        rtol=jnp.asarray(rtol),
        budget=jnp.asarray(solvers.NO_LIMIT if max_steps is None else max_steps),
        times=jnp.asarray(times),
        stored=jnp.asarray(stored),
        named=named,
        functions=functions,
        event=event,
        steps=max(FEWEST_STEPS, min(MOST_STEPS, fitting)),
        at_once=1
        if threads > 1
        else min(SNAPSHOTS_AT_ONCE, states_at_once(ravel.size)),
    )
    members = Members(
        varying=varying,
        y0=y0,
        t1=np.full(size, t1),
        atol=np.broadcast_to(tolerances, size),
    )
    memory = memory_needed(common, losses[0], size, min(threads, size) * batch)
    _refuse_too_much(memory, ravel.size, size)
    run = some_flows_small if small else some_flows_large
    outcomes = _run_all(run, common, members, threads, batch, progress, memory["total"])
    compile_seconds = compiling.seconds()
    seconds = time.perf_counter() - began - compile_seconds

    flows = []
    for i in range(size):
        outcome: Any = jax.tree.map(lambda x, i=i: x[i], outcomes)
        settings = Settings(t1, choice.name, rtol, float(members.atol[i]))
        loss = losses[i if len(losses) > 1 else 0]
        flows.append(
            _flow(
                outcome,
                loss,
                member(params_batch, i),
                choice,
                settings,
                times,
                stored,
                max_steps,
                {
                    "compile_seconds": compile_seconds / size,
                    "run_seconds": seconds / size,
                },
            )
        )
    ensemble = Ensemble(tuple(flows), times)
    if throw and ensemble.failed:
        raise EnsembleError(ensemble)
    return ensemble


def _run_all(
    run: Any,
    common: Common,
    members: Members,
    threads: int,
    batch: int,
    progress: bool,
    memory: int,
) -> Outcome:
    """All members' outcomes, on the host."""
    size, numbers = members.y0.shape
    stated = f"{size:,} × {numbers:,} numbers, at most {machine.readable(memory)}"
    at_once = max(1, min(MEMBERS_AT_A_CALL, -(-size // threads)))
    at_once = max(batch, at_once)

    def call(chunk: Members) -> Outcome:
        chunk = jax.tree.map(jnp.asarray, chunk)
        return jax.tree.map(np.asarray, run(common, chunk, batch))

    def chunks() -> Iterator[Members]:
        for first in range(0, size, at_once):
            # The last call is filled up with members that end where they start.
            index = np.arange(first, first + at_once)
            chunk = jax.tree.map(lambda x, i=index: x[np.minimum(i, size - 1)], members)
            ends = np.where(index < size, chunk.t1, 0.0)
            yield eqx.tree_at(lambda m: m.t1, chunk, ends)

    with (
        count_bar(size, "flows", progress, stated) as report,
        ThreadPoolExecutor(threads) as pool,
    ):
        if threads > 1:
            # Members that end where they start: compiles, before threads do so twice.
            chunk = next(chunks())
            call(eqx.tree_at(lambda m: m.t1, chunk, 0 * chunk.t1))
        done = []
        # Compiled code runs without Python's lock.
        for outcome in pool.map(call, chunks()):
            done.append(outcome)
            report(min(len(done) * at_once, size), "")
    return jax.tree.map(lambda *x: np.concatenate(x)[:size], *done)


def _flow(
    outcome: Outcome,
    loss: Any,
    start: PyTree,
    choice: solvers.Choice,
    settings: Settings,
    times: Float[np.ndarray, " times"],
    stored: Int[np.ndarray, " stored"],
    max_steps: int | None,
    seconds: dict[str, float],
) -> Flow:
    """A member as `integrate` would have brought it, but without dense output."""
    attempted = int(outcome.accepted) + int(outcome.rejected)
    saved, t = int(outcome.saved), float(outcome.state.t)
    ended = how_it_ended(
        outcome.state, outcome.result, settings.t1, attempted, max_steps
    )
    if ended is None:  # only where the start is not finite
        ended = (
            diffrax.RESULTS.internal_error,
            "could not start: the loss or its gradient is not finite at its "
            f"parameters, where it is {float(outcome.state.loss):g}",
        )
    result, reason = ended
    within = stored < saved
    taken = outcome.rows
    rows = Snapshot(
        jax.tree.map(lambda x: x[within], taken.params),
        taken.loss[:saved],
        taken.speed[:saved],
        *jax.tree.map(
            lambda x: x[:saved], (taken.observables, taken.drift, taken.size)
        ),
    )
    ts, stored_ts = times[:saved], times[stored[within]]
    if saved == 0 or ts[-1] < t:
        rows = _with_row(rows, outcome.end)
        ts, stored_ts = np.append(ts, t), np.append(stored_ts, t)
    elif not within.any() or stored_ts[-1] < t:
        added = jax.tree.map(_append, rows.params, outcome.end.params)
        rows = dataclasses.replace(rows, params=added)
        stored_ts = np.append(stored_ts, t)
    work = outcome.state.controller_state.work
    return Flow(
        ts=ts,
        params=rows.params,
        loss=np.asarray(rows.loss),
        speed=np.asarray(rows.speed),
        observables=rows.observables,
        stats={
            "solver": choice.name,
            "choice": choice.reason,
            "num_accepted_steps": int(outcome.accepted),
            "num_rejected_steps": int(outcome.rejected),
            **counts(choice.solver, work, attempted),
            "num_certificate_evaluations": EVALUATIONS_PER_PANEL
            * int(outcome.account.panels),
            **seconds,
            "dense_until": 0.0,
            "balances": balances(outcome.account, rows),
            "reason": reason,
        },
        result=result,
        certificate=certificate(outcome.account, rows),
        start=jax.tree.map(np.asarray, start),
        settings=settings,
        problem=loss,
        solver=choice.solver,
        stored_ts=stored_ts if len(stored_ts) < len(ts) else None,
    )


def memory_needed(common: Common, loss: Any, members: int, under_way: int) -> dict:
    """Bytes, about, of an ensemble: for the members under way their solver, a segment's
    dense output, and the states at all saved times with what is observed of them; of
    all members what is kept, and joined."""
    size = common.ravel.size
    state = 8 * size
    on_mesh = solvers.has_mesh(common.solver) and common.event is None
    equation = Equation(loss, common.ravel, common.solver, common.rtol, common.rtol)
    watch = Watch(equation, jnp.zeros(size), common.named, common.functions)
    row = watch.shape
    params = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(row.params)
    )
    observed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(row))
    observed -= params
    rows = 1 + len(common.times)
    parts = {
        "solver": under_way * solvers.memory(common.solver, size),
        "segments": under_way * common.steps * state * (1 if on_mesh else 8),
        "states": under_way * rows * (state + params + observed),
        "saved": 2 * members * (rows * observed + (1 + len(common.stored)) * params),
    }
    return {**parts, "total": sum(parts.values())}


def _refuse_too_much(memory: dict[str, int], size: int, members: int) -> None:
    available = machine.available_memory()
    if memory["total"] > available:
        working = machine.readable(memory["total"] - memory["saved"])
        raise ValueError(
            f"an ensemble of {members:,} flows of {size:,} numbers takes about "
            f"{machine.readable(memory['total'])}, and {machine.readable(available)} "
            f"are available: {working} for the members under way (`threads`, `batch`, "
            f"`ts`) and {machine.readable(memory['saved'])} for what is saved (at "
            "`ts`: `observables`, and as `save_params` says the parameters). A "
            "`gradflow.sweep` over smaller ensembles keeps its results on disk."
        )


def _append(rows: Any, row: Any) -> np.ndarray:
    return np.concatenate([rows, row[None]])


def _with_row(rows: Snapshot, row: Snapshot) -> Snapshot:
    return jax.tree.map(_append, rows, row)


def _stored_places(
    save_params: Any, times: Float[np.ndarray, " times"], n: int, members: int
) -> Int[np.ndarray, " stored"]:
    if save_params is not None and not isinstance(save_params, bool):
        raise ValueError(
            f"`save_params` must be True, False or None, got {save_params!r}."
        )
    if save_params is None:
        return thinned(len(times), PARAMS_MEMORY // (8 * n * members))
    return np.arange(len(times) if save_params else 0)
