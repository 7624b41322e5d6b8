"""What is recorded of a solve: snapshots at the saved times, dense output, balances."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._core.compiled import compiled
from .._core.types import AnyArray
from ..flows._flow import DenseOutput, fill_rows
from ._energy import Certificate, EnergyAccount
from ._segments import (
    EVALUATIONS_PER_PANEL,
    Dense,
    Equation,
    Segment,
    State,
    balance,
    dense_bytes,
)

SNAPSHOTS = 32
"""Saved times that one call evaluates; the last call of a segment is padded."""


class Snapshot(eqx.Module):
    """A flow at one saved time, or at several along a leading axis."""

    params: PyTree
    """At fewer times, where not all parameters are stored."""
    loss: Float[AnyArray, "*times"]
    speed: Float[AnyArray, "*times"]
    observables: dict[str, PyTree]
    drift: dict[str, Float[AnyArray, "*some"]]
    """max |Q(t) - Q(0)| of each conserved quantity Q."""
    size: dict[str, Float[AnyArray, "*some"]]
    """The largest entry of the terms that Q is a sum of."""


class Watch(eqx.Module):
    """What to record: `named` observables of the loss, and `functions` of a user's."""

    equation: Equation
    y0: Float[Array, " n"]
    named: tuple[str, ...] = eqx.field(static=True)
    functions: dict[str, Callable[[PyTree], Any]]

    def snapshots(
        self, dense: Dense, times: Float[np.ndarray, " times"]
    ) -> list[Snapshot]:
        """Snapshots at `times`, all within `dense`, on the host."""
        taken = []
        for first in range(0, len(times), SNAPSHOTS):
            chunk = times[first : first + SNAPSHOTS]
            padded = np.pad(chunk, (0, SNAPSHOTS - len(chunk)), mode="edge")
            count = len(chunk)
            snapshot = _take(self, dense, jnp.asarray(padded), jnp.asarray(count))
            taken.append(jax.tree.map(lambda x, n=count: np.asarray(x)[:n], snapshot))
        return taken

    def snapshot(self, y: Float[Array, " n"]) -> Snapshot:
        """What is recorded of the state y."""
        value, power = self.equation.loss_and_power(y)
        drift, size = {}, {}
        for name, (then, now) in self._conserved(y).items():
            drift[name] = jnp.max(jnp.abs(jnp.sum(now, axis=0) - jnp.sum(then, axis=0)))
            size[name] = jnp.max(jnp.abs(now))
        return Snapshot(
            params=self.equation.ravel.unravel(y),
            loss=value,
            speed=jnp.sqrt(power),
            observables=self.observables(y),
            drift=drift,
            size=size,
        )

    def observables(self, y: Float[Array, " n"]) -> dict[str, PyTree]:
        params = self.equation.ravel.unravel(y)
        return {name: f(params) for name, f in self.observed_by.items()}

    @property
    def observed_by(self) -> dict[str, Callable[[PyTree], Any]]:
        """The functions of the parameters that are observed, by name."""
        known = self.equation.loss.observables if self.named else {}
        return {name: known[name] for name in self.named} | self.functions

    def only(self, names: Collection[str]) -> "Watch":
        """The same, with no other observables."""
        named = tuple(name for name in self.named if name in names)
        functions = {k: f for k, f in self.functions.items() if k in names}
        return Watch(self.equation, self.y0, named, functions)

    def without(self, names: Collection[str]) -> "Watch":
        return self.only(self.observed_by.keys() - set(names))

    @property
    def shape(self) -> Snapshot:
        """The shapes and types of a snapshot."""
        return _shape(self)

    def _conserved(self, y: Float[Array, " n"]) -> dict[str, tuple[Any, Any]]:
        terms = self.equation.loss.conserved_terms
        then, now = (
            terms(self.equation.ravel.unravel(state)) for state in (self.y0, y)
        )
        return {name: (then[name], now[name]) for name in now}


@eqx.filter_jit
def _shape(watch: Watch) -> Any:
    # Traced once and remembered.
    return jax.eval_shape(watch.snapshot, watch.y0)


@compiled
def _take(
    watch: Watch,
    dense: Dense,
    times: Float[Array, " times"],
    count: Int[Array, ""],
) -> Snapshot:
    """Snapshots at the first `count` of `times`; the rest stays zero."""
    return fill_rows(
        lambda t: watch.snapshot(dense.evaluate(t)),
        times,
        count,
        watch.equation.batch_size,
    )


class Past(NamedTuple):
    """What was recorded until a time t, but for dense output."""

    t: float
    ts: Float[np.ndarray, " times"]
    params_ts: Float[np.ndarray, " stored"]
    snapshots: Snapshot | None
    """Of all saved times; None if there are none."""
    account: EnergyAccount
    accepted: int
    rejected: int


class Recorder:
    """Takes one segment after another, and holds what a flow is made of."""

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
        self._pieces: list[Dense] = []
        self._starts: list[float] = []
        self._ends: list[float] = []
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

    def go_on_from(self, past: Past) -> None:
        """Take the past for what was recorded so far."""
        self.t, self.ts, self.params_ts = past.t, past.ts, past.params_ts
        self._snapshots = [] if past.snapshots is None else [past.snapshots]
        self._account = past.account
        self.accepted, self.rejected = past.accepted, past.rejected

    def add(self, segment: Segment) -> None:
        """Take the segment that begins where the last one ended."""
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
            self._pieces.append(segment.dense)
            self._starts.append(begun)
            self._ends.append(self.t)
            self._memory -= size

    def close(self) -> Snapshot:
        """All snapshots, the last one at the time where the solve ended."""
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
        # The end of a flow is stored in any case, and may be the end of any segment.
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
    def dense(self) -> DenseOutput | None:
        """The dense output, as far as it was kept."""
        if not self._pieces:
            return None
        return DenseOutput(tuple(self._starts), tuple(self._ends), tuple(self._pieces))

    def balances(self, snapshots: Snapshot) -> dict[str, Any]:
        return balances(self._account, snapshots)

    def certificate(self, snapshots: Snapshot) -> Certificate:
        return certificate(self._account, snapshots)


def balances(account: EnergyAccount, snapshots: Snapshot) -> dict[str, Any]:
    """What the certificate is made of, for whoever goes on from the flow's end."""
    return {
        "energy": [float(x) for x in jax.tree.leaves(account)],
        "drift": {k: float(np.max(x)) for k, x in snapshots.drift.items()},
        "size": {k: float(np.max(x)) for k, x in snapshots.size.items()},
    }


def certificate(account: EnergyAccount, snapshots: Snapshot) -> Certificate:
    """What the laws of an exact flow say of this one."""
    with np.errstate(invalid="ignore"):  # a loss that overflowed has no rise
        rises = np.diff(snapshots.loss)
    begun = np.isfinite(account.initial_loss)
    return Certificate(
        drift=relative_drift(snapshots),
        energy_imbalance=float(account.imbalance) if begun else float("nan"),
        energy_released=float(account.initial_loss) - float(snapshots.loss[-1]),
        quadrature_error=float(account.quadrature_error),
        largest_rise=float(rises.max(initial=0.0)),
    )


def relative_drift(snapshots: Snapshot) -> dict[str, float]:
    """Of each conserved quantity, relative to the largest term that it is a sum of."""
    return {
        name: _relative(drift, snapshots.size[name])
        for name, drift in snapshots.drift.items()
    }


def _relative(drift: Any, size: Any) -> float:
    largest = float(np.max(size))
    return float(np.max(drift)) / largest if largest > 0 else float(np.max(drift))
