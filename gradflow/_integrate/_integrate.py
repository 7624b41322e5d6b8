"""integrate(): a loss, a start and a horizon in, a flow out."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxtyping import PyTree

from .._core.checks import Checked
from ..flows import Flow
from ._request import requested
from ._run import run


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
    save_params: Any = None,
    checkpoint: Checked[str | os.PathLike | None] = None,
    checkpoint_every: Checked[float] = 60.0,
) -> Flow:
    """Integrate the gradient flow θ̇ = -∇L(θ) from `params` at time 0 to time `t1`.

    It runs on the host, in segments of compiled code, and cannot itself be traced by
    `jit`, `grad` or `vmap`.

    **Arguments:**

    - `loss`: any callable from parameters to a scalar. A `Problem` or a `gradflow.Loss`
        brings its conserved quantities and observables along. Compiled code is reused
        for problems of the same shapes, and otherwise for the same function object.
    - `params`: where the flow starts; any pytree of floating-point arrays.
    - `t1`: the horizon.
    - `ts`: increasing times in [0, t1] at which to save. By default 0 and 200
        geometrically spaced times, as learning lives on a logarithmic clock.
    - `solver`: a name (`gradflow.solvers.names()`) or an adaptive diffrax solver.
    - `rtol`, `atol`: tolerances of a step, for each entry of the parameters. By default
        `atol` follows the initial scale: it is 1e-3·rtol times the root mean square of
        `params`, or times 1e-8 if that is larger (as for a start at zero).
    - `observables`: functions of the parameters to record, by name, or names among
        `loss.observables`. By default all of these except those with more than 65,536
        entries at each time.
    - `event`: a condition on the parameters that ends the flow: where a real function
        crosses zero, or after the first step at which a boolean one is true.
    - `progress`: whether to show a progress bar, on the logarithmic clock.
    - `max_steps`: the number of attempted steps after which to give up; by default
        unlimited.
    - `throw`: whether a solve that cannot continue raises a `FlowError`, whose `flow`
        holds what was computed, or returns that flow.
    - `dense_memory`: bytes of dense output to keep for `Flow.at`.
    - `step`: the step length of `rk4` and `euler`, which take steps of fixed length; by
        default 1/λ_max at the start, which may be too long later on.
    - `save_params`: whether to store the parameters at all saved times (True), only at
        the last (False), or at which of them (a list). By default at all of them or, if
        that would take more than 256 MiB, at as many evenly spread ones as fit. The
        loss, its speed and the observables are saved at every time of `ts`.
    - `checkpoint`: a file in which the solve keeps its state, so that a run that was
        killed continues from there when it is called again in the same way. The file
        of another flow is refused. It is removed when the flow is complete; saving the
        flow is then up to the caller.
    - `checkpoint_every`: seconds between two checkpoints; longer if writing one takes
        more than a twentieth of that.

    **Returns:**

    A `Flow`.
    """
    return run(
        requested(
            loss,
            params,
            t1,
            ts=ts,
            solver=solver,
            rtol=rtol,
            atol=atol,
            observables=observables,
            event=event,
            progress=progress,
            max_steps=max_steps,
            throw=throw,
            dense_memory=dense_memory,
            step=step,
            save_params=save_params,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
        )
    )
