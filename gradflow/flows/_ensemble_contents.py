"""The stacked data of an ensemble, and its run file."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from .._core import file_format
from .._stepping import EnergyAccount, Settings, Snapshot, Statistics
from ..problems import AbstractLoss, as_loss
from ._contents import ENSEMBLE, packed_params, require, restored_params


class Origins(NamedTuple):
    """What the members start from."""

    problems: tuple[AbstractLoss | None, ...]
    """The loss of all members, or one for each."""
    start: PyTree
    """The parameters at time 0, with a leading axis of members."""
    settings: tuple[Settings, ...]
    """The settings of each member."""
    solver: diffrax.AbstractSolver | None


class Records(NamedTuple):
    """What was recorded of all members, stacked along a leading axis."""

    rows: Snapshot
    """Snapshots at the saved times; the parameters at the stored ones only."""
    saved: Int[np.ndarray, " members"]
    """How many of the saved times each member reached."""
    end: Snapshot
    """The snapshot at each member's end."""
    ended: Float[np.ndarray, " members"]
    """The time at which each member ended."""
    account: EnergyAccount
    accepted: Int[np.ndarray, " members"]
    rejected: Int[np.ndarray, " members"]
    counts: dict[str, list[int | None]]
    """Further counts of each member's work, by their names in `Statistics`."""
    results: tuple[str, ...]
    """The name of each member's result code."""
    reasons: tuple[str, ...]
    """Why each member stopped early; empty if it reached its horizon."""


def contents(
    origins: Origins,
    records: Records,
    ts: Float[np.ndarray, " times"],
    stored: Int[np.ndarray, " stored"],
    stats: Statistics,
) -> dict[str, Any]:
    """The contents of an ensemble's run file, from the arguments of `Ensemble`."""
    return {
        "kind": ENSEMBLE,
        "ts": ts,
        "stored": stored,
        "stats": dict(stats),
        "problems": [p if file_format.can_pack(p) else None for p in origins.problems],
        "start": packed_params(origins.start),
        "settings": [settings._asdict() for settings in origins.settings],
        "rows": _snapshot(records.rows),
        "end": _snapshot(records.end),
        "saved": records.saved,
        "ended": records.ended,
        "account": jax.tree.leaves(records.account),
        "accepted": records.accepted,
        "rejected": records.rejected,
        "counts": records.counts,
        "results": list(records.results),
        "reasons": list(records.reasons),
    }


def parts(
    run: dict[str, Any],
    loss: Callable[[PyTree], Any] | Sequence[Callable[[PyTree], Any]] | None,
    like: PyTree | None,
    solver: diffrax.AbstractSolver | None,
) -> tuple[Origins, Records, np.ndarray, np.ndarray, Statistics]:
    """The arguments of `Ensemble` for a stored ensemble."""
    require(ENSEMBLE, run)
    account = jax.tree.structure(EnergyAccount.open(jnp.zeros(())))
    origins = Origins(
        _problems(run["problems"], loss),
        restored_params(run["start"], like),
        tuple(Settings(**settings) for settings in run["settings"]),
        solver,
    )
    records = Records(
        rows=_restored_snapshot(run["rows"], like),
        saved=run["saved"],
        end=_restored_snapshot(run["end"], like),
        ended=run["ended"],
        account=jax.tree.unflatten(account, run["account"]),
        accepted=run["accepted"],
        rejected=run["rejected"],
        counts=run["counts"],
        results=tuple(run["results"]),
        reasons=tuple(run["reasons"]),
    )
    return origins, records, run["ts"], run["stored"], Statistics.of(run["stats"])


def _problems(stored: list[Any], loss: Any) -> tuple[AbstractLoss | None, ...]:
    if loss is None:
        return tuple(stored)
    if isinstance(loss, list | tuple):
        return tuple(as_loss(one) for one in loss)
    return (as_loss(loss),)


def _snapshot(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "params": packed_params(snapshot.params),
        **{
            name: getattr(snapshot, name)
            for name in ("loss", "speed", "observables", "drift", "size")
        },
    }


def _restored_snapshot(stored: dict[str, Any], like: PyTree | None) -> Snapshot:
    return Snapshot(**{**stored, "params": restored_params(stored["params"], like)})
