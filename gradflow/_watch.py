"""What is recorded at the saved times of a flow."""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ._certificate import Certificate, EnergyAccount
from ._segments import Equation, compiled

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
        self, dense: diffrax.DenseInterpolation, times: Float[np.ndarray, " times"]
    ) -> list[Snapshot]:
        """Snapshots at `times`, all within `dense`, on the host."""
        taken = []
        for first in range(0, len(times), SNAPSHOTS):
            chunk = times[first : first + SNAPSHOTS]
            padded = np.pad(chunk, (0, SNAPSHOTS - len(chunk)), mode="edge")
            snapshot = _take(self, dense, jnp.asarray(padded))
            count = len(chunk)
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
            drift[name] = jnp.max(jnp.abs(sum(now) - sum(then)))
            size[name] = jnp.max(jnp.stack([jnp.max(jnp.abs(term)) for term in now]))
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
    watch: Watch, dense: diffrax.DenseInterpolation, times: Float[Array, " times"]
) -> Snapshot:
    return jax.lax.map(
        lambda t: watch.snapshot(dense.evaluate(t)),
        times,
        batch_size=watch.equation.batch_size,
    )


def stacked(snapshots: list[Snapshot]) -> Snapshot:
    """One snapshot with all times."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *snapshots)


def certificate(snapshots: Snapshot, account: EnergyAccount) -> Certificate:
    """What the laws of an exact flow say of these snapshots and this account."""

    def relative(drift: np.ndarray, size: np.ndarray) -> float:
        largest = float(np.max(size))
        return float(np.max(drift)) / largest if largest > 0 else float(np.max(drift))

    rises = np.diff(snapshots.loss)
    return Certificate(
        drift={
            name: relative(np.asarray(drift), np.asarray(snapshots.size[name]))
            for name, drift in snapshots.drift.items()
        },
        energy_imbalance=float(account.imbalance),
        energy_released=float(account.initial_loss) - float(snapshots.loss[-1]),
        quadrature_error=float(account.quadrature_error),
        largest_rise=float(max(0.0, rises.max(initial=0.0))),
    )
