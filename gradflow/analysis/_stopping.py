"""best_stopping_time(): where training on a sample should have ended."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._core.checks import Checked
from ..flows._flow import Flow
from ..problems._descent import descent
from ..problems._loss import checked_loss
from ._events import crossing

ROUNDING = 16 * np.finfo(float).eps


def best_stopping_time(
    flow: Checked[Flow], loss: Checked[Callable[[PyTree], Any] | None] = None
) -> float:
    """The time at which the population loss M is least along a flow of another loss.

    It is looked for on the steps of the solver, and located on its dense output where

        dM/dt = ⟨∇M, θ̇⟩

    changes sign. The least of all is meant, not the first minimum; a flow that never
    gets worse, beyond rounding, gives the end of the flow.

    **Arguments:**

    - `flow`: a flow of a problem on a [`Sample`][] that knows its `source`.
    - `loss`: M, a function of the parameters; by default the loss on the source.
    """
    if not isinstance(flow, Flow):
        raise ValueError(f"`flow` must be a Flow, got {type(flow).__name__}.")
    trained = flow.require_problem("`gradflow.best_stopping_time`")
    if loss is None:
        loss = trained.observables.get("population_loss")
    if not callable(loss):
        raise ValueError(
            "`loss` must be a function of the parameters, as the flow's own problem "
            "has no `population_loss`: that takes a Sample with a `source`."
            if loss is None
            else "`loss` must be a function of the parameters, got "
            f"{type(loss).__name__}."
        )
    loss = checked_loss(loss, flow.start)
    watch = _Progress(trained, loss)
    mesh = np.unique(np.append(0.0, flow.mesh))
    value, rate = flow.along(watch, mesh)
    best = int(np.argmin(value))
    if value[-1] - value[best] <= ROUNDING * np.max(np.abs(value)):
        return float(mesh[-1])
    # The minimum lies on that side of the best step towards which the loss still falls.
    begin, end = (best, best + 1) if rate[best] < 0 else (best - 1, best)
    if begin < 0 or end >= len(mesh) or np.sign(rate[begin]) == np.sign(rate[end]):
        return float(mesh[best])
    return crossing(flow, watch, mesh[begin], mesh[end], lambda seen: seen[1])


class _Progress(eqx.Module):
    """M and dM/dt along the flow of the loss that is trained."""

    trained: Callable
    loss: Callable

    def __call__(self, t: Any, params: PyTree) -> tuple[Array, Array]:
        _, velocity, _ = descent(self.trained, params)

        def scalar(params: PyTree) -> Array:
            return jnp.asarray(self.loss(params), jnp.float64)

        return jax.jvp(scalar, (params,), (velocity,))
