"""The state of a store: how much of it is there, what failed, what is damaged."""

import dataclasses
import os
from pathlib import Path

from .._core.checks import Checked
from ._grid import Grid
from ._open import checked_path
from ._store import Failure, Store


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of a store. `print(status)` shows a table."""

    path: Path
    task: str
    """The name of the task."""
    version: int
    """The version of the task."""
    grid: Grid
    """The points of all sweeps into this store."""
    points: int
    """The number of points that a sweep asked for."""
    results: int
    """The number of these points that have a result."""
    failures: list[Failure]
    """The points that failed and have no result."""
    older: int
    """The number of results of earlier versions of the task."""
    damaged: list[str] | None
    """A sentence for each damaged result; None if results were not checked."""

    @property
    def is_complete(self) -> bool:
        """Whether every point has a result and none was found to be damaged."""
        return self.results == self.points and not self.damaged

    def table(self, *, tracebacks: bool = False) -> str:
        """The state as a table, on request with the tracebacks of failures."""
        lines = [
            f"store            {self.path}",
            f"task             {self.task}, version {self.version}",
            f"grid             {self.grid}",
            f"results          {self.results:,} of {self.points:,} "
            f"({self.results / self.points:.0%})",
            f"failed           {len(self.failures):,}",
        ]
        for failure in self.failures:
            lines.append(f"  {failure}")
            if tracebacks:
                lines += [f"    {line}" for line in failure.traceback.splitlines()]
        if self.older:
            lines.append(f"older versions   {self.older:,} results")
        if self.damaged is not None:
            lines.append(f"damaged          {len(self.damaged):,}")
            lines += [f"  {sentence}" for sentence in self.damaged]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return (
            f"Status({self.results:,} of {self.points:,} results, "
            f"{len(self.failures):,} failed)"
        )


def status(path: Checked[str | os.PathLike], *, check: Checked[bool] = False) -> Status:
    """The state of the store at `path`: how many points have a result, which failed.

    **Arguments:**

    - `path`: the folder of the store.
    - `check`: whether to read every result and report damaged ones.
    """
    store = Store.at(checked_path("path", path))
    # Not all points of `grid`: the product that holds several grids may have corners
    # that no sweep asked for.
    wanted = {store.key(point) for asked in store.grids() for point in asked.points()}
    there = store.present().keys()
    damaged = None
    if check:
        damaged = [what for key in sorted(there & wanted) if (what := store.check(key))]
    return Status(
        store.path,
        store.task,
        store.version,
        store.grid(),
        points=len(wanted),
        results=len(wanted & there),
        failures=store.failures(),
        older=len(there - wanted),
        damaged=damaged,
    )
