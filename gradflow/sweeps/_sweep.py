"""A task at every point of a grid, into a store."""

import contextlib
import dataclasses
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._core import checks
from .._core.checks import Checked
from .._core.progress import count_bar
from ..flows._flow import Flow
from . import _result
from ._grid import Grid, Point, Value, as_grid
from ._local import LocalWorkers, Outcome, SweepError
from ._ray import RayWorkers
from ._ship import name_of, ship
from ._store import Failure, Store, StoreError, open_store

if TYPE_CHECKING:
    import xarray

ENGINES = ("local", "ray")

LISTED = 10
"""Failures that the summary of a sweep lists."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweep did. `print(sweep)` shows a summary, `open` gives the results."""

    store: Path
    points: int
    """Points of the grid."""
    reused: int
    """Of these, how many had a result already."""
    computed: int
    failures: list[Failure]
    """The points that have no result, each with the reason and the traceback."""
    damaged: list[Path]
    """Files that did not hold what was once written, and were computed again."""

    def open(self) -> "xarray.Dataset":
        """All results in the store, as `open_store` gives them."""
        return open_store(self.store)

    def __str__(self) -> str:
        lines = [
            f"Sweep over {self.points:,} points into {self.store}",
            f"computed         {self.computed:,}",
            f"reused           {self.reused:,}",
            f"failed           {len(self.failures):,}",
            *(f"  {failure}" for failure in self.failures[:LISTED]),
        ]
        if len(self.failures) > LISTED:
            lines.append(f"  … and {len(self.failures) - LISTED:,} more")
        if self.damaged:
            lines.append(f"damaged          {len(self.damaged):,}, computed again")
            lines += [f"  {path}" for path in self.damaged]
        return "\n".join(lines)


def sweep(
    task: Checked[Callable[[Point], Flow | Mapping[str, Any]]],
    grid: Checked[Mapping[str, Sequence[Value]] | Sequence[Mapping[str, Value]]],
    *,
    store: Checked[str | os.PathLike],
    engine: Checked[str | LocalWorkers] = "local",
    workers: Checked[int | None] = None,
    cpus: Checked[float] = 1,
    gpus: Checked[float] = 0,
    runtime_env: Checked[dict[str, Any] | None] = None,
    retries: Checked[int] = 2,
    version: Checked[int] = 1,
    name: Checked[str | None] = None,
    progress: Checked[bool] = False,
) -> Sweep:
    """Compute `task` at every point of `grid` that has no result in `store` yet.

    Nothing computed is lost: each result is written whole as soon as it is there, and
    after Ctrl-C, a full disk or a killed machine the same call goes on where it
    stopped. Several sweeps may write to one store at once. Points are taken in random
    order, so that the time left is an honest estimate and two sweeps seldom meet.

    **Arguments:**

    - `task`: a function that takes a point, a dictionary of the names and values of
        `grid`, and returns a `Flow` or a mapping of numbers and arrays. Workers import
        it from its module; one of a notebook or a script is sent to them.
    - `grid`: a mapping of names to values, for their product; or a list of points, such
        as `gradflow.sweeps.random_points` draws. Values are numbers, truth values or
        text.
    - `store`: the folder of the results, new or of an earlier sweep of the same task.
        What is in it already is checked, and computed again if it is damaged.
    - `engine`: `local`, worker processes on this machine; `ray`, the same on a Ray
        cluster, the one that is there or a local one that is started; or a
        `gradflow.sweeps.LocalWorkers` that outlives this sweep.
    - `workers`: how many points are computed at once; by default as many as there are
        cores (of the cluster, with `ray`) for `cpus` each.
    - `cpus`, `gpus`: cores and graphics processors of each; the latter with `ray`.
    - `runtime_env`: what `ray` is to ship of code and environment, in its own terms.
    - `retries`: how often a point is tried again whose worker died. One that raises is
        not.
    - `version`: of the task. Raise it when the task changes: older results do not
        count any more, and older versions are refused.
    - `name`: of the task in the store, if not that of its module and its own.
    - `progress`: whether to show a progress bar, with the rate and the time left.
    """
    title = name_of(task, name)
    points_asked = as_grid(grid)
    path = _path(store)
    retries = checks.whole_number("retries", retries, least=0)
    version = checks.whole_number("version", version)
    pool = _pool(engine, workers, cpus, gpus, runtime_env)
    results = Store.for_sweep(path, title, version, points_asked)
    shipped = ship(task)

    points = {results.key(point): point for point in points_asked.points()}
    there = points.keys() & results.present().keys()
    wrong = {key: what for key in there if (what := results.check(key)) is not None}
    for sentence in wrong.values():
        warnings.warn(f"{sentence} It is computed again.", stacklevel=2)
    missing = [key for key in points if key in wrong or key not in there]
    tally = _Tally(results, reused=len(points) - len(missing))
    if missing:
        with pool as at_work:
            at_work.start(shipped, len(missing), retries)
            _create(results, points_asked, wrong)
            random.shuffle(missing)
            labels = tally.pending({key: points[key] for key in missing})
            with (
                contextlib.closing(at_work.run(shipped, labels, retries)) as outcomes,
                count_bar(len(missing), "sweep", progress) as report,
            ):
                tally.collect(outcomes, report)
    else:
        _create(results, points_asked, wrong)
    if tally.failures:
        warnings.warn(
            f"{len(tally.failures):,} of {len(points):,} points failed; the first: "
            f"{tally.failures[0]}",
            stacklevel=2,
        )
    return Sweep(
        path,
        points=len(points),
        reused=tally.reused,
        computed=tally.computed,
        failures=tally.failures,
        damaged=[results.file(key) for key in wrong],
    )


