"""What happened: a flow at its saved times, between them, and on disk."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._core import checks, storage
from .._core.checks import Checked
from .._core.ravel import Ravel, path_name
from .._stepping._energy import Certificate
from ..problems._loss import AbstractLoss, UnknownLoss, as_loss

if TYPE_CHECKING:
    import xarray


RESULTS = diffrax.RESULTS
"""How a solve can end, for rooms that do not import diffrax."""


class FlowError(RuntimeError):
    """A solve that could not go on. `flow` holds what was computed until then."""

    def __init__(self, message: str, flow: "Flow"):
        super().__init__(message)
        self.flow = flow


class Settings(NamedTuple):
    """What a flow was asked for; enough to integrate again in the same way."""

    t1: float
    solver: str
    rtol: float
    atol: float
    step: float | None = None
    """The length of a step, of a solver that takes steps of one length."""
    discrete: bool = False
    """Whether an optimiser went step by step (`gradflow.train`): then no equation was
    integrated, and none can be again."""


class SavedIterates(eqx.Module):
    """Straight lines from each saved iterate of a training to the next."""

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
        # Learning rates below its rounding do not move the clock.
        share = jnp.where(gap > 0, (t - self.ts[i]) / jnp.where(gap > 0, gap, 1.0), 1.0)
        return (1 - share) * self.ys[i] + share * self.ys[i + 1]


class DenseOutput(eqx.Module):
    """The solver's own interpolation, in pieces in the order of time, with gaps where
    none was kept."""

    @classmethod
    def of_training(
        cls, ts: Float[np.ndarray, " saved"], params: PyTree
    ) -> "DenseOutput | None":
        """Between the saved iterates of a training, the first of which is its start."""
        if len(ts) < 2:
            return None
        ravel = Ravel.of(jax.tree.map(lambda leaf: leaf[0], params))
        ys = jax.vmap(ravel.ravel)(jax.tree.map(jnp.asarray, params))
        return cls((0.0,), (float(ts[-1]),), (SavedIterates(jnp.asarray(ts), ys),))

    starts: tuple[float, ...] = eqx.field(static=True)
    ends: tuple[float, ...] = eqx.field(static=True)
    pieces: tuple[Any, ...]
    """Each with `evaluate(t)`, the flat state at time t."""

    def sources(self, times: Float[np.ndarray, " times"]) -> np.ndarray:
        """The piece that answers at each time, or -1."""
        pieces = np.searchsorted(self.starts, times, side="right") - 1
        within = (pieces >= 0) & (times <= np.asarray(self.ends)[pieces])
        return np.where(within, pieces, -1)

    @property
    def until(self) -> float:
        """The time until which there is no gap, from time 0 on."""
        reached = 0.0
        for start, end in zip(self.starts, self.ends, strict=True):
            if start > reached:
                break
            reached = end
        return reached

    def joined(self, later: "DenseOutput | None") -> "DenseOutput":
        """With the pieces of what came after."""
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


BATCHED_NUMBERS = 2**16
"""How many states are evaluated at once: as many as have this many numbers together."""


AT_ONCE = 32
"""Times that one call looks at; fewer are padded, so that it is compiled once."""


COSTLY = 2**11
"""Numbers in a state, above which integrating again takes long."""


@eqx.filter_jit
def _observe(
    function: Callable,
    ravel: Ravel,
    piece: Any,
    ts: Float[Array, " times"],
    count: Int[Array, ""],
) -> PyTree:
    """`function(t, params)` at the first `count` of times within a piece of dense
    output; the rest stays zero."""
    return fill_rows(
        lambda t: function(t, ravel.unravel(piece.evaluate(t))),
        ts,
        count,
        2 ** (max(1, min(AT_ONCE, BATCHED_NUMBERS // ravel.size)).bit_length() - 1),
    )


def ended_by(result: diffrax.RESULTS, *ways: diffrax.RESULTS) -> bool:
    """Whether a solve that is over ended in one of these ways. On the host: to compare
    results by `==` is an operation of JAX's, and there may be thousands of flows."""
    (code,) = jax.tree.leaves(result)
    return any(code == jax.tree.leaves(way)[0] for way in ways)


