"""Results on disk, one file per point.

    store.json          the task, its version and its coordinates
    grids/….json        each grid that a sweep asked for
    results/….npz       each result, named by a hash of task, version and point
    failures/….json     each point that failed and has no result yet, with its traceback
    index.jsonl         a cache of the summaries of results

Every file but the index is written whole or not at all. The name of a result follows
from its point, so the files themselves say which results exist; the index only saves
reading them. A line of the index is valid if its checksum is right and the result's
file still has the size and time that the line states; results without a valid line are
read.
"""

import contextlib
import dataclasses
import json
import os
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .._core.file_format import RunFileError, write_whole
from . import _result
from ._grid import Grid, Point, Value, key_of, merge
from ._worker import Label

FORMAT = "gradflow-store"
FORMAT_VERSION = 1

STALE_SECONDS = 3600.0
"""A temporary file older than this was left behind by a killed process."""


class StoreError(ValueError):
    """A store is missing, belongs to another task or has a newer version."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A point without a result, and the reason."""

    point: Point
    reason: str
    """The error, in one line."""
    traceback: str

    def __str__(self) -> str:
        where = ", ".join(f"{name} = {value!r}" for name, value in self.point.items())
        return f"{where}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Store:
    """A folder with the results of one task."""

    path: Path
    task: str
    version: int
    kinds: dict[str, str]
    """The kind of each coordinate, one of `KINDS`."""

    #
    # Opening and creating
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
        """The store at `path`, existing or new, for results of `task` on `grid`. A
        store of another task is refused. Nothing is written."""
        path = Path(path)
        wanted = cls(path, task, version, grid.kinds())
        there = cls._read(path)
        if there is None:
            if path.is_dir() and next(path.iterdir(), None) is not None:
                raise StoreError(
                    f"`store` must be a store or a new folder, got '{path}', which "
                    "has other files in it."
                )
            return wanted
        if there.task != task:
            raise StoreError(
                f"the store '{path}' has results of the task '{there.task}', got "
                f"'{task}': choose another `store`."
            )
        if there.version > version:
            raise StoreError(
                f"the store '{path}' has results of version {there.version} of its "
                f"task, got the older version {version}."
            )
        if there.kinds != wanted.kinds:
            raise StoreError(
                f"the store '{path}' has points over {_listing(there.kinds)}, got "
                f"{_listing(wanted.kinds)}."
            )
        return wanted

    def create(self, grid: Grid) -> None:
        """Create the folder, if it is new, and record `grid`."""
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
        """The key of the result at `point`, from which its file name is made."""
        return key_of(self.task, self.version, point)

    def file(self, key: str) -> Path:
        """The path of a result, whether it exists or not."""
        return self.path / "results" / f"{key}.npz"

    def label(self, point: Point) -> Label:
        """The label that a result carries."""
        return {"task": self.task, "version": self.version, "point": point}

    def present(self) -> dict[str, os.stat_result]:
        """The status of each existing result, by key. No file is read."""
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
        """Read a result and return a sentence if it is damaged."""
        try:
            _result.read(self.file(key))
        except RunFileError as error:
            return str(error)
        return None

    def write(self, point: Point, encoded: _result.Encoded) -> None:
        """Store a result, then add it to the index. If a crash in between loses the
        line, the result is read instead."""
        key = self.key(point)
        state = write_whole(self.file(key), lambda file: file.write(encoded.data))
        self._append([_line(key, state, encoded.summary)])
        (self.path / "failures" / f"{key}.json").unlink(missing_ok=True)

    def write_failure(self, failure: Failure) -> None:
        """Record a point that failed."""
        path = self.path / "failures" / f"{self.key(failure.point)}.json"
        _write_json(path, dataclasses.asdict(failure))

    def failures(self) -> list[Failure]:
        """The recorded failures of points that have no result."""
        there = self.present()
        found = []
        for path in sorted((self.path / "failures").glob("*.json")):
            try:
                failure = Failure(**json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):  # removed meanwhile, or damaged
                continue
            key = self.key(failure.point)
            if key == path.stem and key not in there:
                found.append(failure)
        return found

    def grids(self) -> list[Grid]:
        """All grids that sweeps asked for, oldest first."""
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
        """One grid with all points that sweeps asked for."""
        grids = self.grids()
        if not grids:
            raise StoreError(f"the store '{self.path}' has no grid yet.")
        return merge(grids)

    #
    # The index
    #

    def summaries(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The summaries of those results among `keys` that exist and are undamaged."""
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
                    f"{error} It counts as missing: repeat the sweep to recompute it.",
                    stacklevel=2,
                )
                continue
            late.append(_line(key, state, found[key]))
        if late:
            with contextlib.suppress(OSError):  # a read-only store works without
                self._append(late)
        return found

    def _index(self) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            lines = (self.path / "index.jsonl").read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        parts = (line.partition(b" ") for line in lines)
        sound = [text for checksum, _, text in parts if checksum == _checksum(text)]
        # All lines in one call, which is faster than one by one.
        for entry in json.loads(b"[" + b",".join(sound) + b"]"):
            yield entry["key"], entry

    def _append(self, lines: list[bytes]) -> None:
        # One write, so that the lines of two sweeps do not mix. It starts with a line
        # end because a killed sweep may have left half a line.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        handle = os.open(self.path / "index.jsonl", flags, 0o666)
        try:
            os.write(handle, b"\n" + b"\n".join(lines) + b"\n")
        finally:
            os.close(handle)


_WORDS = {"truth value": "boolean", "text": "string"}


def _listing(kinds: dict[str, str]) -> str:
    return ", ".join(f"{n} ({_WORDS.get(kind, kind)})" for n, kind in kinds.items())


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
