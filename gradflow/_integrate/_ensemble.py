"""integrate_ensemble(): many flows in, one compiled loop over them, an Ensemble out."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from .._core import checks, machine
from .._core.checks import Checked
from .._core.compiled import ONE_THREAD, RunClock, make_room_for_code
from .._core.progress import count_bar
from .._core.ravel import Ravel
from .._stepping import (
    RESULTS,
    Common,
    Equation,
    Members,
    Settings,
    State,
    Statistics,
    Watch,
    WholeFlow,
    counted_work,
    factorised,
    how_it_ended,
    result_name,
    some_flows_large,
    some_flows_small,
    states_at_once,
    versions,
)
from ..flows import Ensemble, EnsembleError, Origins, Records
from ..problems import AbstractLoss
from ..solvers import _internals as solvers
from ._members import (
    horizons,
    member,
    number_of_members,
    one_for_each,
    stacked,
    starts,
)
from ._memory import memory_of_ensemble, refuse_large_ensemble
from ._request import Request, default_atol, requested
from ._run import PARAMS_MEMORY, thinned

SEGMENT_MEMORY = 2**19
"""Bytes of dense output in a segment: it is used at once and stays in the cache."""
FEWEST_STEPS, MOST_STEPS = 64, 512
"""The fewest and most steps in a segment."""
SNAPSHOTS_AT_ONCE = 16
"""Snapshots taken together, unless several threads take them one by one; see
`threads`."""
MEMBERS_AT_A_CALL = 8
"""Members that one call of compiled code integrates one after another: enough to make
the call's overhead negligible, few enough to show progress and keep all threads busy.
"""


def integrate_ensemble(
    loss: Checked[Callable[[PyTree], Any] | Sequence[Callable[[PyTree], Any]]],
    params_batch: PyTree,
    t1: Checked[float | Sequence[float]],
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
    loop over the members is compiled around it. A member takes its own steps, and one
    that ends early or fails costs the others nothing. `integrate` would give the same
    flows, one by one and more slowly.

    **Arguments:**

    - `loss`: a loss for all members, as for `integrate`, or a list with one for each:
        they may differ only in the numbers of arrays of equal shape.
    - `params_batch`: where the members start: parameters with a leading axis of members
        in every array, as `gradflow.stack` makes from a list.
    - `t1`: the horizon, or a list with one for each member.
    - `ts`, `solver`, `rtol`, `observables`, `event`, `max_steps`: as for `integrate`;
        solvers with a fixed step are not available for ensembles.
    - `atol`: as for `integrate`; by default each member has its own.
    - `progress`: whether to show a bar, with the rate and the time left, and above it
        the memory that the ensemble takes. An ensemble that exceeds the available
        memory is refused in any case.
    - `throw`: whether an `EnsembleError` is raised if members could not continue; it
        holds the ensemble, including what was computed of those members.
    - `save_params`: whether the parameters are stored at every saved time. By default
        at as many as fit in 256 MiB for all members; the end is always stored.
    - `threads`: how many members are integrated at a time, by default as many as the
        process has cores; one if a single flow keeps several cores busy, if members
        step together, or if observables factorise batches of matrices (jaxlib 0.10.2
        can deadlock when two threads do so).
    - `batch`: how many members step together, in lockstep; by default one on CPUs,
        where that is fastest, and 64 on other devices.

    **Returns:**

    An `Ensemble`.
    """
    checks.refuse_tracers(loss, params_batch, t1)
    size = number_of_members(params_batch)
    ends, losses = horizons(t1, size), one_for_each(loss, size)
    request = requested(
        losses[0],
        member(params_batch, 0),
        float(ends.max()),
        ts=ts,
        solver=solver,
        rtol=rtol,
        atol=atol,
        observables=observables,
        event=event,
        max_steps=max_steps,
        names=("loss", "params_batch"),
    )
    _refuse_fixed_steps(request)
    y0 = starts(params_batch, size)
    stored = _stored_places(save_params, request.times, y0.shape[1], size)
    way = _way(request, threads, batch)

    make_room_for_code()
    clock = RunClock()
    common, members = _compiled_inputs(request, losses, y0, ends, atol, stored, way)
    memory = memory_of_ensemble(common, _row_shape(request), size, way.under_way(size))
    refuse_large_ensemble(memory, y0.shape[1], size)
    whole = _run_all(common, members, way, progress, memory["total"])
    origins = _origins(request, losses, params_batch, members)
    records = _records(whole, request, ends)
    stats = _statistics(request, clock, memory)
    ensemble = Ensemble(origins, records, request.times, stored, stats)
    if throw and ensemble.failed:
        raise EnsembleError(ensemble)
    return ensemble


