"""One flow of an ensemble, from its start to its end, as one compiled function."""

import dataclasses
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._core.compiled import compiled
from .._core.ravel import Ravel
from .._core.types import AnyArray
from ..problems import Observable
from ._energy import EnergyAccount, plain_balance
from ._equation import Equation
from ._events import Condition
from ._lapack_calls import factorised
from ._segments import Dense, State, plain_advance, plain_start
from ._snapshots import Snapshot, Watch, fill_rows


class Members(eqx.Module):
    """The data that differ between members, along a leading axis; on the host or on
    the device."""

    varying: PyTree
    """The arrays of the losses that are not the same for all members."""
    y0: Float[AnyArray, "members n"]
    t1: Float[AnyArray, " members"]
    atol: Float[AnyArray, " members"]


class Common(eqx.Module):
    """The data that all members share."""

    loss: PyTree
    """The losses, without the arrays that vary."""
    ravel: Ravel = eqx.field(static=True)
    solver: diffrax.AbstractSolver
    rtol: Float[Array, ""]
    budget: Int[Array, ""]
    times: Float[Array, " times"]
    stored: Int[Array, " stored"]
    """The indices of the times at which the parameters are stored."""
    named: tuple[str, ...] = eqx.field(static=True)
    functions: dict[str, Observable]
    event: Condition | None
    steps: int = eqx.field(static=True)
    """Steps in a segment."""
    at_once: int = eqx.field(static=True)
    """How many states are observed together, by observables that call LAPACK."""

    def equation(self, member: Any) -> Equation:
        loss: Any = eqx.combine(self.loss, member.varying)
        return Equation(loss, self.ravel, self.solver, self.rtol, member.atol)


class WholeFlow(eqx.Module):
    """The flow of one member, or of several along a leading axis."""

    rows: Snapshot
    """Snapshots at the saved times, of which the first `saved` were reached; the
    parameters at the stored ones."""
    saved: Int[Array, "*members"]
    """How many of the saved times were reached."""
    end: Snapshot
    """The snapshot at the end."""
    state: State
    """The final state without its large parts: y and the solver's own state."""
    result: diffrax.RESULTS
    account: EnergyAccount
    accepted: Int[Array, "*members"]
    rejected: Int[Array, "*members"]


def _whole_flow(common: Common, member: Any) -> WholeFlow:
    """One of the `Members` from its start to its end, segment after segment."""
    equation = common.equation(member)
    zero = jnp.zeros((), jnp.int64)

    # Row 0 is the end, then come the saved times, then rows that fill up a batch. A row
    # that is never written holds the start.
    size = 1 + len(common.times)
    states = jnp.tile(member.y0, (size + -size % common.at_once, 1))

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
            _filled(common.times, states, segment.dense, saved, reached),
            reached,
            accepted + segment.accepted,
            rejected + segment.rejected,
        )

    state, _ = plain_start(equation, member.y0, member.t1, common.budget)
    state, result, account, states, saved, accepted, rejected = jax.lax.while_loop(
        lambda carry: _is_open(carry[0], carry[1], member.t1),
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
    states = states.at[0].set(state.y)
    taken = _observed(common, equation, member.y0, states, saved + 1)
    end = jax.tree.map(lambda x: x[0], taken)
    rows = jax.tree.map(lambda x: x[1:size], taken)
    stored = jax.tree.map(lambda x: x[common.stored], rows.params)
    rows = dataclasses.replace(rows, params=stored)
    # `end` has the parameters, and the solver's own state is no longer needed.
    state = eqx.tree_at(
        lambda s: (s.y, s.solver_state, s.recent), state, (None, None, None)
    )
    return WholeFlow(rows, saved, end, state, result, account, accepted, rejected)


def _is_open(
    state: State, result: diffrax.RESULTS, t1: Float[Array, ""]
) -> Bool[Array, ""]:
    """Whether a member has further to go, and can."""
    return (
        (state.t < t1)
        & (result == diffrax.RESULTS.max_steps_reached)
        & (state.controller_state.budget > 0)
        & jnp.isfinite(state.loss)
        & jnp.isfinite(state.dt)
    )


def _filled(
    times: Float[Array, " times"],
    states: Float[Array, "rows n"],
    dense: Dense,
    first: Int[Array, ""],
    last: Int[Array, ""],
) -> Float[Array, "rows n"]:
    """`states` with those at the times from `first` until before `last`."""

    def one(i: Array, states: Array) -> Array:
        return states.at[i + 1].set(dense.evaluate(times[i]))

    return jax.lax.fori_loop(first, last, one, states)


def _observed(
    common: Common,
    equation: Equation,
    y0: Float[Array, " n"],
    states: Float[Array, "rows n"],
    count: Int[Array, ""],
) -> Snapshot:
    """Snapshots of the first `count` states; the other rows are arbitrary.

    Observables that call LAPACK have a loop of their own, over several states at a
    time. Evaluated one by one, the others are a loop that XLA's CPU compiler turns into
    one function."""
    watch = Watch(equation, y0, common.named, common.functions)
    start = equation.ravel.unravel(y0)
    calling = [k for k, f in watch.observed_by.items() if factorised(f, start)]
    quick, calling = watch.without(calling), watch.only(calling)
    one_by_one = jax.default_backend() == "cpu"
    batch = 1 if one_by_one else common.at_once
    taken = fill_rows(quick.snapshot, states, count, batch)
    if not calling.observed_by:
        return taken
    called = fill_rows(calling.observables, states, count, common.at_once)
    return dataclasses.replace(taken, observables=taken.observables | called)


def _some_flows(common: Common, members: Members, batch: int) -> WholeFlow:
    return jax.lax.map(
        lambda member: _whole_flow(common, member),
        members,
        # A batch of one would still run both branches of every conditional.
        batch_size=None if batch == 1 else batch,
    )


some_flows_small = compiled(_some_flows, one_thread=True)
some_flows_large = compiled(_some_flows)
