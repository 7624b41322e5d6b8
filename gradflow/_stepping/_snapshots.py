"""Snapshots of a flow: what is recorded at each saved time."""

from collections.abc import Callable, Collection

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._core.compiled import compiled, jit
from .._core.types import AnyArray
from ..problems import Observable
from ._equation import Equation
from ._segments import Dense

SNAPSHOTS = 32
"""Saved times that one call evaluates; the last call of a segment is padded."""


class Snapshot(eqx.Module):
    """A flow at one saved time, or at several along a leading axis."""

    params: PyTree
    """The parameters; at fewer times, where they are not stored at all of them."""
    loss: Float[AnyArray, "*times"]
    speed: Float[AnyArray, "*times"]
    observables: dict[str, PyTree]
    drift: dict[str, Float[AnyArray, "*some"]]
    """max |Q(t) - Q(0)| of each conserved quantity Q."""
    size: dict[str, Float[AnyArray, "*some"]]
    """The largest entry of the terms that Q is a sum of."""


class Watch(eqx.Module):
    """What to record: `named` observables of the loss, and `functions` of the user."""

    equation: Equation
    y0: Float[Array, " n"]
    named: tuple[str, ...] = eqx.field(static=True)
    functions: dict[str, Observable]

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
        """The snapshot of the state y."""
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
    def observed_by(self) -> dict[str, Observable]:
        """The functions of the parameters that are observed, by name."""
        known = self.equation.loss.observables if self.named else {}
        return {name: known[name] for name in self.named} | self.functions

    def only(self, names: Collection[str]) -> "Watch":
        """The same, restricted to these observables."""
        named = tuple(name for name in self.named if name in names)
        functions = {k: f for k, f in self.functions.items() if k in names}
        return Watch(self.equation, self.y0, named, functions)

    def without(self, names: Collection[str]) -> "Watch":
        return self.only(self.observed_by.keys() - set(names))

    @property
    def shape(self) -> Snapshot:
        """The shapes and types of a snapshot."""
        return _shape(self)

    def _conserved(self, y: Float[Array, " n"]) -> dict[str, tuple[AnyArray, AnyArray]]:
        """The terms of each conserved quantity, at the start and at y."""
        terms, ravel = self.equation.loss.conserved_terms, self.equation.ravel
        then, now = (terms(ravel.unravel(state)) for state in (self.y0, y))
        return {name: (then[name], now[name]) for name in now}


@jit
def _shape(watch: Watch) -> Snapshot:
    # Jitted so that it is traced once and remembered.
    return jax.eval_shape(watch.snapshot, watch.y0)


@compiled
def _take(
    watch: Watch,
    dense: Dense,
    times: Float[Array, " times"],
    count: Int[Array, ""],
) -> Snapshot:
    """Snapshots at the first `count` of `times`; the other rows stay zero."""
    return fill_rows(
        lambda t: watch.snapshot(dense.evaluate(t)),
        times,
        count,
        watch.equation.batch_size,
    )


def fill_rows(
    function: Callable[[Array], PyTree], xs: Array, count: Int[Array, ""], batch: int
) -> PyTree:
    """`function` of the first `count` of `xs`, in batches whose size divides their
    number; the other rows are zero, or whatever their batch yields."""

    def alone(xs: Array) -> PyTree:
        return jax.tree.map(lambda x: x[None], function(xs[0]))

    several = jax.vmap(function) if batch > 1 else alone

    def fill(i: Int[Array, ""], rows: PyTree) -> PyTree:
        some = several(jax.lax.dynamic_slice_in_dim(xs, i * batch, batch))
        return jax.tree.map(
            lambda all_rows, new: jax.lax.dynamic_update_slice_in_dim(
                all_rows, new, i * batch, axis=0
            ),
            rows,
            some,
        )

    shapes = jax.eval_shape(function, xs[0])
    empty = jax.tree.map(lambda x: jnp.zeros((len(xs), *x.shape), x.dtype), shapes)
    return jax.lax.fori_loop(0, -(-count // batch), fill, empty)
