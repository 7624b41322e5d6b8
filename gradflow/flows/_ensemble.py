"""Ensembles: many flows of one kind, stacked."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffrax
import jax
import numpy as np
from jaxtyping import Float, Int, PyTree

from .._core import checks, file_format
from .._core.result_tables import AbstractResults
from .._stepping import (
    EVALUATIONS_PER_PANEL,
    Continuation,
    EnergyAccount,
    Outcome,
    Snapshot,
    Statistics,
    result_of_name,
)
from ..problems import AbstractLoss, UnknownLoss
from ._certificate import relative_drift
from ._contents import Origin
from ._dataset import ensemble_dataset
from ._ensemble_contents import Origins, Records, contents, parts
from ._flow import Flow
from ._summary import loss_text

if TYPE_CHECKING:
    import xarray

ENDED_AS_WANTED = ("successful", "event_occurred")


class EnsembleError(RuntimeError):
    """Some members could not continue. `ensemble` holds all that was computed."""

    def __init__(self, ensemble: "Ensemble"):
        failed = ensemble.failed
        some = "; ".join(f"member {i} {why}" for i, why in list(failed.items())[:3])
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        super().__init__(
            f"{len(failed)} of {len(ensemble)} flows did not reach their end: {some}"
            f"{more}. Everything that was computed is in this exception's `ensemble`; "
            "`throw=False` returns it instead."
        )
        self.ensemble = ensemble


class Ensemble(AbstractResults[Flow]):
    """Many flows of one kind, with an axis of members before that of time.

    `ensemble[i]` is a member, a `Flow` like any other. Arrays over all members are on
    the common saved times, and NaN after a member has ended.
    """

    ts: Float[np.ndarray, " times"]
    """The saved times."""
    stats: Statistics
    """The solver and the time of all members together."""

    def __init__(
        self,
        origins: Origins,
        records: Records,
        ts: Float[np.ndarray, " times"],
        stored: Int[np.ndarray, " stored"],
        stats: Statistics,
    ):
        self._origins, self._records = origins, records
        self._stored = stored
        self.ts, self.stats = ts, stats
        self._flows: dict[int, Flow] = {}

    def __len__(self) -> int:
        return len(self._records.ended)

    def _result(self, index: int) -> Flow:
        if index not in self._flows:
            self._flows[index] = Flow.of(self._origin(index), self._outcome(index))
        return self._flows[index]

    @property
    def knowledge(self) -> AbstractLoss:
        """The loss of the first member, or one about which nothing is known."""
        problem = self._origins.problems[0]
        return UnknownLoss() if problem is None else problem

    @property
    def observable_names(self) -> tuple[str, ...]:
        return tuple(self._records.rows.observables)

    @property
    def failed(self) -> dict[int, str]:
        """The members that reached neither the horizon nor an event, and why."""
        return {
            i: self._records.reasons[i]
            for i, result in enumerate(self._records.results)
            if result not in ENDED_AS_WANTED
        }

    @property
    def loss(self) -> Float[np.ndarray, "members times"]:
        return self.values("loss")

    @property
    def speed(self) -> Float[np.ndarray, "members times"]:
        return self.values("speed")

    @property
    def final(self) -> PyTree:
        """The parameters at each member's end, along a leading axis."""
        return self._records.end.params

    @property
    def end(self) -> Float[np.ndarray, " members"]:
        """The time at which each member ended."""
        return self._records.ended

    def values(self, name: str) -> PyTree:
        """`loss`, `speed` or an observable of all members at the saved times."""
        rows = self._records.rows
        known = {"loss": rows.loss, "speed": rows.speed, **rows.observables}
        if name not in known:
            raise ValueError(f"`name` must be one of {', '.join(known)}, got {name!r}.")
        there = np.arange(len(self.ts)) < self._records.saved[:, None]

        def masked(x: np.ndarray) -> np.ndarray:
            mask = there.reshape(*there.shape, *(1,) * (np.ndim(x) - 2))
            return np.where(mask, x, np.nan)

        return jax.tree.map(masked, known[name])

    def median(self, name: str = "loss") -> PyTree:
        """The median over the members that have not ended, at each saved time."""
        return self.quantiles(0.5, name)

    def quantiles(self, q: Any, name: str = "loss") -> PyTree:
        """Quantiles over the members that have not ended, at each saved time; several
        are along a leading axis."""
        levels = checks.real_array("q", q)
        if levels.ndim > 1 or not np.all((levels >= 0) & (levels <= 1)):
            raise ValueError(f"`q` must hold numbers from 0 to 1, got {q!r}.")

        def reduce(x: np.ndarray) -> np.ndarray:
            there = np.isfinite(x).any(axis=0)
            out = np.full((*levels.shape, *there.shape), np.nan)
            out[..., there] = np.nanquantile(x[:, there], levels, axis=0)
            return out

        return jax.tree.map(reduce, self.values(name))

    def to_xarray(self) -> "xarray.Dataset":
        """All members as an `xarray.Dataset` over the dimensions `member`, `time`."""
        return ensemble_dataset(self)

    def save(self, path: str | os.PathLike) -> Path:
        """Write the ensemble to `path`, whole or not at all; see `Flow.save`."""
        run = contents(self._origins, self._records, self.ts, self._stored, self.stats)
        return file_format.write(path, run)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        loss: Callable[[PyTree], Any] | Sequence[Callable[[PyTree], Any]] | None = None,
        *,
        like: PyTree | None = None,
        solver: diffrax.AbstractSolver | None = None,
    ) -> "Ensemble":
        """Read an ensemble that `save` wrote. The arguments are those of `Flow.load`;
        `loss` may also be a list with one for each member."""
        return file_format.read(path, lambda run: cls(*parts(run, loss, like, solver)))

    def _origin(self, i: int) -> Origin:
        origins = self._origins
        problems = origins.problems
        return Origin(
            problem=problems[i if len(problems) > 1 else 0],
            start=jax.tree.map(lambda x: np.asarray(x[i]), origins.start),
            settings=origins.settings[i],
            solver=origins.solver,
        )

    def _outcome(self, i: int) -> Outcome:
        """A member's outcome as `integrate` would have it, without dense output."""
        records = self._records
        saved, t = int(records.saved[i]), float(records.ended[i])
        within = self._stored < saved
        rows: Snapshot = jax.tree.map(lambda x: x[i], records.rows)
        end: Snapshot = jax.tree.map(lambda x: x[i], records.end)
        account: EnergyAccount = jax.tree.map(lambda x: x[i], records.account)
        params = jax.tree.map(lambda x: x[within], rows.params)
        reached: Any = jax.tree.map(
            lambda x: x[:saved],
            (rows.loss, rows.speed, rows.observables, rows.drift, rows.size),
        )
        last = (end.loss, end.speed, end.observables, end.drift, end.size)
        ts, params_ts = self.ts[:saved], self.ts[self._stored[within]]
        if saved == 0 or ts[-1] < t:
            reached, ts = jax.tree.map(_append, reached, last), np.append(ts, t)
        if not within.any() or params_ts[-1] < t:
            params = jax.tree.map(_append, params, end.params)
            params_ts = np.append(params_ts, t)
        loss, speed, observables, drift, size = reached
        return Outcome(
            ts=ts,
            params_ts=params_ts,
            params=params,
            loss=loss,
            speed=speed,
            observables=observables,
            result=result_of_name(records.results[i]),
            stats=self._statistics(i),
            continuation=Continuation.of(
                account, Snapshot(params, loss, speed, observables, drift, size)
            ),
        )

    def _statistics(self, i: int) -> Statistics:
        records, size = self._records, len(self)
        return Statistics.of(
            {
                **self.stats,
                **{name: values[i] for name, values in records.counts.items()},
                "num_accepted_steps": int(records.accepted[i]),
                "num_rejected_steps": int(records.rejected[i]),
                "num_certificate_evaluations": EVALUATIONS_PER_PANEL
                * int(records.account.panels[i]),
                "compile_seconds": self.stats.compile_seconds / size,
                "run_seconds": self.stats.run_seconds / size,
                "reason": records.reasons[i],
            }
        )

    def _table(self) -> str:
        records, stats, failed = self._records, self.stats, self.failed
        lines = [
            f"Ensemble of {len(self)} flows to t = {self.ts[-1]:g}"
            + (f" ({len(failed)} failed, left out below)" if failed else ""),
            f"time             {stats.run_seconds:.2f} s, and "
            f"{stats.compile_seconds:.2f} s to compile",
        ]
        ended = np.array([i for i in range(len(self)) if i not in failed], int)
        if not ended.size:
            return "\n".join(lines)
        steps = (records.accepted + records.rejected)[ended]
        final = records.end.loss[ended]
        account = records.account
        imbalance = account.imbalance[ended].max()
        released = (account.initial_loss[ended] - final).min()
        low, middle, high = map(loss_text, np.quantile(final, [0.05, 0.5, 0.95]))
        lines += [
            f"loss             → {middle} ({low} … {high})",
            f"work             {steps.min():,} … {steps.max():,} steps",
            f"energy balance   |L(0) - L(t) - ∫‖∇L‖²| ≤ {imbalance:.1e} in all, of "
            f"{released:.4g} or more",
        ]
        drift = self._largest_drift(ended)
        if drift:
            worst = ", ".join(f"{k} {v:.1e}" for k, v in drift.items())
            lines.append(f"conserved drift  {worst} at most")
        return "\n".join(lines)

    def _largest_drift(self, members: Int[np.ndarray, " some"]) -> dict[str, float]:
        """The largest relative drift of each conserved quantity over some members."""
        rows, end = self._records.rows, self._records.end
        there = np.arange(len(self.ts)) < self._records.saved[:, None]
        found = {}
        for name in rows.drift:
            drift, size = (
                np.maximum(np.where(there, x, 0.0).max(axis=1), y)
                for x, y in (
                    (rows.drift[name], end.drift[name]),
                    (rows.size[name], end.size[name]),
                )
            )
            found[name] = float(max(map(relative_drift, drift[members], size[members])))
        return found

    def _summary(self) -> str:
        return f"{len(self)} flows to t = {self.ts[-1]:g}"


def _append(rows: np.ndarray, row: np.ndarray | np.generic) -> np.ndarray:
    return np.concatenate([rows, np.asarray(row)[None]])
