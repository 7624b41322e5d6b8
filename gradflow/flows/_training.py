"""The result of `train`: the iterates of a discrete optimiser on the flow's clock."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffrax
import numpy as np
from jaxtyping import Float, PyTree

from .._core import file_format
from .._stepping import Piece, Statistics
from ..problems import AbstractLoss
from . import _contents
from ._certificate import Certificate
from ._dense_output import DenseOutput
from ._summary import described
from ._trajectory import AbstractTrajectory


class Training(AbstractTrajectory):
    """A training run by a discrete optimiser. Its time is the sum of its learning
    rates, so that it can be compared with a `Flow`; its certificate says how far it is
    from one.

    `print(training)` shows a summary. `training.at(t)` lies on the straight line
    between two saved iterates.
    """

    ts: Float[np.ndarray, " times"]
    params: PyTree
    loss: Float[np.ndarray, " times"]
    speed: Float[np.ndarray, " times"]
    observables: dict[str, PyTree]
    stats: Statistics
    result: diffrax.RESULTS
    certificate: Certificate
    start: PyTree
    problem: AbstractLoss | None
    learning_rates: tuple[float, float]
    """The smallest and the largest learning rate."""
    t1: float
    """The time that the run was to reach: the sum of all its learning rates."""
    sampler: str = ""
    """The sampler of token sequences; empty if gradients are exact."""
    seed: int | None = None
    """The seed of the sampled sequences; None if it was a `jax.random.key`."""
    stored_ts: Float[np.ndarray, " stored"] | None = None
    """The parameters are stored at all saved times."""
    dense: DenseOutput | None = None
    """Straight lines between the saved iterates; None if there is only the start."""

    def pieces_again(self, params: PyTree, t0: float, t1: float) -> Iterator[Piece]:
        raise ValueError(
            "A training run cannot be re-integrated: it does not solve the flow's ODE. "
            "`gradflow.compare` compares it with a flow."
        )

    @property
    def attributes(self) -> dict[str, Any]:
        least, most = self.learning_rates
        return {
            "t1": self.t1,
            "smallest_learning_rate": least,
            "largest_learning_rate": most,
            "sampler": self.sampler,
            "seed": self.seed,
        }

    def save(self, path: str | os.PathLike) -> Path:
        """Write the training run to `path`, whole or not at all; see `Flow.save`."""
        return file_format.write(path, self.contents())

    def contents(self) -> dict[str, Any]:
        """The contents of the training run's file."""
        return {
            "kind": _contents.TRAINING,
            **_contents.common_contents(self),
            "learning_rates": self.learning_rates,
            "t1": self.t1,
            "sampler": self.sampler,
            "seed": self.seed,
        }

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        loss: Callable[[PyTree], Any] | None = None,
        *,
        like: PyTree | None = None,
    ) -> "Training":
        """Read a training run that `save` wrote; the arguments are those of
        `Flow.load`."""
        return _contents.read(path, lambda run: cls.from_contents(run, loss, like=like))

    @classmethod
    def from_contents(
        cls,
        run: dict[str, Any],
        loss: Callable[[PyTree], Any] | None = None,
        *,
        like: PyTree | None = None,
    ) -> "Training":
        """The training run with these `contents`; the options are those of `load`."""
        return cls(**_contents.training_fields(run, loss, like))

    def __str__(self) -> str:
        least, most = self.learning_rates
        if least == most:
            return described(self, "Training", f"with steps of {least:g}")
        return described(self, "Training", f"with steps of {least:g} to {most:g}")
