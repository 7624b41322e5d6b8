"""integrate_ensemble(): many flows in, one compiled loop over them, an Ensemble out."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params
from jaxtyping import Array, Bool, Float, Int, PyTree

from . import _checks, solvers
from ._certificate import EnergyAccount
from ._checks import Checked
from ._compile_clock import CompileClock, make_room_for_code
from ._ensemble import Ensemble, EnsembleError
from ._flow import Flow, Settings, fill_rows
from ._integrate import (
    SMALLEST_SCALE,
    check_event,
    check_rtol,
    chosen_observables,
    saved_times,
)
from ._machine import cores
from ._metric import is_euclidean
from ._progress import count_bar
from ._ravel import Ravel
from ._record import Snapshot, Watch, balances, certificate
from ._segments import (
    EVALUATIONS_PER_PANEL,
    ONE_THREAD,
    Equation,
    State,
    compiled,
    plain_advance,
    plain_balance,
    plain_start,
    states_at_once,
)
from ._solve import PARAMS_MEMORY, counts, how_it_ended, thinned
from ._types import AnyArray

SEGMENT_MEMORY = 2**19
"""Bytes of dense output in a segment: it is used at once and stays in the cache."""
FEWEST_STEPS, MOST_STEPS = 64, 512
"""In a segment."""
SNAPSHOTS_AT_ONCE = 16
"""At most, and one where several threads take them: see `threads`."""
MEMBERS_AT_A_CALL = 8
"""That one call of compiled code integrates one after another: enough that the call is
nothing beside them, few enough to show progress and to keep all threads busy."""


class _Members(eqx.Module):
    """What is each member's own, along a leading axis: on the host, or in JAX."""

    varying: PyTree
    """Of the losses, where they are not all equal."""
    y0: Float[AnyArray, "members n"]
    t1: Float[AnyArray, " members"]
    atol: Float[AnyArray, " members"]


class _Common(eqx.Module):
    """What all members share."""

    loss: PyTree
    """The losses, without what varies."""
    ravel: Ravel = eqx.field(static=True)
    solver: diffrax.AbstractSolver
    rtol: Float[Array, ""]
    budget: Int[Array, ""]
    times: Float[Array, " times"]
    stored: Int[Array, " stored"]
    """At which of them the parameters are stored."""
    named: tuple[str, ...] = eqx.field(static=True)
    functions: dict[str, Callable[[PyTree], Any]]
    event: Callable[[PyTree], Any] | None
    steps: int = eqx.field(static=True)
    """In a segment."""
    at_once: int = eqx.field(static=True)
    """How many states are observed together."""

    def equation(self, member: Any) -> Equation:
        loss: Any = eqx.combine(self.loss, member.varying)
        return Equation(loss, self.ravel, self.solver, self.rtol, member.atol)


class _Outcome(eqx.Module):
    """A member's flow."""

    rows: Snapshot
    """At the saved times that it reached; the parameters at the stored ones."""
    saved: Int[Array, "*members"]
    """How many times it reached."""
    end: Snapshot
    state: State
    """Without the solver's."""
    result: diffrax.RESULTS
    account: EnergyAccount
    accepted: Int[Array, "*members"]
    rejected: Int[Array, "*members"]


