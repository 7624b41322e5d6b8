"""Functions of a trajectory's parameters, at any of its times.

A time at which the parameters are stored needs nothing else. Between these the dense
output answers where it was kept; elsewhere the flow is integrated again from the stored
parameters before, once for all times that share them.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._core.compiled import jit
from .._core.ravel import Ravel
from .._stepping import Piece, fill_rows, states_at_once
from ._dense_output import DenseOutput, Interpolation

AT_ONCE = 32
"""Times that one call evaluates; fewer are padded, so that it is compiled once."""
COSTLY = 2**11
"""The number of entries in a state above which integrating again takes long."""

Timed = Callable[[Float[Array, ""], PyTree], PyTree]
"""A function of the time and the parameters."""


class Untimed(eqx.Module):
    """A function of the parameters alone, as a function of time and parameters."""

    function: Callable[[PyTree], PyTree]

    def __call__(self, t: object, params: PyTree) -> PyTree:
        return self.function(params)


def the_parameters(t: object, params: PyTree) -> PyTree:
    return params


@runtime_checkable
class Evaluable(Protocol):
    """What `along` needs to know about a trajectory."""

    @property
    def start(self) -> PyTree: ...

    @property
    def params(self) -> PyTree: ...

    @property
    def params_ts(self) -> Float[np.ndarray, " stored"]: ...

    @property
    def dense(self) -> DenseOutput | None: ...

    def pieces_again(self, params: PyTree, t0: float, t1: float) -> Iterator[Piece]:
        """Dense output from t0, where the trajectory is at `params`, to t1."""
        ...


def along(
    trajectory: Evaluable, function: Timed, times: Float[np.ndarray, " times"]
) -> PyTree:
    """`function(t, params)` at all times, stacked, on the host."""
    rows: list[Any] = [None] * len(times)
    where = sources(trajectory.dense, times)
    for source in np.unique(where):
        index = np.flatnonzero(where == source)
        if source < 0:
            _fill_again(trajectory, rows, function, times, index)
        else:
            assert trajectory.dense is not None
            piece = trajectory.dense.pieces[source]
            _fill(Ravel.of(trajectory.start), rows, function, times, index, piece)
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def state_at(trajectory: Evaluable, t: float) -> PyTree:
    """The parameters at one time."""
    stored = np.flatnonzero(trajectory.params_ts == t)
    if stored.size:
        return at_index(trajectory.params, int(stored[0]))
    (source,) = sources(trajectory.dense, np.array([t]))
    if trajectory.dense is not None and source >= 0:
        piece = trajectory.dense.pieces[source]
        return _evaluate(Ravel.of(trajectory.start), piece, jnp.asarray(t))
    return at_index(along(trajectory, the_parameters, np.array([t])), 0)


def sources(
    dense: DenseOutput | None, times: Float[np.ndarray, " times"]
) -> Int[np.ndarray, " times"]:
    """The piece of dense output that covers each time, or -1."""
    return np.full(len(times), -1) if dense is None else dense.sources(times)


def _fill(
    ravel: Ravel,
    rows: list[Any],
    function: Timed,
    times: Float[np.ndarray, " times"],
    index: Int[np.ndarray, " some"],
    piece: Interpolation,
) -> None:
    """Fill the rows at `index`, whose times lie within a piece of dense output."""
    for first in range(0, len(index), AT_ONCE):
        some = index[first : first + AT_ONCE]
        padded = np.pad(times[some], (0, AT_ONCE - len(some)), mode="edge")
        values = _observe(
            function, ravel, piece, jnp.asarray(padded), jnp.asarray(len(some))
        )
        values = jax.tree.map(np.asarray, values)
        for row, i in enumerate(some):
            rows[i] = jax.tree.map(lambda x, row=row: x[row], values)


def _fill_again(
    trajectory: Evaluable,
    rows: list[Any],
    function: Timed,
    times: Float[np.ndarray, " times"],
    index: Int[np.ndarray, " some"],
) -> None:
    """Fill the rows at `index`, which no dense output covers."""
    params_ts = trajectory.params_ts
    before = np.searchsorted(params_ts, times[index], side="right") - 1
    for stored in np.unique(before):
        begin = 0.0 if stored < 0 else float(params_ts[stored])
        state = (
            trajectory.start if stored < 0 else at_index(trajectory.params, int(stored))
        )
        here = index[before == stored]
        for i in here[times[here] == begin]:
            at = _at_state(function, jnp.asarray(begin), state)
            rows[i] = jax.tree.map(np.asarray, at)
        here = here[times[here] > begin]
        if not here.size:
            continue
        last = float(times[here].max())
        for piece in trajectory.pieces_again(state, begin, last):
            within = (times[here] > piece.start) & (times[here] <= piece.end)
            ravel = Ravel.of(trajectory.start)
            _fill(ravel, rows, function, times, here[within], piece.dense)


@jit
def _observe(
    function: Timed,
    ravel: Ravel,
    piece: Interpolation,
    ts: Float[Array, " times"],
    count: Int[Array, ""],
) -> PyTree:
    """`function(t, params)` at the first `count` of times within a piece of dense
    output; the other rows stay zero."""
    return fill_rows(
        lambda t: function(t, ravel.unravel(piece.evaluate(t))),
        ts,
        count,
        states_at_once(ravel.size),
    )


@jit
def _evaluate(ravel: Ravel, piece: Interpolation, t: Float[Array, ""]) -> PyTree:
    return ravel.unravel(piece.evaluate(t))


@jit
def _at_state(function: Timed, t: Float[Array, ""], params: PyTree) -> PyTree:
    return function(t, params)


def at_index(params: PyTree, index: int) -> PyTree:
    """One row of stacked parameters."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[index]), params)
