"""Run files: a trajectory as plain data, and back.

Format version 1 had flows and training runs as one kind, with the statistics and the
state that `resume` needs in one dictionary. Version 2 says which kind it is and keeps
them apart. Both are read.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._core import file_format
from .._core.ravel import named_leaves
from .._stepping import (
    Continuation,
    EnergyAccount,
    Outcome,
    Settings,
    Statistics,
    result_name,
    result_of_name,
)
from ..problems import RESERVED_NAMES, AbstractLoss, as_loss
from ._dense_output import DenseOutput
from ._trajectory import AbstractTrajectory

FLOW, TRAINING, ENSEMBLE = "flow", "training", "ensemble"

_T = TypeVar("_T")


class Origin(NamedTuple):
    """What a flow starts from: enough to integrate it again."""

    problem: AbstractLoss | None
    start: PyTree
    settings: Settings
    solver: diffrax.AbstractSolver | None


def read(path: str | os.PathLike, build: Callable[[dict[str, Any]], _T]) -> _T:
    """The trajectory that `build` makes of the contents of the file at `path`."""

    def of_run(run: dict[str, Any]) -> _T:
        # A result in the store of a sweep is a trajectory with a label.
        return build(run.get("content", run))

    return file_format.read(path, of_run)


def kind_of(run: dict[str, Any]) -> str:
    """Whether these are the contents of a flow or of a training run."""
    if "kind" in run:
        return run["kind"]
    if "settings" not in run:
        raise ValueError("it is neither a flow nor a training run")
    return TRAINING if run["settings"]["discrete"] else FLOW


_LOADED_BY = {
    FLOW: "a flow: read it with `gradflow.Flow.load`",
    TRAINING: "a training run: read it with `gradflow.Training.load`",
    ENSEMBLE: "an ensemble: read it with `gradflow.Ensemble.load`",
}


def require(kind: str, run: dict[str, Any]) -> None:
    """Refuse contents of another kind."""
    found = kind_of(run)
    if found != kind:
        raise ValueError(f"it contains {_LOADED_BY.get(found, found)}")


#
# Writing
#


def common_contents(trajectory: AbstractTrajectory) -> dict[str, Any]:
    """The contents of a run file that both kinds share."""
    problem = trajectory.problem
    return {
        "ts": trajectory.ts,
        **packed_params(trajectory.params),
        "start": jax.tree.leaves(trajectory.start),
        "loss": trajectory.loss,
        "speed": trajectory.speed,
        "observables": trajectory.observables,
        "stats": dict(trajectory.stats),
        "result": result_name(trajectory.result),
        "certificate": trajectory.certificate,
        "problem": problem if file_format.can_pack(problem) else None,
    }


def continuation_contents(continuation: Continuation) -> dict[str, Any]:
    return {
        "energy": [float(x) for x in jax.tree.leaves(continuation.account)],
        "drift": continuation.drift,
        "size": continuation.size,
    }


#
# Reading
#


def flow_parts(
    run: dict[str, Any],
    loss: Callable[[PyTree], Any] | None,
    like: PyTree | None,
    solver: diffrax.AbstractSolver | None,
) -> tuple[Origin, Outcome]:
    """The origin and the outcome of a stored flow."""
    require(FLOW, run)
    fields = common_fields(run, loss, like)
    settings = {k: v for k, v in run["settings"].items() if k in Settings._fields}
    origin = Origin(
        fields.pop("problem"), fields.pop("start"), Settings(**settings), solver
    )
    stored = run["stored_ts"]
    old = run["stats"].get("balances")  # version 1
    return origin, Outcome(
        params_ts=fields["ts"] if stored is None else stored,
        continuation=_continuation(run.get("continuation", old)),
        **fields,
    )


def common_fields(
    run: dict[str, Any], loss: Callable[[PyTree], Any] | None, like: PyTree | None
) -> dict[str, Any]:
    """The fields that both kinds share, from the contents of a run file."""
    params = restored_params(run, like)
    versions = run["stats"].get("versions", run.get("versions", {}))
    return {
        "ts": run["ts"],
        "params": params,
        "loss": run["loss"],
        "speed": run["speed"],
        # In version 1 the library's own observables repeated the loss and the speed.
        "observables": {
            name: values
            for name, values in run["observables"].items()
            if name not in RESERVED_NAMES
        },
        "stats": Statistics.of({**run["stats"], "versions": versions}),
        "result": result_of_name(run["result"]),
        "start": jax.tree.unflatten(jax.tree.structure(params), run["start"]),
        "problem": run["problem"] if loss is None else as_loss(loss),
    }


def _continuation(stored: dict[str, Any]) -> Continuation:
    opened = EnergyAccount.open(jnp.zeros(()))
    account = jax.tree.map(
        lambda x, value: np.asarray(value, x.dtype),
        opened,
        jax.tree.unflatten(jax.tree.structure(opened), stored["energy"]),
    )
    return Continuation(account, stored["drift"], stored["size"])


def training_fields(
    run: dict[str, Any], loss: Callable[[PyTree], Any] | None, like: PyTree | None
) -> dict[str, Any]:
    """The fields of a stored training run."""
    require(TRAINING, run)
    old = run.get("settings", {})  # version 1
    stats = run["stats"]
    fields = common_fields(run, loss, like)
    return {
        **fields,
        "dense": DenseOutput.of_iterates(fields["ts"], fields["params"]),
        "certificate": run["certificate"],
        "learning_rates": tuple(run.get("learning_rates", stats.get("learning_rates"))),
        "t1": run.get("t1", old.get("t1")),
        "sampler": run.get("sampler", stats.get("sampler")),
        "seed": run.get("seed", stats.get("seed")),
    }


def packed_params(params: PyTree) -> dict[str, Any]:
    """Parameters as a run file holds them: as they are or, if they are of a user's own
    class, as a dictionary of their leaves."""
    if file_format.can_pack(params):
        return {"params": params, "leaves": None}
    return {"params": None, "leaves": named_leaves(params)}


def restored_params(stored: dict[str, Any], like: PyTree | None) -> PyTree:
    """The parameters that `packed_params` was given, with the structure of `like`."""
    as_they_were = stored["params"] is not None
    params = stored["params"] if as_they_were else stored["leaves"]
    if like is None:
        return params
    # A dictionary of leaves is in the order of the original's leaves.
    leaves = jax.tree.leaves(params) if as_they_were else list(params.values())
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