def _whole_flow(common: _Common, member: Any) -> _Outcome:
    """One of the `_Members` from its start to its end, segment after segment."""
    equation = common.equation(member)
    zero = jnp.zeros((), jnp.int64)

    # Where it ended, where it was at the saved times, and what fills up a batch: where
    # nothing else is written, the start.
    size = 1 + len(common.times)
    states = jnp.tile(member.y0, (size + -size % common.at_once, 1))

    def fill(
        states: Float[Array, "rows n"], dense: Any, first: Array, last: Array
    ) -> Float[Array, "rows n"]:
        def one(i: Array, states: Array) -> Array:
            return states.at[i + 1].set(dense.evaluate(common.times[i]))

        return jax.lax.fori_loop(first, last, one, states)

    def is_open(state: State, result: diffrax.RESULTS) -> Bool[Array, ""]:
        return (
            (state.t < member.t1)
            & (result == diffrax.RESULTS.max_steps_reached)
            & (state.controller_state.budget > 0)
            & jnp.isfinite(state.loss)
            & jnp.isfinite(state.dt)
        )

    def go_on(carry: tuple) -> tuple:
        state, _, account, states, saved, accepted, rejected = carry
        segment = plain_advance(equation, state, member.t1, common.steps, common.event)
        end = segment.state
        account = plain_balance(equation, account, segment.dense, end.t)
        reached = jnp.searchsorted(common.times, end.t, side="right").astype(jnp.int64)
        return (
            end,
            segment.result,
            account,
            fill(states, segment.dense, saved, reached),
            reached,
            accepted + segment.accepted,
            rejected + segment.rejected,
        )

    state, _ = plain_start(equation, member.y0, member.t1, common.budget)
    state, result, account, states, saved, accepted, rejected = jax.lax.while_loop(
        lambda carry: is_open(carry[0], carry[1]),
        go_on,
        (
            state,
            diffrax.RESULTS.max_steps_reached,
            EnergyAccount.open(state.loss),
            states,
            zero,
            zero,
            zero,
        ),
    )
    watch = Watch(equation, member.y0, common.named, common.functions)
    states = states.at[0].set(state.y)
    taken = fill_rows(watch.snapshot, states, saved + 1, common.at_once)
    end = jax.tree.map(lambda x: x[0], taken)
    rows = jax.tree.map(lambda x: x[1:size], taken)
    stored = jax.tree.map(lambda x: x[common.stored], rows.params)
    rows = dataclasses.replace(rows, params=stored)
    # The solver's own state is of use to nobody now, and large.
    state = eqx.tree_at(lambda s: (s.solver_state, s.recent), state, (None, None))
    return _Outcome(rows, saved, end, state, result, account, accepted, rejected)


def _some_flows(common: _Common, members: _Members, batch: int) -> _Outcome:
    return jax.lax.map(
        lambda member: _whole_flow(common, member),
        members,
        # A batch of one would still run both branches of every condition.
        batch_size=None if batch == 1 else batch,
    )


_some_flows_small = compiled(_some_flows, one_thread=True)
_some_flows_large = compiled(_some_flows)


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
    - `progress`: whether to show a bar, with the rate and the time left.
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
    t1 = _checks.positive_number("t1", t1)
    times = saved_times(ts, t1)
    solvers.resolve(solver)
    rtol = check_rtol(rtol)
    if atol is not None:
        atol = _checks.positive_number("atol", atol, zero_allowed=True)
    if max_steps is not None:
        max_steps = _checks.whole_number("max_steps", max_steps)
    size = _number_of_members(params_batch)
    losses = _one_for_each(problem, size)
    first: Any = _member(params_batch, 0)
    _checks.scalar_loss(losses[0], first)
    for i, loss in enumerate(losses[1:] if len(losses) > 1 else ()):
        _same_kind(losses[0], loss, i + 1)
    named, functions = chosen_observables(losses[0], first, observables)
    check_event(event, first)
    ravel = Ravel.of(first)
    choice = solvers.resolve(solver, ravel.size, is_euclidean(losses[0]))
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
    batch = _checks.whole_number(
        "batch", (1 if on_cpu else 64) if batch is None else batch
    )
    if threads is None:
        watched = [losses[0].observables[name] for name in named]
        alone = batch > 1 or not (small and on_cpu)
        alone = alone or factorises_batches([*watched, *functions.values()], first)
        threads = 1 if alone else len(cores())
    threads = _checks.whole_number("threads", threads)

    make_room_for_code()
    began, compiling = time.perf_counter(), CompileClock()
    shared, varying = _stacked(losses)
    rms = np.sqrt(np.mean(y0**2, axis=1))
    tolerances = 1e-3 * rtol * np.maximum(rms, SMALLEST_SCALE) if atol is None else atol
    fitting = SEGMENT_MEMORY // (8 * ravel.size)
    common = _Common(
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
    members = _Members(
        varying=varying,
        y0=y0,
        t1=np.full(size, t1),
        atol=np.broadcast_to(tolerances, size),
    )
    run = _some_flows_small if small else _some_flows_large
    outcomes = _run_all(run, common, members, threads, batch, progress)
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
                _member(params_batch, i),
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


def stack(params: Checked[Sequence[PyTree]]) -> PyTree:
    """Parameters of several members as one, with a leading axis of members."""
    if not isinstance(params, Sequence) or isinstance(params, str) or not params:
        raise ValueError(
            "`params` must be a list of parameters, one for each member, got "
            f"{params!r}."
        )
    trees = {jax.tree.structure(one) for one in params}
    shapes = {tuple(np.shape(x) for x in jax.tree.leaves(one)) for one in params}
    if len(trees) > 1 or len(shapes) > 1:
        raise ValueError(
            "`params` must be of one structure with arrays of the same shapes, got "
            f"{max(len(trees), len(shapes))} kinds."
        )
    return jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *params)


