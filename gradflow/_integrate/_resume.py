"""resume(): a flow and a later horizon in, the flow to that horizon out."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from .. import solvers
from .._core import checks
from .._core.checks import Checked
from .._stepping._energy import EnergyAccount
from .._stepping._record import Past, Snapshot
from ..flows._flow import Flow
from ..problems._loss import checked_loss
from ._checkpoint import check_path
from ._integrate import (
    DEFAULT_TIMES,
    check_event,
    check_stored,
    chosen_observables,
    same_solver,
    saved_times,
)
from ._solve import Wanted, solve


def resume(
    flow: Checked[Flow],
    t1: Checked[float],
    *,
    ts: Any = None,
    observables: Checked[Mapping[str, Callable[[PyTree], Any]] | None] = None,
    event: Checked[Callable[[PyTree], Any] | None] = None,
    progress: bool = False,
    max_steps: Checked[int | None] = None,
    throw: bool = True,
    dense_memory: Checked[int] = 2**28,
    save_params: Any = None,
    checkpoint: Checked[str | os.PathLike | None] = None,
    checkpoint_every: Checked[float] = 60.0,
) -> Flow:
    """Go on with a flow from where it ended, by the same solver at the same tolerances,
    to the time `t1`.

    The certificate is of the whole: the energy balance goes on with its integral, and
    conserved quantities are held against the start at time 0. Work is added up.

    **Arguments:**

    - `flow`: what `integrate` or `Flow.load` returned, however it ended.
    - `t1`: the new horizon, later than the flow's end.
    - `ts`: further times to save, after the flow's end. By default geometrically
        spaced, as many to a decade as by default in `integrate`.
    - `observables`: functions for those of the flow's observables that are not the
        loss's own. The same are watched as before.

    Others are as in `integrate`; `max_steps` counts from here.

    **Returns:**

    A `Flow` from time 0 to `t1`.
    """
    if not isinstance(flow, Flow):
        raise ValueError(f"`flow` must be a Flow, got {type(flow).__name__}.")
    loss = flow.require_problem("`gradflow.resume`")
    t1, end = checks.positive_number("t1", t1), float(flow.ts[-1])
    if not t1 > end:
        raise ValueError(
            f"`t1` must be later than the flow's end, t = {end:g}, got {t1:g}."
        )
    times = np.append(flow.ts, _later_times(ts, end, t1))
    if max_steps is not None:
        max_steps = checks.whole_number("max_steps", max_steps)
    dense_memory = checks.whole_number("dense_memory", dense_memory, least=0)
    checked_loss(loss, flow.final)
    named, functions = _same_observables(flow, loss, observables)
    check_event(event, flow.final)
    every = checks.positive_number(
        "checkpoint_every", checkpoint_every, zero_allowed=True
    )
    solver = same_solver(flow.settings, flow.solver)
    return solve(
        Wanted(
            loss=loss,
            start=flow.start,
            choice=solvers.resolve(solver)._replace(reason=flow.stats["choice"]),
            settings=flow.settings._replace(t1=t1),
            times=times,
            save_params=check_stored(save_params, times),
            named=named,
            functions=functions,
            event=event,
            progress=progress,
            max_steps=max_steps,
            throw=throw,
            dense_memory=dense_memory,
            checkpoint=None if checkpoint is None else check_path(checkpoint),
            checkpoint_every=every,
            earlier=flow,
            past=_past(flow),
        )
    )


def _past(flow: Flow) -> Past:
    balances = flow.stats.get("balances")
    if balances is None:
        raise ValueError(
            "`flow` must be one that `gradflow.integrate` made and whose balances can "
            "be carried on; this one has none (it is of an earlier version, or was "
            "not integrated): integrate it anew."
        )

    def alone(values: dict[str, float]) -> dict[str, Any]:
        return {name: np.array([value]) for name, value in values.items()}

    opened = EnergyAccount.open(jnp.zeros(()))
    account = jax.tree.map(
        lambda x, value: jnp.asarray(value, x.dtype),
        opened,
        jax.tree.unflatten(jax.tree.structure(opened), balances["energy"]),
    )
    return Past(
        t=float(flow.ts[-1]),
        ts=flow.ts,
        params_ts=flow.params_ts,
        snapshots=Snapshot(
            params=flow.params,
            loss=flow.loss,
            speed=flow.speed,
            observables=flow.observables,
            # Of all times at once, as only the largest counts.
            drift=alone(balances["drift"]),
            size=alone(balances["size"]),
        ),
        account=account,
        accepted=flow.stats["num_accepted_steps"],
        rejected=flow.stats["num_rejected_steps"],
    )


def _later_times(ts: Any, end: float, t1: float) -> Float[np.ndarray, " times"]:
    if ts is None and end == 0:
        return saved_times(None, t1)[1:]
    if ts is None:
        decades = math.log10(t1 / end)
        count = max(1, math.ceil(DEFAULT_TIMES / 5 * decades))
        return np.append(np.geomspace(end, t1, count + 1)[1:-1], t1)
    times = checks.increasing_times("ts", ts)
    if times[0] <= end or times[-1] > t1:
        raise ValueError(
            f"`ts` must lie after the flow's end, t = {end:g}, and until `t1` = "
            f"{t1:g}, got times from {times[0]:g} to {times[-1]:g}."
        )
    return times


def _same_observables(
    flow: Flow, loss: Any, observables: Any
) -> tuple[tuple[str, ...], dict[str, Callable]]:
    if observables is not None and not isinstance(observables, Mapping):
        raise ValueError(
            "`observables` must map names to functions of the parameters, got "
            f"{observables!r}."
        )
    _, functions = chosen_observables(loss, flow.final, observables or {})
    own = loss.observables
    named = tuple(name for name in flow.observables if name not in functions)
    missing = [name for name in named if name not in own]
    new = [name for name in functions if name not in flow.observables]
    if missing or new:
        wrong = f"no {missing[0]!r}" if missing else f"also {new[0]!r}"
        raise ValueError(
            "`observables` must hold the functions of the flow's observables that are "
            f"not the loss's own, and no others, got {wrong}."
        )
    for name, function in functions.items():
        found = checks.shape_of_result(function, flow.final)
        before = [np.shape(x)[1:] for x in jax.tree.leaves(flow.observables[name])]
        if [x.shape for x in jax.tree.leaves(found)] != before:
            raise ValueError(
                f"`observables` must be those of the flow, got {name!r} with another "
                "shape."
            )
    return named, functions
