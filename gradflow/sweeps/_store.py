"""Results on disk, one file a point.

    store.json          what the results are of: task, version, coordinates
    grids/….json        each grid that was ever asked for
    results/….npz       each result, named by a hash of task, version and point
    failures/….json     each point that failed and has no result yet, with its traceback
    index.jsonl         a cache: what a dataset needs to know of each result

Every file but the index is written whole or not at all. Where a result lies follows
from its point, so nothing else says which are there; the index only saves reading them.
A line of it counts if its checksum is right and the file is still the one that it was
written for, by size and time; a result without such a line is read.
"""

import contextlib
import dataclasses
import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._core.checks import Checked
from .._core.storage import RunFileError, write_whole
from ..flows._flow import Flow
from . import _result
from ._grid import Grid, Point, Value, as_grid, key_of, merge

if TYPE_CHECKING:
    import xarray

FORMAT = "gradflow-store"
FORMAT_VERSION = 1

STALE_SECONDS = 3600.0
"""A temporary file of this age was left behind by a process that was killed."""


class StoreError(ValueError):
    """A store that is missing, of another task or of a newer version."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A point without a result, and why."""

    point: Point
    reason: str
    """In one line."""
    traceback: str

    def __str__(self) -> str:
        where = ", ".join(f"{name} = {value!r}" for name, value in self.point.items())
        return f"{where}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Store:
    """A folder of results of one task."""

    path: Path
    task: str
    version: int
    kinds: dict[str, str]
    """Of each coordinate: number, truth value or text."""

    #
    # Coming by one
    #

    @classmethod
    def at(cls, path: str | os.PathLike) -> "Store":
        """The store at `path`."""
        path = Path(path)
        store = cls._read(path)
        if store is None:
            raise StoreError(f"no store at '{path}'.")
        return store

    @classmethod
    def _read(cls, path: Path) -> "Store | None":
        try:
            stored = json.loads((path / "store.json").read_text())
            found = (stored["format"], int(stored["version"]))
            parts = (stored["task"], stored["task_version"], stored["coordinates"])
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise StoreError(f"'{path}' is a file, not a store.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"'{path / 'store.json'}' is damaged.") from error
        if found[0] != FORMAT or found[1] > FORMAT_VERSION:
            raise StoreError(
                f"the store '{path}' has the format {found[0]!r} version {found[1]!r}, "
                f"written by a newer gradflow; this one reads {FORMAT!r} up to version "
                f"{FORMAT_VERSION}."
            )
        return cls(path, *parts)

    @classmethod
    def for_sweep(
        cls, path: str | os.PathLike, task: str, version: int, grid: Grid
    ) -> "Store":
        """The store at `path` if it may take results of `task` on `grid`; if there is
        none, as it would be. Nothing is written."""
        path = Path(path)
        wanted = cls(path, task, version, grid.kinds())
        there = cls._read(path)
        if there is None:
            if path.is_dir() and next(path.iterdir(), None) is not None:
                raise StoreError(
                    f"`store` must be a store or a new folder, got '{path}', which "
                    "holds other files."
                )
            return wanted
        if there.task != task:
            raise StoreError(
                f"the store '{path}' holds results of the task '{there.task}', got "
                f"'{task}'."
            )
        if there.version > version:
            raise StoreError(
                f"the store '{path}' holds results of version {there.version} of its "
                f"task, got the older version {version}."
            )
        if there.kinds != wanted.kinds:
            raise StoreError(
                f"the store '{path}' holds points over {_listing(there.kinds)}, got "
                f"{_listing(wanted.kinds)}."
            )
        return wanted

    def create(self, grid: Grid) -> None:
        """Make the folder what it is to be, and note that `grid` was asked for."""
        for folder in ("results", "grids", "failures"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        self._remove_stale()
        description = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "task": self.task,
            "task_version": self.version,
            "coordinates": self.kinds,
        }
        there = self._read(self.path)
        if there is None or there.version < self.version:
            _write_json(self.path / "store.json", description)
        stored = grid.to_json()
        name = f"{zlib.crc32(json.dumps(stored).encode()):08x}-{len(grid)}"
        if not (self.path / "grids" / f"{name}.json").exists():
            stored["asked"] = time.time()
            _write_json(self.path / "grids" / f"{name}.json", stored)

    def _remove_stale(self) -> None:
        now = time.time()
        for folder in (self.path, self.path / "results"):
            for path in folder.glob(".*.*"):
                try:
                    if now - path.stat().st_mtime > STALE_SECONDS:
                        path.unlink()
                except FileNotFoundError:  # another sweep finished or removed it
                    continue

    #
    # Results
    #

    def key(self, point: Mapping[str, Value]) -> str:
        return key_of(self.task, self.version, point)

    def file(self, key: str) -> Path:
        return self.path / "results" / f"{key}.npz"

    def label(self, point: Point) -> dict[str, Any]:
        """What a result says of itself."""
        return {"task": self.task, "version": self.version, "point": point}

    def present(self) -> dict[str, os.stat_result]:
        """The files there are, by key; nothing is read."""
        found: dict[str, os.stat_result] = {}
        try:
            with os.scandir(self.path / "results") as entries:
                for entry in entries:
                    if not entry.name.startswith("."):
                        found[entry.name.removesuffix(".npz")] = entry.stat()
        except FileNotFoundError:
            pass
        return found

    def check(self, key: str) -> str | None:
        """Read the result and say what is wrong with it."""
        try:
            _result.read(self.file(key))
        except RunFileError as error:
            return str(error)
        return None

    def write(self, point: Point, encoded: _result.Encoded) -> None:
        """Store a result, then tell the index; a lost line costs a read, no more."""
        key = self.key(point)
        state = write_whole(self.file(key), lambda file: file.write(encoded.data))
        self._append([_line(key, state, encoded.summary)])
        (self.path / "failures" / f"{key}.json").unlink(missing_ok=True)

    def write_failure(self, failure: Failure) -> None:
        path = self.path / "failures" / f"{self.key(failure.point)}.json"
        _write_json(path, dataclasses.asdict(failure))

    def failures(self) -> list[Failure]:
        """Of the points of the grids that have no result."""
        there = self.present()
        found = []
        for path in sorted((self.path / "failures").glob("*.json")):
            try:
                failure = Failure(**json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):  # removed, or damaged: no matter
                continue
            key = self.key(failure.point)
            if key == path.stem and key not in there:
                found.append(failure)
        return found

    def grids(self) -> list[Grid]:
        """All grids that were asked for, the oldest first."""
        found = []
        for path in (self.path / "grids").glob("*.json"):
            try:
                stored = json.loads(path.read_text())
                found.append((stored["asked"], path.name, Grid.from_json(stored)))
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(
                    f"'{path}' is damaged; delete it and run its sweep again."
                ) from error
        return [grid for *_, grid in sorted(found, key=lambda item: item[:2])]

    def grid(self) -> Grid:
        """All points that were ever asked for."""
        grids = self.grids()
        if not grids:
            raise StoreError(f"the store '{self.path}' holds no grid yet.")
        return merge(grids)

    #
    # The index
    #

    def summaries(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Of each of these results that is there and sound, its summary."""
        there, indexed, late = self.present(), dict(self._index()), []
        found: dict[str, dict[str, Any]] = {}
        for key in keys:
            state = there.get(key)
            if state is None:
                continue
            entry = indexed.get(key)
            if entry is not None and entry["file"] == _signature(state):
                found[key] = entry["summary"]
                continue
            try:
                found[key] = _result.summary(self.file(key))
            except RunFileError as error:
                warnings.warn(
                    f"{error} It counts as missing; the sweep computes it again.",
                    stacklevel=2,
                )
                continue
            late.append(_line(key, state, found[key]))
        if late:
            with contextlib.suppress(OSError):  # a store to read only is as good
                self._append(late)
        return found

    def _index(self) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            lines = (self.path / "index.jsonl").read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        parts = (line.partition(b" ") for line in lines)
        sound = [text for checksum, _, text in parts if checksum == _checksum(text)]
        # Together, which is faster than one by one.
        for entry in json.loads(b"[" + b",".join(sound) + b"]"):
            yield entry["key"], entry

    def _append(self, lines: list[bytes]) -> None:
        # In one write, so that two sweeps do not mix their lines, and with a line end
        # before as well, as a killed sweep may have left half a line.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        handle = os.open(self.path / "index.jsonl", flags, 0o666)
        try:
            os.write(handle, b"\n" + b"\n".join(lines) + b"\n")
        finally:
            os.close(handle)


def _listing(kinds: dict[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content).encode()
    write_whole(path, lambda file: file.write(text))


def _line(key: str, state: os.stat_result, summary: dict[str, Any]) -> bytes:
    entry = {"key": key, "file": _signature(state), "summary": summary}
    text = json.dumps(entry, separators=(",", ":")).encode()
    return _checksum(text) + b" " + text


def _signature(state: os.stat_result) -> list[int]:
    return [state.st_size, state.st_mtime_ns]


def _checksum(text: bytes) -> bytes:
    return f"{zlib.crc32(text):08x}".encode()


#
# For users
#


def open_store(path: Checked[str | os.PathLike]) -> "xarray.Dataset":
    """The results of a sweep as an `xarray.Dataset` with the grid as coordinates.

    A grid that is a product gives one dimension a name, any other one dimension
    `point`. Numbers are at hand at once; arrays are read, and checked, when they are
    used, so that a store of any size opens quickly. What has no result is NaN, and
    `computed` is false there. Arrays that differ in size from point to point are padded
    with NaN. Of a flow there are `ts`, `loss`, `speed` and the observables over `time`;
    `final_loss`, `final_time` and `successful`; and of its certificate, with its
    `rtol`, `energy_imbalance`, `energy_released` and `largest_drift`. `load_result`
    gives the flow itself. What has a name that the grid has is `result.…`.

    `dataset.to_netcdf(path)` and `dataset.to_zarr(path)` export it: NetCDF 3 needs
    nothing else, NetCDF 4 and Zarr what `pip install gradflow[export]` brings.
    """
    store = Store.at(_checked_path("path", path))
    from ._dataset import open_dataset  # brings xarray

    return open_dataset(store)


def load_result(
    path: Checked[str | os.PathLike],
    point: Checked[Mapping[str, Value]],
    loss: Callable | None = None,
    *,
    like: Any = None,
    solver: Any = None,
) -> Flow | dict[str, Any]:
    """The result at one point of the store at `path`, as the task returned it: a `Flow`
    or a dictionary of numbers and arrays. `loss`, `like` and `solver` are for a flow of
    a user's own, as for `Flow.load`."""
    store = Store.at(_checked_path("path", path))
    if not isinstance(point, Mapping):
        raise ValueError(
            f"`point` must map names to values, got {type(point).__name__}."
        )
    (wanted,) = as_grid([point]).points()
    if set(wanted) != set(store.kinds):
        raise ValueError(
            f"`point` must have the coordinates {', '.join(store.kinds)}, got "
            f"{', '.join(wanted)}."
        )
    file = store.file(store.key(wanted))
    if not file.exists():
        raise StoreError(f"the store '{store.path}' has no result at {wanted}.")
    _, result = _result.decode(file, loss=loss, like=like, solver=solver)
    return result


def _checked_path(name: str, path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"`{name}` must be a path, got {type(path).__name__}.")
    return Path(os.fspath(path))
