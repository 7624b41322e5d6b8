"""The recorder of a solve: snapshots at the saved times, dense output, balances."""

from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from ._energy import EVALUATIONS_PER_PANEL, EnergyAccount, balance
from ._outcome import Continuation, Piece
from ._segments import Segment, State, dense_bytes
from ._snapshots import Snapshot, Watch


class Past(NamedTuple):
    """What was recorded until a time t, without the dense output."""

    t: float
    ts: Float[np.ndarray, " times"]
    params_ts: Float[np.ndarray, " stored"]
    snapshots: Snapshot | None
    """Snapshots at all saved times; None if there are none."""
    account: EnergyAccount
    accepted: int
    rejected: int


class Recorder:
    """Takes one segment after another and records what a flow is made of."""

    def __init__(
        self,
        watch: Watch,
        start: State,
        times: Float[np.ndarray, " times"],
        stored: Float[np.ndarray, " stored"],
        dense_memory: int,
    ):
        self._watch = watch
        self._times = times
        self._stored = stored
        self._account = EnergyAccount.open(start.loss)
        self._snapshots: list[Snapshot] = []
        self._pieces: list[Piece] = []
        self._memory = dense_memory
        self._last: Segment | None = None
        self.t = 0.0
        self.accepted = self.rejected = 0
        self.ts, self.params_ts = np.zeros(0), np.zeros(0)

    @property
    def attempted(self) -> int:
        return self.accepted + self.rejected

    @property
    def certificate_evaluations(self) -> int:
        return EVALUATIONS_PER_PANEL * int(self._account.panels)

    @property
    def past(self) -> Past:
        return Past(
            self.t,
            self.ts,
            self.params_ts,
            self._joined() if self._snapshots else None,
            self._account,
            self.accepted,
            self.rejected,
        )

    def continue_from(self, past: Past) -> None:
        """Take `past` as what was recorded so far."""
        self.t, self.ts, self.params_ts = past.t, past.ts, past.params_ts
        self._snapshots = [] if past.snapshots is None else [past.snapshots]
        self._account = past.account
        self.accepted, self.rejected = past.accepted, past.rejected

    def add(self, segment: Segment) -> None:
        """Record the segment that begins where the last one ended."""
        begun, self.t, self._last = self.t, float(segment.state.t), segment
        self.accepted += int(segment.accepted)
        self.rejected += int(segment.rejected)
        self._account = balance(
            self._watch.equation, self._account, segment.dense, segment.state.t
        )
        reached = self.ts[-1] if self.ts.size else -np.inf
        self._save(self._times[(self._times > reached) & (self._times <= self.t)])
        size = dense_bytes(segment.dense)
        if size <= self._memory:
            self._pieces.append(Piece(begun, self.t, segment.dense))
            self._memory -= size

    def close(self) -> Snapshot:
        """All snapshots, the last one at the time at which the solve ended."""
        if self.ts.size == 0 or self.ts[-1] < self.t:
            self._save(np.array([self.t]))
        return self._joined()

    def _joined(self) -> Snapshot:
        if len(self._snapshots) > 1:
            joined = jax.tree.map(lambda *x: np.concatenate(x), *self._snapshots)
            self._snapshots = [joined]
        return self._snapshots[0]

    def _save(self, times: Float[np.ndarray, " some"]) -> None:
        assert self._last is not None
        # The end of a flow is always stored, and may be the end of any segment.
        stored = np.isin(times, self._stored) | (times == self.t)
        first = 0
        for snapshot in self._watch.snapshots(self._last.dense, times):
            rows = stored[first : first + len(snapshot.loss)]
            kept = jax.tree.map(lambda x, rows=rows: x[rows], snapshot.params)
            self._snapshots.append(eqx.tree_at(lambda row: row.params, snapshot, kept))
            first += len(rows)
        self.ts = np.append(self.ts, times)
        self.params_ts = np.append(self.params_ts, times[stored])

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The dense output, as far as it was kept."""
        return tuple(self._pieces)

    def continuation(self, snapshots: Snapshot) -> Continuation:
        return Continuation.of(self._account, snapshots)
