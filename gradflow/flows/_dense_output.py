"""Dense output: a flow between its saved times, as far as it was kept."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._core.ravel import Ravel
from .._stepping import Dense, Piece


class SavedIterates(eqx.Module):
    """Straight lines between the saved iterates of a training run."""

    ts: Float[Array, " saved"]
    ys: Float[Array, "saved n"]

    @property
    def ts_size(self) -> int:
        return len(self.ts)

    def evaluate(self, t: Float[Array, ""]) -> Float[Array, " n"]:
        """The flat state at time t."""
        after = jnp.searchsorted(self.ts, t, side="right")
        i = jnp.clip(after - 1, 0, len(self.ts) - 2)
        gap = self.ts[i + 1] - self.ts[i]
        # A learning rate below the clock's rounding does not move it.
        share = jnp.where(gap > 0, (t - self.ts[i]) / jnp.where(gap > 0, gap, 1.0), 1.0)
        return (1 - share) * self.ys[i] + share * self.ys[i + 1]


Interpolation = Dense | SavedIterates
"""Dense output within one piece: its steps are between the first `ts_size` of `ts`, and
`evaluate(t)` is the flat state at time t."""


class DenseOutput(eqx.Module):
    """The solver's own interpolation, in pieces in the order of time, with gaps where
    none was kept."""

    starts: tuple[float, ...] = eqx.field(static=True)
    ends: tuple[float, ...] = eqx.field(static=True)
    pieces: tuple[Interpolation, ...]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "DenseOutput | None":
        if not pieces:
            return None
        return cls(
            tuple(piece.start for piece in pieces),
            tuple(piece.end for piece in pieces),
            tuple(piece.dense for piece in pieces),
        )

    @classmethod
    def of_iterates(
        cls, ts: Float[np.ndarray, " saved"], params: PyTree
    ) -> "DenseOutput | None":
        """Straight lines between saved iterates, the first of which is the start."""
        if len(ts) < 2:
            return None
        ravel = Ravel.of(jax.tree.map(lambda leaf: leaf[0], params))
        ys = jax.vmap(ravel.ravel)(jax.tree.map(jnp.asarray, params))
        return cls((0.0,), (float(ts[-1]),), (SavedIterates(jnp.asarray(ts), ys),))

    def sources(self, times: Float[np.ndarray, " times"]) -> Int[np.ndarray, " times"]:
        """The index of the piece that covers each time, or -1."""
        pieces = np.searchsorted(self.starts, times, side="right") - 1
        within = (pieces >= 0) & (times <= np.asarray(self.ends)[pieces])
        return np.where(within, pieces, -1)

    @property
    def until(self) -> float:
        """The time up to which there is no gap."""
        reached = 0.0
        for start, end in zip(self.starts, self.ends, strict=True):
            if start > reached:
                break
            reached = end
        return reached

    def joined(self, later: "DenseOutput | None") -> "DenseOutput":
        """This dense output, followed by `later` pieces."""
        if later is None:
            return self
        return DenseOutput(
            self.starts + later.starts,
            self.ends + later.ends,
            self.pieces + later.pieces,
        )

    @property
    def mesh(self) -> Float[np.ndarray, " steps"]:
        """The times between which the solver stepped."""
        sizes = [int(piece.ts_size) for piece in self.pieces]
        ts = [
            np.asarray(p.ts)[:n] for p, n in zip(self.pieces, sizes, strict=True) if n
        ]
        return np.unique(np.concatenate(ts))
