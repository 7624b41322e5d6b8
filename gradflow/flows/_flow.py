"""The result of `integrate`: a flow at its saved times, and between them."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffrax
import equinox as eqx
import numpy as np
from jaxtyping import Float, PyTree

from .._core import file_format
from .._stepping import (
    Continuation,
    Outcome,
    Piece,
    Settings,
    Statistics,
    integrate_again,
)
from ..problems import AbstractLoss
from . import _contents
from ._certificate import Certificate
from ._contents import Origin
from ._dense_output import DenseOutput
from ._summary import described
from ._trajectory import AbstractTrajectory


class FlowError(RuntimeError):
    """A solve that could not continue. `flow` holds what was computed until then."""

    def __init__(self, message: str, flow: AbstractTrajectory):
        super().__init__(message)
        self.flow = flow


class Flow(AbstractTrajectory):
    """A gradient flow θ̇ = -∇L(θ) at its saved times, and how exact it is.

    `print(flow)` shows a summary. `flow.at(t)` gives the parameters at any time.
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
    settings: Settings = eqx.field(static=True)
    """What the flow was asked for: horizon, solver and tolerances."""
    problem: AbstractLoss | None
    solver: diffrax.AbstractSolver | None = None
    dense: DenseOutput | None = None
    stored_ts: Float[np.ndarray, " stored"] | None = None
    continuation: Continuation = eqx.field(kw_only=True)
    """The state of the certificate's accounts, from which `gradflow.resume` goes on."""

    def pieces_again(self, params: PyTree, t0: float, t1: float) -> Iterator[Piece]:
        loss = self.require_problem("`Flow.at` between stored times")
        return integrate_again(loss, self.settings, self.solver, params, t0, t1)

    @property
    def attributes(self) -> dict[str, Any]:
        return self.settings._asdict()

    def save(self, path: str | os.PathLike) -> Path:
        """Write the flow to `path`, whole or not at all.

        The file holds data only, no code: the dense output and a loss of the user's own
        are left out. Parameters of a user's own class come back as a dictionary unless
        `Flow.load` is told their structure.
        """
        return file_format.write(path, self.contents())

    def contents(self) -> dict[str, Any]:
        """The contents of the flow's run file."""
        return {
            "kind": _contents.FLOW,
            **_contents.common_contents(self),
            "stored_ts": self.stored_ts,
            "settings": self.settings._asdict(),
            "continuation": _contents.continuation_contents(self.continuation),
        }

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        loss: Callable[[PyTree], Any] | None = None,
        *,
        like: PyTree | None = None,
        solver: diffrax.AbstractSolver | None = None,
    ) -> "Flow":
        """Read a flow that `save` wrote.

        **Arguments:**

        - `path`: a run file, or a flow's file in the store of a sweep. One that is
            missing, damaged, altered or not gradflow's raises a `RunFileError`.
        - `loss`: the loss of the flow, if it is a function of your own; flows of the
            library's problems have theirs.
        - `like`: parameters with the structure that the flow's had, if they were of a
            class of your own.
        - `solver`: the flow's solver, if it is not one of gradflow's named solvers.
        """
        return _contents.read(
            path, lambda run: cls.from_contents(run, loss, like=like, solver=solver)
        )

    @classmethod
    def from_contents(
        cls,
        run: dict[str, Any],
        loss: Callable[[PyTree], Any] | None = None,
        *,
        like: PyTree | None = None,
        solver: diffrax.AbstractSolver | None = None,
    ) -> "Flow":
        """The flow with these `contents`; the options are those of `load`."""
        return cls.of(*_contents.flow_parts(run, loss, like, solver))

    @classmethod
    def of(
        cls, origin: Origin, outcome: Outcome, earlier: "Flow | None" = None
    ) -> "Flow":
        """The flow that a solve yielded. This is the one place that builds a `Flow`.

        If it continues an `earlier` flow, `outcome` already includes what that one
        recorded, but not its work nor its dense output.
        """
        stats, dense = outcome.stats, DenseOutput.of(outcome.pieces)
        if earlier is not None:
            stats = stats.after(earlier.stats)
            dense = dense if earlier.dense is None else earlier.dense.joined(dense)
        if dense is not None:
            stats = dataclasses.replace(stats, dense_until=dense.until)
        thinned = len(outcome.params_ts) < len(outcome.ts)
        return Flow(
            ts=outcome.ts,
            params=outcome.params,
            loss=outcome.loss,
            speed=outcome.speed,
            observables=outcome.observables,
            stats=stats,
            result=outcome.result,
            certificate=Certificate.of(outcome.continuation, outcome.loss),
            start=origin.start,
            settings=origin.settings,
            problem=origin.problem,
            solver=origin.solver,
            dense=dense,
            stored_ts=outcome.params_ts if thinned else None,
            continuation=outcome.continuation,
        )

    def __str__(self) -> str:
        settings = self.settings
        if settings.step is not None:
            held_to = f"with steps of {settings.step:g}"
        else:
            held_to = f"at rtol {settings.rtol:g}, atol {settings.atol:.1e}"
        return described(self, "Flow", held_to)
