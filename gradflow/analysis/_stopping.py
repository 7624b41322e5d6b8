"""best_stopping_time(): the time at which training on a sample should have ended."""

from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core.checks import Checked
from .._core.types import Scalar
from ..flows import AbstractTrajectory, check_flow
from ..problems import AbstractLoss, checked_loss, descent
from ._crossing import crossing

ROUNDING = 16 * np.finfo(float).eps


def best_stopping_time(
    flow: Checked[AbstractTrajectory],
    loss: Checked[Callable[[PyTree], Scalar] | None] = None,
) -> float:
    """The time at which the population loss M is least along a flow of another loss.

    The time is searched for on the steps of the solver and located on its dense output,
    where

        dM/dt = ⟨∇M, θ̇⟩

    changes sign. This is the global minimum along the flow, not the first local one. If
    M never rises again, beyond rounding, the result is the end of the flow.

    **Arguments:**

    - `flow`: a flow of a problem on a [`Sample`][] that knows its `source`.
    - `loss`: M, a function of the parameters. By default the loss on the source.
    """
    flow = check_flow(flow)
    trained = flow.require_problem("`gradflow.best_stopping_time`")
    if loss is None:
        loss = trained.observables.get("population_loss")
    if not callable(loss):
        raise ValueError(
            "`loss` must be given, a function of the parameters: the flow's own "
            "problem has no `population_loss`, which needs a Sample with a `source`."
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
    # The minimum lies on the side of the best step towards which the loss still falls.
    begin, end = (best, best + 1) if rate[best] < 0 else (best - 1, best)
    if begin < 0 or end >= len(mesh) or np.sign(rate[begin]) == np.sign(rate[end]):
        return float(mesh[best])
    return crossing(flow, watch, mesh[begin], mesh[end], lambda seen: seen[1])


class _Progress(eqx.Module):
    """M and dM/dt along the flow of the loss that is trained."""

    trained: AbstractLoss
    loss: AbstractLoss

    def __call__(self, t: Float[Array, ""], params: PyTree) -> tuple[Array, Array]:
        _, velocity, _ = descent(self.trained, params)
        return jax.jvp(self.loss.in_double, (params,), (velocity,))