def _statistics(
    request: Request, clock: RunClock, memory: dict[str, int]
) -> Statistics:
    """The statistics of all members together."""
    return Statistics(
        solver=request.choice.name,
        choice=request.choice.reason,
        compile_seconds=clock.compile_seconds,
        run_seconds=clock.run_seconds,
        memory=memory,
        notes=request.notes,
        versions=versions(),
    )


def _refuse_fixed_steps(request: Request) -> None:
    if request.choice.takes_fixed_steps:
        raise ValueError(
            "`solver` must be adaptive for an ensemble, as each member chooses its own "
            f"steps, got {request.choice.name!r}."
        )


class _Way(NamedTuple):
    """How an ensemble is run."""

    threads: int
    batch: int
    is_small: bool

    def under_way(self, members: int) -> int:
        """The number of members that are integrated at a time."""
        return min(self.threads, members) * self.batch


def _way(request: Request, threads: Any, batch: Any) -> _Way:
    """`threads` and `batch` as asked for, or their defaults."""
    params = request.origin.start
    is_small = Ravel.of(params).size <= ONE_THREAD
    on_cpu = jax.default_backend() == "cpu"
    batch = checks.whole_number(
        "batch", (1 if on_cpu else 64) if batch is None else batch
    )
    if threads is None:
        known = request.loss.observables
        watched = [known[name] for name in request.named]
        watched += request.functions.values()
        alone = (
            batch > 1
            or not (is_small and on_cpu)
            or any(axes > 2 for f in watched for axes in factorised(f, params))
        )
        threads = 1 if alone else len(machine.cores())
    return _Way(checks.whole_number("threads", threads), batch, is_small)


def _compiled_inputs(
    request: Request,
    losses: list[AbstractLoss],
    y0: Float[np.ndarray, "members n"],
    ends: Float[np.ndarray, " members"],
    atol: Any,
    stored: Int[np.ndarray, " stored"],
    way: _Way,
) -> tuple[Common, Members]:
    """The data that the members share, and those that differ."""
    size, numbers = y0.shape
    settings, limit = request.settings, request.max_steps
    shared, varying = stacked(losses)
    tolerances = default_atol(y0, settings.rtol) if atol is None else settings.atol
    fitting = SEGMENT_MEMORY // (8 * numbers)
    common = Common(
        loss=shared,
        ravel=Ravel.of(request.origin.start),
        solver=request.choice.solver,
        rtol=jnp.asarray(settings.rtol),
        budget=jnp.asarray(solvers.NO_LIMIT if limit is None else limit),
        times=jnp.asarray(request.times),
        stored=jnp.asarray(stored),
        named=request.named,
        functions=request.functions,
        event=request.event,
        steps=max(FEWEST_STEPS, min(MOST_STEPS, fitting)),
        at_once=1
        if way.threads > 1
        else min(SNAPSHOTS_AT_ONCE, states_at_once(numbers)),
    )
    return common, Members(
        varying=varying, y0=y0, t1=ends, atol=np.broadcast_to(tolerances, size)
    )


