"""The outcome of a solve, from which a flow is built."""

from typing import NamedTuple

import diffrax
import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from ._energy import EnergyAccount
from ._segments import Dense
from ._snapshots import Snapshot
from ._statistics import Statistics


class Continuation(eqx.Module):
    """The accounts of a flow's certificate at its end, from which `resume` carries them
    on. The flow's state itself is its last parameters."""

    account: EnergyAccount
    drift: dict[str, float]
    """The largest |Q(t) - Q(0)| of each conserved quantity Q."""
    size: dict[str, float]
    """The largest entry of the terms that Q is a sum of."""

    @classmethod
    def of(cls, account: EnergyAccount, snapshots: Snapshot) -> "Continuation":
        return cls(
            jax.tree.map(np.asarray, account),
            {k: float(np.max(x)) for k, x in snapshots.drift.items()},
            {k: float(np.max(x)) for k, x in snapshots.size.items()},
        )


class Piece(NamedTuple):
    """A stretch of the solver's dense output."""

    start: float
    end: float
    dense: Dense


class Outcome(NamedTuple):
    """All that a solve yields, on the host."""

    ts: Float[np.ndarray, " times"]
    params_ts: Float[np.ndarray, " stored"]
    """Those of `ts` at which the parameters are stored."""
    params: PyTree
    loss: Float[np.ndarray, " times"]
    speed: Float[np.ndarray, " times"]
    observables: dict[str, PyTree]
    result: diffrax.RESULTS
    stats: Statistics
    continuation: Continuation
    pieces: tuple[Piece, ...] = ()
    """Dense output, as far as it was kept."""
