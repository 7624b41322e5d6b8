"""`sweep`: compute a task at every point of a grid and keep the results in a store."""

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
from ..flows import Flow, Training
from . import _result
from ._grid import Grid, Point, Value, as_grid
from ._local import LocalWorkers, Outcome, SweepError
from ._open import checked_path, open_store
from ._ray import RayWorkers
from ._ship import name_of, ship
from ._store import Failure, Store, StoreError
from ._worker import Label

if TYPE_CHECKING:
    import xarray

ENGINES = ("local", "ray")

LISTED = 10
"""The number of failures that a printed sweep lists."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The outcome of a sweep. `print(sweep)` shows a table, `sweep.open()` returns all
    results."""

    store: Path
    """The folder of the store."""
    points: int
    """The number of points in the grid."""
    reused: int
    """The number of points that had a result already."""
    computed: int
    """The number of points that this sweep computed."""
    failures: list[Failure]
    """The points that failed, each with the reason and the traceback."""
    damaged: list[Path]
    """Damaged files that were found in the store and computed again."""

    def open(self) -> "xarray.Dataset":
        """All results in the store, as a dataset: see `open_store`."""
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

    def __repr__(self) -> str:
        return (
            f"Sweep({self.points:,} points: {self.computed:,} computed, "
            f"{self.reused:,} reused, {len(self.failures):,} failed)"
        )


def sweep(
    task: Checked[Callable[[Point], Flow | Training | Mapping[str, Any]]],
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

    Each result is written, whole, as soon as it is computed. After Ctrl-C, a full disk
    or a crash of the machine the same call continues where the sweep stopped. Several
    sweeps may write to one store at the same time. Points are computed in random order,
    which makes the estimate of the remaining time honest and lets concurrent sweeps
    seldom meet at a point.

    **Arguments:**

    - `task`: a function from a point, a dictionary with the names and values of `grid`,
        to a `Flow`, a `Training` or a mapping of numbers and arrays. Workers import it
        from its module; a task defined in a notebook or a script is sent to them.
    - `grid`: a mapping from names to lists of values, whose product is computed, or a
        list of points, such as those of `gradflow.sweeps.random_points`. Values are
        numbers, booleans or strings.
    - `store`: the folder of the results, new or from an earlier sweep of the same task.
        Results in it are checked, and computed again if they are damaged.
    - `engine`: `"local"` for worker processes on this machine; `"ray"` for a Ray
        cluster, which is started on this machine if none is running; or a
        `gradflow.sweeps.LocalWorkers`, which outlives this sweep.
    - `workers`: the number of points computed at once; by default as many as there are
        cores, of this machine or of the cluster, for `cpus` each.
    - `cpus`, `gpus`: the number of cores and of graphics processors for each worker;
        `gpus` needs `ray`.
    - `runtime_env`: Ray's runtime environment, the code and packages to ship; needs
        `ray`.
    - `retries`: how often a point is tried again if its worker dies. A point whose task
        raises is not tried again.
    - `version`: the version of the task. Raise it when the task changes: results of
        older versions no longer count, and older versions are refused.
    - `name`: the name of the task in the store; by default module and function name.
    - `progress`: whether to show a progress bar, with the rate and the time left.

    **Returns:**

    A `Sweep`: how many points were computed, reused and failed. A point that fails does
    not end the sweep.
    """
    title = name_of(task, name)
    points_asked = as_grid(grid)
    path = checked_path("store", store)
    retries = checks.whole_number("retries", retries, least=0)
    version = checks.whole_number("version", version)
    pool = _pool(engine, workers, cpus, gpus, runtime_env)
    results = Store.for_sweep(path, title, version, points_asked)
    shipped = ship(task)

    points = {results.key(point): point for point in points_asked.points()}
    there = points.keys() & results.present().keys()
    wrong = {key: what for key in there if (what := results.check(key)) is not None}
    for sentence in wrong.values():
        warnings.warn(f"{sentence} It will be computed again.", stacklevel=2)
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
    """Stores the outcomes of a sweep and counts them."""

    def __init__(self, store: Store, reused: int):
        self.store = store
        self.reused = reused
        self.computed = 0
        self.failures: list[Failure] = []

    def pending(self, points: dict[str, Point]) -> Iterator[Label]:
        """The labels of `points`, except those that another sweep has computed
        meanwhile."""
        for key, point in points.items():
            if self.store.file(key).exists():
                self.reused += 1
            else:
                yield self.store.label(point)

    def collect(
        self, outcomes: Iterator[Outcome], report: Callable[[int, str], None]
    ) -> None:
        """Store every outcome. An error in writing to the store ends the sweep."""
        already = self.reused
        for outcome in outcomes:
            try:
                self._keep(outcome)
            except OSError as error:
                raise SweepError(
                    f"the store '{self.store.path}' could not be written: "
                    f"{error.strerror}. The {self.computed:,} results computed before "
                    "that are in it; the same call continues from there."
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
        for key in damaged:  # or it would count as computed meanwhile by another sweep
            store.file(key).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"`store` must be a writable folder, got '{store.path}': {error.strerror}."
        ) from error


def _pool(
    engine: object,
    workers: Checked[int | None],
    cpus: Any,  # a whole number for local workers, any for Ray
    gpus: Checked[float],
    runtime_env: Checked[dict[str, Any] | None],
) -> contextlib.AbstractContextManager[LocalWorkers | RayWorkers]:
    """The workers of an engine, as a context manager."""
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
                "`workers` and `cpus` must be left out if `engine` is a LocalWorkers, "
                f"got {workers!r} and {cpus!r}."
            )
        return contextlib.nullcontext(engine)
    if engine != "local":
        raise ValueError(
            f"`engine` must be {' or '.join(map(repr, ENGINES))} or a LocalWorkers, "
            f"got {engine!r}."
        )
    return LocalWorkers(workers, cpus=cpus)