def _row_shape(request: Request) -> Any:
    """The shapes of a member's snapshot."""
    ravel = Ravel.of(request.origin.start)
    equation = Equation.of(request.loss, ravel, request.choice.solver, request.settings)
    zero = jnp.zeros(ravel.size)
    return Watch(equation, zero, request.named, request.functions).shape


def _run_all(
    common: Common, members: Members, way: _Way, progress: bool, memory: int
) -> WholeFlow:
    """The flows of all members, on the host."""
    size, numbers = members.y0.shape
    stated = f"{size:,} × {numbers:,} numbers, at most {machine.readable(memory)}"
    at_once = max(1, min(MEMBERS_AT_A_CALL, -(-size // way.threads)))
    at_once = max(way.batch, at_once)
    some_flows = some_flows_small if way.is_small else some_flows_large

    def call(chunk: Members) -> WholeFlow:
        chunk = jax.tree.map(jnp.asarray, chunk)
        return jax.tree.map(np.asarray, some_flows(common, chunk, way.batch))

    def chunks() -> Iterator[Members]:
        for first in range(0, size, at_once):
            # The last call is filled up with members that end where they start.
            index = np.arange(first, first + at_once)
            chunk = jax.tree.map(lambda x, i=index: x[np.minimum(i, size - 1)], members)
            ends = np.where(index < size, chunk.t1, 0.0)
            yield eqx.tree_at(lambda m: m.t1, chunk, ends)

    with (
        count_bar(size, "flows", progress, stated) as report,
        ThreadPoolExecutor(way.threads) as pool,
    ):
        if way.threads > 1:
            # Compile once, on members that end where they start, before two threads
            # compile the same.
            chunk = next(chunks())
            call(eqx.tree_at(lambda m: m.t1, chunk, 0 * chunk.t1))
        done = []
        # Compiled code runs without Python's lock.
        for outcome in pool.map(call, chunks()):
            done.append(outcome)
            report(min(len(done) * at_once, size), "")
    return jax.tree.map(lambda *x: np.concatenate(x)[:size], *done)


def _origins(
    request: Request,
    losses: list[AbstractLoss],
    params_batch: PyTree,
    members: Members,
) -> Origins:
    settings = request.settings
    return Origins(
        problems=tuple(losses),
        start=jax.tree.map(lambda x: np.asarray(x, np.float64), params_batch),
        settings=tuple(
            Settings(float(t1), settings.solver, settings.rtol, float(atol))
            for t1, atol in zip(members.t1, members.atol, strict=True)
        ),
        solver=request.choice.solver,
    )


def _records(
    whole: WholeFlow, request: Request, ends: Float[np.ndarray, " members"]
) -> Records:
    """What was recorded, with how each member ended and what work it took."""
    state = whole.state
    attempted = whole.accepted + whole.rejected
    endings, counts = [], []
    for i, t1 in enumerate(ends):
        one: State = jax.tree.map(lambda x, i=i: x[i], state)
        result = jax.tree.map(lambda x, i=i: x[i], whole.result)
        tries = int(attempted[i])
        ended = how_it_ended(one, result, float(t1), tries, request.max_steps)
        endings.append(_could_not_start(one) if ended is None else ended)
        work = one.controller_state.work
        counts.append(counted_work(request.choice, work, tries))
    return Records(
        rows=whole.rows,
        saved=np.asarray(whole.saved),
        end=whole.end,
        ended=np.asarray(state.t),
        account=whole.account,
        accepted=np.asarray(whole.accepted),
        rejected=np.asarray(whole.rejected),
        counts={name: [each[name] for each in counts] for name in counts[0]},
        results=tuple(result_name(result) for result, _ in endings),
        reasons=tuple(reason for _, reason in endings),
    )


def _could_not_start(state: State) -> tuple[Any, str]:
    return RESULTS.internal_error, (
        "could not start: the loss or its gradient is not finite at its parameters, "
        f"where it is {float(state.loss):g}"
    )


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