def factorises_batches(functions: Iterable[Callable], params: PyTree) -> bool:
    """Whether one of the functions has LAPACK work on several matrices at once."""

    def in_jaxpr(jaxpr: Any) -> bool:
        return any(
            (
                eqn.primitive.name in _FACTORISATIONS
                and any(len(getattr(x.aval, "shape", ())) > 2 for x in eqn.invars)
            )
            or any(map(in_jaxpr, jaxprs_in_params(eqn.params)))
            for eqn in jaxpr.eqns
        )

    return any(
        in_jaxpr(jax.make_jaxpr(function)(params).jaxpr) for function in functions
    )


_FACTORISATIONS = {
    *("cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product"),
    *("lu", "qr", "schur", "svd", "triangular_solve", "tridiagonal"),
}


def _run_all(
    run: Any,
    common: _Common,
    members: _Members,
    threads: int,
    batch: int,
    progress: bool,
) -> _Outcome:
    """All members' outcomes, on the host."""
    size = len(members.t1)
    at_once = max(1, min(MEMBERS_AT_A_CALL, -(-size // threads)))
    at_once = max(batch, at_once)

    def call(chunk: _Members) -> _Outcome:
        chunk = jax.tree.map(jnp.asarray, chunk)
        return jax.tree.map(np.asarray, run(common, chunk, batch))

    def chunks() -> Iterator[_Members]:
        for first in range(0, size, at_once):
            # The last call is filled up with members that end where they start.
            index = np.arange(first, first + at_once)
            chunk = jax.tree.map(lambda x, i=index: x[np.minimum(i, size - 1)], members)
            ends = np.where(index < size, chunk.t1, 0.0)
            yield eqx.tree_at(lambda m: m.t1, chunk, ends)

    with (
        count_bar(size, "flows", progress) as report,
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
    outcome: _Outcome,
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


#
# Members
#


def _number_of_members(params_batch: PyTree) -> int:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params_batch)]
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "`params_batch` must have a leading axis of members, of one length, in "
            f"every array (`gradflow.stack` makes it of a list), got shapes {shapes}."
        )
    return sizes.pop()


def _member(params_batch: PyTree, i: int) -> PyTree:
    return jax.tree.map(lambda leaf: np.asarray(leaf[i]), params_batch)


def _one_for_each(problem: Any, size: int) -> list[Any]:
    """The losses: one for all members, or one for each."""
    if not isinstance(problem, list | tuple):
        return [problem]
    if len(problem) != size:
        raise ValueError(
            f"`problem` must be one loss, or one for each of the {size} members of "
            f"`params_batch`, got {len(problem)}."
        )
    return list(problem)


def _is_number_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.generic)


def _same_kind(first: Any, other: Any, i: int) -> None:
    arrays, rest = eqx.partition(first, _is_number_array)
    others, other_rest = eqx.partition(other, _is_number_array)
    shapes, other_shapes = (
        [(np.shape(x), np.asarray(x).dtype) for x in jax.tree.leaves(a)]
        for a in (arrays, others)
    )
    if not eqx.tree_equal(rest, other_rest) or shapes != other_shapes:
        raise ValueError(
            "`problem` must list losses of one structure, with arrays of the same "
            f"shapes, so that one compilation serves all, but that of member {i} is of "
            "another than that of member 0."
        )


def _stacked(losses: list[Any]) -> tuple[PyTree, PyTree]:
    """What the losses share, and what varies, stacked."""
    arrays = [eqx.filter(loss, _is_number_array) for loss in losses]

    def is_shared(*leaves: Any) -> bool:
        return all(np.array_equal(leaves[0], leaf) for leaf in leaves[1:])

    shared = jax.tree.map(is_shared, *arrays)
    stays = eqx.partition(losses[0], _is_number_array)[1]
    common = jax.tree.map(lambda same, x: x if same else None, shared, arrays[0])
    varying = jax.tree.map(
        lambda same, *x: None if same else np.stack(x), shared, *arrays
    )
    return eqx.combine(stays, common), varying
