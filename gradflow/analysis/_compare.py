"""compare(): the distance of a training run from the flow that it follows."""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from .._core.checks import Checked
from ..flows import AbstractTrajectory, check_flow
from ..problems import AbstractLoss

ROUNDING = 1e-12
"""The relative amount by which a training time may exceed the end of the flow."""


class Comparison(eqx.Module):
    """A training run and a flow as curves in time. `print` shows a summary."""

    ts: Float[np.ndarray, " times"]
    """The saved times of the training run, up to the end of the flow."""
    distance: Float[np.ndarray, " times"]
    """‖θ_training(t) - θ_flow(t)‖."""
    relative: Float[np.ndarray, " times"]
    """The same distance, relative to ‖θ_flow(t)‖."""
    flow_loss: Float[np.ndarray, " times"]
    """L(θ_flow(t)), with the loss of the flow."""
    training_loss: Float[np.ndarray, " times"]
    """L(θ_training(t)), with the same loss."""
    flow: AbstractTrajectory
    training: AbstractTrajectory

    @property
    def loss_difference(self) -> Float[np.ndarray, " times"]:
        """L(θ_training(t)) - L(θ_flow(t))."""
        return self.training_loss - self.flow_loss

    @property
    def largest(self) -> float:
        """max_t ‖θ_training(t) - θ_flow(t)‖."""
        return float(np.max(self.distance))

    def __str__(self) -> str:
        worst = int(np.argmax(self.distance))
        gap = int(np.argmax(np.abs(self.loss_difference)))
        return "\n".join(
            [
                f"{self.training.stats.solver} against {self.flow.stats.solver} "
                f"at {len(self.ts)} times to t = {self.ts[-1]:g}",
                f"distance         ≤ {self.distance[worst]:.3g} at "
                f"t = {self.ts[worst]:.4g} ({100 * self.relative[worst]:.2g} % of "
                f"‖θ‖), {self.distance[-1]:.3g} at the end",
                f"loss             {self.loss_difference[gap]:+.2e} at "
                f"t = {self.ts[gap]:.4g} at most, {self.loss_difference[-1]:+.2e} at "
                "the end",
            ]
        )


def compare(
    flow: Checked[AbstractTrajectory], training: Checked[AbstractTrajectory]
) -> Comparison:
    """The distance of a training run from a flow as a curve in time,

        ‖θ_training(t) - θ_flow(t)‖,

    at the saved times t of the training run, up to the end of the flow.

    **Arguments:**

    - `flow`: the flow to follow. Its loss is evaluated along both.
    - `training`: a result of `gradflow.train`, or another flow of the same parameters.
    """
    flow, training = check_flow(flow), check_flow(training, "training")
    ours, theirs = (_shapes(f.start) for f in (flow, training))
    if ours != theirs:
        raise ValueError(
            "`training` must have parameters of the same structure as `flow`, "
            f"{ours[1]}, got {theirs[1]}."
        )
    loss = flow.require_problem("`gradflow.compare`")
    end = float(flow.ts[-1])
    ts = training.ts[training.ts <= (1 + ROUNDING) * end]
    if not np.any(ts > 0):
        raise ValueError(
            f"`training` must have a saved time between 0 and {end:g}, where `flow` "
            f"ends, but its first is {training.ts[training.ts > 0][:1]}."
        )
    followed = np.minimum(ts, end)
    target = _flat(flow.at(followed), len(ts))
    distance = np.linalg.norm(_flat(training.at(ts), len(ts)) - target, axis=1)
    size = np.linalg.norm(target, axis=1)
    return Comparison(
        ts=ts,
        distance=distance,
        relative=distance / np.where(size > 0, size, 1.0),
        flow_loss=_losses(flow, loss, followed),
        training_loss=_losses(training, loss, ts),
        flow=flow,
        training=training,
    )


def _shapes(params: PyTree) -> tuple[object, list[tuple[int, ...]]]:
    """The structure of a pytree and the shape of every leaf."""
    leaves, structure = jax.tree.flatten(params)
    return structure, [np.shape(leaf) for leaf in leaves]


def _flat(params: PyTree, count: int) -> Float[np.ndarray, "times n"]:
    """The first `count` of the stacked parameters, each as one vector."""
    leaves = [np.asarray(leaf)[:count] for leaf in jax.tree.leaves(params)]
    return np.concatenate([leaf.reshape(count, -1) for leaf in leaves], axis=1)


def _losses(
    flow: AbstractTrajectory, loss: AbstractLoss, ts: Float[np.ndarray, " times"]
) -> Float[np.ndarray, " times"]:
    return np.asarray(flow.observe(loss, ts), dtype=float)