def fill_rows(
    function: Callable, xs: Array, count: Int[Array, ""], batch: int
) -> PyTree:
    """`function` of the first `count` of `xs`, in batches of a size that divides their
    number; the rest is zero, or what its batch brings."""

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


@eqx.filter_jit
def _evaluate(ravel: Ravel, piece: Any, t: Float[Array, ""]) -> PyTree:
    return ravel.unravel(piece.evaluate(t))


@eqx.filter_jit
def _at_state(function: Callable, t: Float[Array, ""], params: PyTree) -> PyTree:
    return function(t, params)


IntegrateAgain = Callable[
    [Callable, Settings, Any, PyTree, float, float], Iterator[tuple[float, Any]]
]
_integrate_again: list[IntegrateAgain] = []


def set_integrate_again(function: IntegrateAgain) -> None:
    """Called once by `_integrate`, which may import this module but not the reverse:
    `function(loss, settings, solver, params, t0, t1)` yields dense output from t0 to
    t1, piece by piece with its end, of the flow that is at `params` at t0."""
    _integrate_again[:] = [function]


class Flow(eqx.Module):
    """A gradient flow θ̇ = -∇L(θ) at its saved times, and how exact it is; or a training
    by `gradflow.train`, whose time is the sum of its learning rates.

    `print(flow)` shows a summary. `flow.at(t)` gives the parameters at any time.
    """

    ts: Float[np.ndarray, " times"]
    """The saved times. Where the flow stopped early the last one is where it
    stopped."""
    params: PyTree
    """The parameters at the times `params_ts`, stacked along a leading axis."""
    loss: Float[np.ndarray, " times"]
    """L(θ(t))."""
    speed: Float[np.ndarray, " times"]
    """‖∇L(θ(t))‖, the speed at which the parameters move."""
    observables: dict[str, PyTree]
    """Whatever else was watched, by name."""
    stats: dict[str, Any]
    """The solver and its work: `solver`, `num_accepted_steps`, `num_rejected_steps`,
    `num_evaluations`, `num_hessian_products` and `num_newton_failures` (None where the
    solver does not count), `choice` (why it is this solver), `compile_seconds`,
    `run_seconds`, `reason` (why it stopped early, else empty), …"""
    result: diffrax.RESULTS
    """How the solve ended: `successful`, `event_occurred`, `max_steps_reached`,
    `dt_min_reached` or `internal_error` (`stats["reason"]` says more)."""
    certificate: Certificate
    start: PyTree
    """The parameters at time 0."""
    settings: Settings = eqx.field(static=True)
    problem: AbstractLoss | None
    """The loss, while the flow lives in memory. A loaded flow of the library's own
    problems has it too; one of a user's own loss has it if `Flow.load` was given it."""
    solver: diffrax.AbstractSolver | None = None
    dense: DenseOutput | None = None
    """The solver's dense output, for as much of the flow as fits in memory."""
    stored_ts: Float[np.ndarray, " stored"] | None = None
    """Those of the saved times at which the parameters were stored; None for all."""

    @property
    def params_ts(self) -> Float[np.ndarray, " stored"]:
        """The times at which the parameters were stored: all saved times, or of a large
        flow some of them, the last among them."""
        return self.ts if self.stored_ts is None else self.stored_ts

    @property
    def final(self) -> PyTree:
        """The parameters at the last saved time."""
        return jax.tree.map(lambda leaf: leaf[-1], self.params)

    @property
    def ended_as_wanted(self) -> bool:
        """Whether the flow reached its horizon, or its event."""
        fine = (diffrax.RESULTS.successful, diffrax.RESULTS.event_occurred)
        return ended_by(self.result, *fine)

    def at(self, t: Any) -> PyTree:
        """The parameters at time `t`; at an array of times, stacked along it.

        A time of `params_ts` gives the stored parameters. Between these the solver's
        dense output answers where it was kept; elsewhere the flow is integrated again
        from the last of them before `t`, with the same solver and tolerances. Of a
        training it is the straight line from one saved iterate to the next.
        """
        times = self._times("t", t)
        if times.ndim == 0:
            return self._state_at(float(times))
        states = self.along(_the_parameters, times.ravel())
        return jax.tree.map(
            lambda x: jnp.asarray(x).reshape(*times.shape, *x.shape[1:]), states
        )

    @property
    def mesh(self) -> Float[np.ndarray, " steps"]:
        """The times between which the solver stepped, where its dense output was kept;
        elsewhere, the saved times."""
        if self.dense is None:
            return self.ts
        return np.union1d(self.dense.mesh, self.ts[self._sources(self.ts) < 0])

    def observe(self, function: Checked[Callable[[PyTree], Any]], ts: Any) -> PyTree:
        """`function` of the parameters at each of the times `ts`, stacked: what was not
        watched while the flow was integrated, or at times that were not saved. Where
        dense output was kept it is one compiled function, batched over times."""
        if not callable(function):
            raise ValueError(
                "`function` must be a function of the parameters, got "
                f"{type(function).__name__}."
            )
        times = self._times("ts", ts)
        if times.ndim != 1:
            raise ValueError(f"`ts` must be a list of times, got shape {times.shape}.")
        return self.along(_Untimed(function), times)

    def _times(self, name: str, value: Any) -> np.ndarray:
        times, end = checks.real_array(name, value), self.ts[-1]
        if times.size == 0 or not np.all((times >= 0) & (times <= end)):
            raise ValueError(
                f"`{name}` must lie within the flow, from 0 to {end:g}, got {value!r}."
            )
        return times

    def along(self, function: Callable, times: Float[np.ndarray, " times"]) -> PyTree:
        """`function(t, params)` at all times, on the host."""
        rows: list[Any] = [None] * len(times)
        where = self._sources(times)
        for source in np.unique(where):
            index = np.flatnonzero(where == source)
            if source < 0:
                self._fill_again(rows, function, times, index)
            else:
                assert self.dense is not None
                piece = self.dense.pieces[source]
                self._fill(rows, function, times, index, piece)
        return jax.tree.map(lambda *x: np.stack(x), *rows)

    def _fill(
        self,
        rows: list[Any],
        function: Callable,
        times: Float[np.ndarray, " times"],
        index: Int[np.ndarray, " some"],
        piece: Any,
    ) -> None:
        """Fill the rows at `index`, whose times lie within a piece of dense output."""
        for first in range(0, len(index), AT_ONCE):
            some = index[first : first + AT_ONCE]
            padded = np.pad(times[some], (0, AT_ONCE - len(some)), mode="edge")
            values = _observe(
                function,
                Ravel.of(self.start),
                piece,
                jnp.asarray(padded),
                jnp.asarray(len(some)),
            )
            values = jax.tree.map(np.asarray, values)
            for row, i in enumerate(some):
                rows[i] = jax.tree.map(lambda x, row=row: x[row], values)

    def _fill_again(
        self,
        rows: list[Any],
        function: Callable,
        times: Float[np.ndarray, " times"],
        index: Int[np.ndarray, " some"],
    ) -> None:
        """Fill the rows at `index`, for which there is no dense output: from stored
        parameters, or by integrating again from those before, once for all times that
        have the same before them."""
        before = np.searchsorted(self.params_ts, times[index], side="right") - 1
        for stored in np.unique(before):
            begin = 0.0 if stored < 0 else float(self.params_ts[stored])
            state = self.start if stored < 0 else _at_index(self.params, int(stored))
            here = index[before == stored]
            for i in here[times[here] == begin]:
                at = _at_state(function, jnp.asarray(begin), state)
                rows[i] = jax.tree.map(np.asarray, at)
            here = here[times[here] > begin]
            if not here.size:
                continue
            loss = self.require_problem("`Flow.at` between stored times")
            (integrate_again,) = _integrate_again
            for end, piece in integrate_again(
                loss, self.settings, self.solver, state, begin, float(times[here].max())
            ):
                within = (times[here] > begin) & (times[here] <= end)
                self._fill(rows, function, times, here[within], piece)
                begin = end

    def is_costly_between(self, start: float, end: float) -> bool:
        """Whether it takes long to look at the flow at many times between two: it is
        large and has to be integrated again."""
        ends = self._sources(np.array([start, end]))
        return Ravel.of(self.start).size > COSTLY and bool(np.any(ends < 0))

    def _sources(self, times: Float[np.ndarray, " times"]) -> np.ndarray:
        """The piece of dense output that answers at each time, or -1."""
        if self.dense is None:
            return np.full(len(times), -1)
        return self.dense.sources(times)

    def _state_at(self, t: float) -> PyTree:
        stored = np.flatnonzero(self.params_ts == t)
        if stored.size:
            return _at_index(self.params, int(stored[0]))
        (source,) = self._sources(np.array([t]))
        if self.dense is not None and source >= 0:
            piece = self.dense.pieces[source]
            return _evaluate(Ravel.of(self.start), piece, jnp.asarray(t))
        states = self.along(_the_parameters, np.array([t]))
        return _at_index(states, 0)

    @property
    def knowledge(self) -> AbstractLoss:
        """The loss, or one about which nothing is known if it is not at hand."""
        return UnknownLoss() if self.problem is None else self.problem

    def require_problem(self, what: str) -> AbstractLoss:
        """The loss, or an error that says how to come by it."""
        if self.problem is None:
            raise ValueError(
                f"{what} needs the loss, which a run file does not hold: give it as "
                "`Flow.load(path, loss=...)`, or integrate the flow anew with "
                "`gradflow.integrate`."
            )
        return self.problem

    def save(self, path: str | os.PathLike) -> Path:
        """Write the flow to `path`, whole or not at all.

        The file holds data only, no code: the dense output and a user's own loss stay
        behind. Parameters of a type of the user's own come back as a dictionary
        unless `Flow.load` is told their structure.
        """
        return storage.write(path, self.contents())

    def contents(self) -> dict[str, Any]:
        """What a run file holds of the flow."""
        storable = storage.can_pack(self.params)
        return {
            "ts": self.ts,
            "stored_ts": self.stored_ts,
            "params": self.params if storable else None,
            "leaves": None if storable else _named_leaves(self.params),
            "start": jax.tree.leaves(self.start),
            "loss": self.loss,
            "speed": self.speed,
            "observables": self.observables,
            "stats": self.stats,
            "result": _result_name(self.result),
            "certificate": self.certificate,
            "settings": self.settings._asdict(),
            "problem": self.problem if storage.can_pack(self.problem) else None,
            "versions": versions(),
        }

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        loss: Callable | None = None,
        *,
        like: PyTree | None = None,
        solver: diffrax.AbstractSolver | None = None,
    ) -> "Flow":
        """Read a flow that `save` wrote.

        **Arguments:**

        - `path`: the run file, or a flow's in the store of a sweep. One that is
            missing, damaged, altered or not gradflow's raises a `RunFileError`.
        - `loss`: the loss of the flow, for one of a user's own; a flow of the library's
            own problems knows its own.
        - `like`: parameters with the structure that the flow's had, for those of a
            type of the user's own.
        - `solver`: the flow's solver, for one that goes by no name in gradflow.
        """

        def build(run: dict[str, Any]) -> Flow:
            # A result in the store of a sweep is a flow with a label to it.
            content = run.get("content", run)
            return cls.from_contents(content, loss, like=like, solver=solver)

        return storage.read(path, build)

    @classmethod
    def from_contents(
        cls,
        run: dict[str, Any],
        loss: Callable | None = None,
        *,
        like: PyTree | None = None,
        solver: diffrax.AbstractSolver | None = None,
    ) -> "Flow":
        """The flow of which `contents` told, with the options of `load`."""
        params = run["leaves"] if run["params"] is None else run["params"]
        settings = Settings(**run["settings"])
        if like is not None:
            # A dictionary of leaves is in the order of the original's.
            in_order = run["params"] is not None
            leaves = jax.tree.leaves(params) if in_order else list(params.values())
            params = jax.tree.unflatten(jax.tree.structure(like), leaves)
        start = jax.tree.unflatten(jax.tree.structure(params), run["start"])
        lines = DenseOutput.of_training if settings.discrete else lambda *_: None
        return cls(
            ts=run["ts"],
            params=params,
            loss=run["loss"],
            speed=run["speed"],
            observables=run["observables"],
            stats={**run["stats"], "versions": run["versions"]},
            start=start,
            result=getattr(diffrax.RESULTS, run["result"]),
            certificate=run["certificate"],
            settings=settings,
            problem=run["problem"] if loss is None else as_loss(loss),
            solver=solver,
            stored_ts=run.get("stored_ts"),
            dense=lines(run["ts"], params),
        )

    def to_xarray(self) -> "xarray.Dataset":
        """The flow as an `xarray.Dataset` over the dimension `time`."""
        import xarray

        named = {"loss": self.loss, "speed": self.speed}
        for name, leaf in _named_leaves(self.observables).items():
            named.setdefault(name, leaf)
        clock = dict.fromkeys(named, "time")
        coordinates = {"time": self.ts}
        if self.stored_ts is not None:
            coordinates["params_time"] = self.stored_ts
        for name, leaf in _named_leaves(self.params).items():
            taken = name in named or name in ("", *coordinates)
            name = f"params.{name}".rstrip(".") if taken else name
            named[name], clock[name] = leaf, list(coordinates)[-1]
        return xarray.Dataset(
            {
                name: (
                    (clock[name], *(f"{name}_{i}" for i in range(np.ndim(v) - 1))),
                    v,
                )
                for name, v in named.items()
            },
            coords=coordinates,
            attrs={
                **self.settings._asdict(),
                "result": _result_name(self.result),
                "certificate": str(self.certificate),
            },
        )

    def __str__(self) -> str:
        stats = self.stats
        evaluations = stats["num_evaluations"]
        counted = "" if evaluations is None else f", {evaluations:,} evaluations"
        products = stats.get("num_hessian_products")
        counted += f", {products:,} Hessian products" if products else ""
        ended = stats["reason"] or "reached the horizon"
        kind = "Training" if self.settings.discrete else "Flow"
        return "\n".join(
            [
                f"{kind} to t = {self.ts[-1]:g} ({ended})",
                f"loss             {self.loss[0]:.6f} → {self.loss[-1]:.6f}"
                f"{self._above_floor()}, speed {self.speed[-1]:.1e}",
                f"solver           {stats['solver']} {self._held_to()}",
                f"work             {stats['num_accepted_steps']:,} steps, "
                f"{stats['num_rejected_steps']:,} rejected{counted}",
                f"time             {stats['run_seconds']:.2f} s, and "
                f"{stats['compile_seconds']:.2f} s to compile",
                str(self.certificate),
            ]
        )

    def _held_to(self) -> str:
        if self.settings.step is not None:
            return f"with steps of {self.settings.step:g}"
        if self.settings.discrete:
            least, most = self.stats["learning_rates"]
            return f"with steps of {least:g} to {most:g}"
        return f"at rtol {self.settings.rtol:g}, atol {self.settings.atol:.1e}"

    def _above_floor(self) -> str:
        floor = None if self.problem is None else self.problem.floor
        if floor is None:
            return ""
        return f" ({self.loss[-1] - floor:.1e} above its floor {floor:.6f})"

    def __repr__(self) -> str:
        return (
            f"Flow({len(self.ts)} times to t = {self.ts[-1]:g}, "
            f"loss {self.loss[0]:.6g} → {self.loss[-1]:.6g}, "
            f"{_result_name(self.result)})"
        )


class _Untimed(eqx.Module):
    """A function of the parameters, at any time."""

    function: Callable

    def __call__(self, t: Any, params: PyTree) -> Any:
        return self.function(params)


def _the_parameters(t: Any, params: PyTree) -> PyTree:
    return params


def _at_index(params: PyTree, index: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[index]), params)


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves by their places, in order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(where): leaf for where, leaf in leaves}


def _result_name(result: diffrax.RESULTS) -> str:
    names = ("successful", "event_occurred", "max_steps_reached", "dt_min_reached")
    for name in names:
        if result == getattr(diffrax.RESULTS, name):
            return name
    return "internal_error"


def versions() -> dict[str, str]:
    """The versions of what computes a flow."""
    from importlib.metadata import version

    parts = ("gradflow", "jax", "jaxlib", "diffrax", "equinox", "numpy")
    return {name: version(name) for name in parts}
