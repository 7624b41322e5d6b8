"""resume(): a flow and a later horizon in, the flow to that horizon out."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from .._core import checks
from .._core.checks import Checked
from .._core.types import AnyArray
from .._stepping import Past, Snapshot, same_solver
from ..flows import Flow, Origin, check_integrated
from ..problems import AbstractLoss, Observable, checked_loss, chosen_observables
from ..solvers import _internals as solvers
from ._request import (
    DEFAULT_TIMES,
    Request,
    check_event,
    run_limits,
    saved_times,
)
from ._run import run


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
    """Continue a flow from where it ended to the time `t1`, with the same solver and
    tolerances.

    The certificate covers the whole flow: the energy balance continues its integral,
    and conserved quantities are compared with the start at time 0. Work is added up.

    **Arguments:**

    - `flow`: what `integrate` or `Flow.load` returned, however it ended.
    - `t1`: the new horizon, later than the flow's end.
    - `ts`: further times to save, after the flow's end. By default geometrically
        spaced, as many per decade as `integrate` has by default.
    - `observables`: functions for those of the flow's observables that are not the
        loss's own. The same observables are recorded as before.

    The other arguments are those of `integrate`; `max_steps` counts from here.

    **Returns:**

    A `Flow` from time 0 to `t1`.
    """
    checks.refuse_tracers(flow, t1)
    flow = check_integrated(flow)
    loss = flow.require_problem("`gradflow.resume`")
    t1, end = checks.positive_number("t1", t1), float(flow.ts[-1])
    if not t1 > end:
        raise ValueError(
            f"`t1` must be later than the flow's end, t = {end:g}, got {t1:g}."
        )
    times = np.append(flow.ts, _later_times(ts, end, t1))
    limits = run_limits(
        times, max_steps, dense_memory, save_params, checkpoint, checkpoint_every
    )
    checked_loss(loss, flow.final)
    named, functions = _same_observables(flow, loss, observables)
    check_event(event, flow.final)
    choice = solvers.resolve(same_solver(flow.settings, flow.solver))
    settings = flow.settings._replace(t1=t1)
    return run(
        Request(
            origin=Origin(loss, flow.start, settings, choice.solver),
            choice=choice._replace(reason=flow.stats.choice),
            times=times,
            named=named,
            functions=functions,
            event=event,
            progress=progress,
            throw=throw,
            notes=flow.stats.notes,
            earlier=flow,
            past=_past(flow),
            **limits,
        )
    )


def _past(flow: Flow) -> Past:
    """What was recorded of a flow until its end."""

    def alone(values: dict[str, float]) -> dict[str, AnyArray]:
        return {name: np.array([value]) for name, value in values.items()}

    accounts = flow.continuation
    return Past(
        t=float(flow.ts[-1]),
        ts=flow.ts,
        params_ts=flow.params_ts,
        snapshots=Snapshot(
            params=flow.params,
            loss=flow.loss,
            speed=flow.speed,
            observables=flow.observables,
            # One value for all times, as only the largest counts.
            drift=alone(accounts.drift),
            size=alone(accounts.size),
        ),
        account=jax.tree.map(jnp.asarray, accounts.account),
        accepted=flow.stats.num_accepted_steps,
        rejected=flow.stats.num_rejected_steps,
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
            f"`ts` must lie between the flow's end, t = {end:g}, and `t1` = "
            f"{t1:g}, got times from {times[0]:g} to {times[-1]:g}."
        )
    return times


def _same_observables(
    flow: Flow, loss: AbstractLoss, observables: Any
) -> tuple[tuple[str, ...], dict[str, Observable]]:
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
