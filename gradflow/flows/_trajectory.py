"""What a flow and a training run have in common: parameters over time."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar
from jaxtyping import Float, PyTree

from .._core import checks
from .._core.checks import Checked
from .._core.ravel import Ravel
from .._stepping import Piece, Statistics, ended_as_wanted, result_name
from ..problems import AbstractLoss, NamedObservable, UnknownLoss
from ._certificate import Certificate
from ._dataset import dataset
from ._dense_output import DenseOutput
from ._evaluation import (
    COSTLY,
    Timed,
    Untimed,
    along,
    sources,
    state_at,
    the_parameters,
)

if TYPE_CHECKING:
    import xarray


class AbstractTrajectory(eqx.Module):
    """Parameters over time, with the loss, its speed and observables."""

    ts: AbstractVar[Float[np.ndarray, " times"]]
    """The saved times. If it stopped early, the last one is where it stopped."""
    params: AbstractVar[PyTree]
    """The parameters at the times `params_ts`, stacked along a leading axis."""
    loss: AbstractVar[Float[np.ndarray, " times"]]
    """L(θ(t))."""
    speed: AbstractVar[Float[np.ndarray, " times"]]
    """‖∇L(θ(t))‖, the speed at which the parameters of a flow move."""
    observables: AbstractVar[dict[str, PyTree]]
    """Everything else that was recorded, by name."""
    stats: AbstractVar[Statistics]
    """The solver and its work."""
    result: AbstractVar[diffrax.RESULTS]
    """How it ended: `successful`, `event_occurred`, `max_steps_reached`,
    `dt_min_reached` or `internal_error`; `stats.reason` says more."""
    certificate: AbstractVar[Certificate]
    start: AbstractVar[PyTree]
    """The parameters at time 0."""
    problem: AbstractVar[AbstractLoss | None]
    """The loss, while the trajectory lives in memory. A loaded one has it if it is one
    of the library's own problems, or if the loss was passed to `load`."""
    stored_ts: AbstractVar[Float[np.ndarray, " stored"] | None]
    """Those of the saved times at which the parameters are stored; None for all."""
    dense: AbstractVar[DenseOutput | None]
    """The dense output, for as much of the trajectory as fits in memory."""

    @abstractmethod
    def pieces_again(self, params: PyTree, t0: float, t1: float) -> Iterator[Piece]:
        """Dense output from t0, where the trajectory is at `params`, to t1."""

    @property
    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """What was asked for, as attributes of a dataset."""

    @abstractmethod
    def save(self, path: str | os.PathLike) -> Path:
        """Write to `path`, whole or not at all."""

    @property
    def params_ts(self) -> Float[np.ndarray, " stored"]:
        """The times at which the parameters are stored: all saved times or, for a large
        flow, some of them including the last."""
        return self.ts if self.stored_ts is None else self.stored_ts

    @property
    def final(self) -> PyTree:
        """The parameters at the last saved time."""
        return jax.tree.map(lambda leaf: leaf[-1], self.params)

    @property
    def ended_as_wanted(self) -> bool:
        """Whether it reached its horizon or its event."""
        return ended_as_wanted(self.result)

    @property
    def knowledge(self) -> AbstractLoss:
        """The loss, or one about which nothing is known if it is not at hand."""
        return UnknownLoss() if self.problem is None else self.problem

    def at(self, t: Any) -> PyTree:
        """The parameters at time `t`; for an array of times, stacked along it.

        A time of `params_ts` gives the stored parameters. Between these the solver's
        dense output answers where it was kept; elsewhere the flow is integrated again
        from the stored parameters before `t`, with the same solver and tolerances. For
        a training run it is the straight line between two saved iterates.
        """
        times = self._times("t", t)
        if times.ndim == 0:
            return state_at(self, float(times))
        states = self.along(the_parameters, times.ravel())
        return jax.tree.map(
            lambda x: jnp.asarray(x).reshape(*times.shape, *x.shape[1:]), states
        )

    @property
    def mesh(self) -> Float[np.ndarray, " steps"]:
        """The times between which the solver stepped where its dense output was kept,
        and the saved times elsewhere."""
        if self.dense is None:
            return self.ts
        return np.union1d(self.dense.mesh, self.ts[self.dense.sources(self.ts) < 0])

    def observe(self, function: Checked[Callable[[PyTree], Any]], ts: Any) -> PyTree:
        """`function` of the parameters at each of the times `ts`, stacked: for what was
        not recorded along the way, or at times that were not saved. Where dense output
        was kept it is one compiled function, batched over times."""
        if not callable(function):
            raise ValueError(
                "`function` must be a function of the parameters, got "
                f"{type(function).__name__}."
            )
        times = self._times("ts", ts)
        if times.ndim != 1:
            raise ValueError(f"`ts` must be a list of times, got shape {times.shape}.")
        return self.along(Untimed(function), times)

    def along(self, function: Timed, times: Float[np.ndarray, " times"]) -> PyTree:
        """`function(t, params)` at all times, stacked, on the host."""
        return along(self, function, times)

    def is_costly_between(self, start: float, end: float) -> bool:
        """Whether evaluating it at many times between two takes long, because it is
        large and would have to be integrated again."""
        ends = sources(self.dense, np.array([start, end]))
        return Ravel.of(self.start).size > COSTLY and bool(np.any(ends < 0))

    def observable(self, name: str) -> Callable[[PyTree], PyTree]:
        """The loss's observable of this name, as one function for all flows of the same
        structure, so that it is compiled once."""
        return NamedObservable(self.knowledge, name)

    def require_problem(self, what: str) -> AbstractLoss:
        """The loss, or an error that says how to supply it to `what`."""
        if self.problem is None:
            kind = type(self).__name__
            raise ValueError(
                f"{what} needs the loss, which a run file does not hold: pass it as "
                f"`{kind}.load(path, loss=...)`, or integrate the flow again with "
                "`gradflow.integrate`."
            )
        return self.problem

    def to_xarray(self) -> "xarray.Dataset":
        """The trajectory as an `xarray.Dataset` over the dimension `time`."""
        return dataset(self)

    def _times(self, name: str, value: Any) -> np.ndarray:
        times, end = checks.real_array(name, value), self.ts[-1]
        if times.size == 0 or not np.all((times >= 0) & (times <= end)):
            raise ValueError(
                f"`{name}` must lie within the flow, from 0 to {end:g}, got {value!r}."
            )
        return times

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.ts)} times to t = {self.ts[-1]:g}, "
            f"loss {self.loss[0]:.6g} → {self.loss[-1]:.6g}, "
            f"{result_name(self.result)})"
        )