class _Tally:
    """Results on their way into the store, and their number."""

    def __init__(self, store: Store, reused: int):
        self.store = store
        self.reused = reused
        self.computed = 0
        self.failures: list[Failure] = []

    def pending(self, points: dict[str, Point]) -> Iterator[dict[str, Any]]:
        """What is to be computed, unless another sweep did so in the meantime."""
        for key, point in points.items():
            if self.store.file(key).exists():
                self.reused += 1
            else:
                yield self.store.label(point)

    def collect(
        self, outcomes: Iterator[Outcome], report: Callable[[int, str], None]
    ) -> None:
        """Store every outcome. A store that cannot be written ends the sweep."""
        already = self.reused
        for outcome in outcomes:
            try:
                self._keep(outcome)
            except OSError as error:
                raise SweepError(
                    f"the store '{self.store.path}' could not be written: "
                    f"{error.strerror}. It holds the {self.computed:,} results "
                    "computed until then; the same call goes on from there."
                ) from error
            failed = len(self.failures)
            report(
                self.computed + failed + self.reused - already,
                f"{failed:,} failed" if failed else "",
            )

    def _keep(self, outcome: Outcome) -> None:
        if outcome.kind == "failed":
            failure = Failure(outcome.point, *outcome.content)
            self.failures.append(failure)
            self.store.write_failure(failure)
            return
        if outcome.kind == "encoded":
            encoded = _result.Encoded(*outcome.content)
        else:
            encoded = _result.encode(outcome.content, self.store.label(outcome.point))
        self.store.write(outcome.point, encoded)
        self.computed += 1


def _create(store: Store, grid: Grid, damaged: Iterable[str]) -> None:
    try:
        store.create(grid)
        for key in damaged:  # else it would pass for the result of another sweep
            store.file(key).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"`store` must be a folder that can be written to, got '{store.path}': "
            f"{error.strerror}."
        ) from error


def _pool(
    engine: Any, workers: Any, cpus: Any, gpus: Any, runtime_env: Any
) -> contextlib.AbstractContextManager[LocalWorkers | RayWorkers]:
    """The workers of an engine, to be entered."""
    if engine == "ray":
        return RayWorkers(workers, cpus=cpus, gpus=gpus, runtime_env=runtime_env)
    for name, value, default in (("gpus", gpus, 0), ("runtime_env", runtime_env, None)):
        if value != default:
            raise ValueError(
                f"`{name}` must be left out unless `engine` is 'ray', got {value!r}."
            )
    if isinstance(engine, LocalWorkers):
        if workers is not None or cpus != 1:
            raise ValueError(
                "`workers` and `cpus` must be left out where `engine` brings its own, "
                f"got {workers!r} and {cpus!r}."
            )
        return contextlib.nullcontext(engine)
    if engine != "local":
        raise ValueError(
            f"`engine` must be {' or '.join(map(repr, ENGINES))} or a LocalWorkers, "
            f"got {engine!r}."
        )
    return LocalWorkers(workers, cpus=cpus)


def _path(store: Any) -> Path:
    if not isinstance(store, str | os.PathLike):
        raise ValueError(f"`store` must be a path, got {type(store).__name__}.")
    return Path(os.fspath(store))
