"""What is recorded of a solve: snapshots at the saved times, dense output, balances."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from ._certificate import Certificate, EnergyAccount
from ._flow import DenseOutput
from ._segments import (
    EVALUATIONS_PER_PANEL,
    Dense,
    Equation,
    Segment,
    State,
    balance,
    compiled,
    dense_bytes,
)

SNAPSHOTS = 32
"""Saved times that one call evaluates; the last call of a segment is padded."""


class Snapshot(eqx.Module):
    """A flow at one saved time, or at several along a leading axis."""

    params: PyTree
    loss: Float[Array, "*times"]
    speed: Float[Array, "*times"]
    observables: dict[str, PyTree]
    drift: dict[str, Float[Array, "*times"]]
    """max |Q(t) - Q(0)| of each conserved quantity Q."""
    size: dict[str, Float[Array, "*times"]]
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
        loss, params = self.equation.loss, self.equation.ravel.unravel(y)
        value, power = self.equation.loss_and_power(y)
        known = getattr(loss, "observables", {}) if self.named else {}
        functions = {name: known[name] for name in self.named} | self.functions
        drift, size = {}, {}
        for name, (then, now) in self._conserved(y).items():
            drift[name] = jnp.max(jnp.abs(jnp.sum(now, axis=0) - jnp.sum(then, axis=0)))
            size[name] = jnp.max(jnp.abs(now))
        return Snapshot(
            params=params,
            loss=value,
            speed=jnp.sqrt(power),
            observables={name: f(params) for name, f in functions.items()},
            drift=drift,
            size=size,
        )

    def _conserved(self, y: Float[Array, " n"]) -> dict[str, tuple[Any, Any]]:
        terms = getattr(self.equation.loss, "conserved_terms", None)
        if terms is None:
            return {}
        then, now = (
            terms(self.equation.ravel.unravel(state)) for state in (self.y0, y)
        )
        return {name: (then[name], now[name]) for name in now}


@compiled
def _take(
    watch: Watch,
    dense: Dense,
    times: Float[Array, " times"],
    count: Int[Array, ""],
) -> Snapshot:
    """Snapshots at the first `count` of `times`; the rest stays zero."""
    batch = watch.equation.batch_size
    snapshots = jax.vmap(lambda t: watch.snapshot(dense.evaluate(t)))

    def fill(i: Int[Array, ""], rows: Snapshot) -> Snapshot:
        some = snapshots(jax.lax.dynamic_slice_in_dim(times, i * batch, batch))
        return jax.tree.map(
            lambda all_rows, new: jax.lax.dynamic_update_slice_in_dim(
                all_rows, new, i * batch, axis=0
            ),
            rows,
            some,
        )

    shapes = jax.eval_shape(snapshots, times)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, -(-count // batch), fill, empty)


class Recorder:
    """Takes one segment after another, and holds what a flow is made of."""

    def __init__(
        self,
        watch: Watch,
        start: State,
        times: Float[np.ndarray, " times"],
        dense_memory: int,
    ):
        self._watch = watch
        self._due = times
        self._account = EnergyAccount.open(start.loss)
        self._snapshots: list[Snapshot] = []
        self._pieces: list[Dense] = []
        self._starts: list[float] = []
        self._memory = dense_memory
        self._last: Segment | None = None
        self.t = 0.0
        self.dense_until = 0.0
        self.accepted = self.rejected = 0
        self.ts = np.zeros(0)

    @property
    def attempted(self) -> int:
        return self.accepted + self.rejected

    @property
    def certificate_evaluations(self) -> int:
        return EVALUATIONS_PER_PANEL * int(self._account.panels)

    def add(self, segment: Segment) -> None:
        """Take the segment that begins where the last one ended."""
        begun, self.t, self._last = self.t, float(segment.state.t), segment
        self.accepted += int(segment.accepted)
        self.rejected += int(segment.rejected)
        self._account = balance(
            self._watch.equation, self._account, segment.dense, segment.state.t
        )
        reached = int(np.searchsorted(self._due, self.t, side="right"))
        self._save(self._due[:reached])
        self._due = self._due[reached:]
        size = dense_bytes(segment.dense)
        if self.dense_until == begun and size <= self._memory:
            self._pieces.append(segment.dense)
            self._starts.append(begun)
            self._memory -= size
            self.dense_until = self.t

    def close(self) -> Snapshot:
        """All snapshots, the last one at the time where the solve ended."""
        if self.ts.size == 0 or self.ts[-1] < self.t:
            self._save(np.array([self.t]))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *self._snapshots)

    def _save(self, times: Float[np.ndarray, " some"]) -> None:
        assert self._last is not None
        self._snapshots += self._watch.snapshots(self._last.dense, times)
        self.ts = np.append(self.ts, times)

    @property
    def dense(self) -> DenseOutput | None:
        """The dense output, as far as it was kept."""
        if not self._pieces:
            return None
        return DenseOutput(tuple(self._starts), self.dense_until, tuple(self._pieces))

    def certificate(self, snapshots: Snapshot) -> Certificate:
        """What the laws of an exact flow say of this one."""
        account = self._account
        with np.errstate(invalid="ignore"):  # a loss that overflowed has no rise
            rises = np.diff(snapshots.loss)
        return Certificate(
            drift={
                name: _relative(drift, snapshots.size[name])
                for name, drift in snapshots.drift.items()
            },
            energy_imbalance=float(account.imbalance),
            energy_released=float(account.initial_loss) - float(snapshots.loss[-1]),
            quadrature_error=float(account.quadrature_error),
            largest_rise=float(rises.max(initial=0.0)),
        )


def _relative(drift: Any, size: Any) -> float:
    largest = float(np.max(size))
    return float(np.max(drift)) / largest if largest > 0 else float(np.max(drift))
