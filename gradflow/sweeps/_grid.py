"""The points of a sweep: products of axes, lists of points."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Value = bool | int | float | str
"""A coordinate of a point."""

Point = dict[str, Value]

KINDS = {bool: "truth value", int: "number", float: "number", str: "text"}
"""The kinds of coordinates, as stores on disk spell them."""

POINT = "point"
"""The dimension of a dataset over a list of points."""

COMPUTED = "computed"
"""The variable of a dataset that is true at points with a result."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """An ordered set of points over the same names: a product of axes or a list."""

    names: tuple[str, ...]
    axes: dict[str, list[Value]] | None
    """The values of each name, if the grid is a product."""
    listed: list[Point] | None
    """The points, if the grid is a list."""

    def points(self) -> Iterator[Point]:
        if self.axes is None:
            yield from self.listed or ()
            return
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.names, values, strict=True))

    def __len__(self) -> int:
        if self.axes is None:
            return len(self.listed or ())
        return math.prod(map(len, self.axes.values()))

    def kinds(self) -> dict[str, str]:
        """The kind of each coordinate, sorted by name."""
        first = next(self.points())
        return {name: KINDS[type(first[name])] for name in sorted(self.names)}

    def to_json(self) -> dict[str, Any]:
        if self.axes is not None:
            return {"axes": self.axes}
        rows = [[point[name] for name in self.names] for point in self.listed or ()]
        return {"names": self.names, "points": rows}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Grid":
        if "axes" in stored:
            return cls(tuple(stored["axes"]), stored["axes"], None)
        names = tuple(stored["names"])
        rows = stored["points"]
        return cls(names, None, [dict(zip(names, row, strict=True)) for row in rows])

    def __str__(self) -> str:
        if self.axes is None:
            return f"{len(self):,} points of {', '.join(self.names)}"
        sizes = (f"{len(values)} {name}" for name, values in self.axes.items())
        return f"{' × '.join(sizes)} = {len(self):,} points"


def as_grid(grid: object) -> Grid:
    """A user's `grid`, checked."""
    if isinstance(grid, Mapping):
        return _product(grid)
    if isinstance(grid, str | bytes) or not isinstance(grid, Iterable):
        raise ValueError(
            "`grid` must map names to values or be a list of points, got "
            f"{type(grid).__name__}."
        )
    return _listed(list(grid))


def _product(grid: Mapping) -> Grid:
    if not grid:
        raise ValueError("`grid` must have at least one point, got no names.")
    axes: dict[str, list[Value]] = {}
    for name, values in grid.items():
        _check_name(name)
        where = f"grid[{name!r}]"
        axes[name] = _axis(where, _values(where, values))
        if not axes[name]:
            raise ValueError(f"`{where}` must have at least one value, got none.")
        seen = {_canonical(value) for value in axes[name]}
        if len(seen) < len(axes[name]):
            twice = next(v for v in axes[name] if axes[name].count(v) > 1)
            raise ValueError(f"`{where}` must not repeat a value, got {twice!r} twice.")
    return Grid(tuple(axes), axes, None)


def _values(where: str, values: object) -> Sequence[Any]:
    """The values of an axis; a single value makes an axis of one."""
    if isinstance(values, str | bool | int | float | np.generic):
        return [values]
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        if array.ndim > 1:
            raise ValueError(
                f"`{where}` must be a one-dimensional list of values, got shape "
                f"{array.shape}."
            )
        return list(np.atleast_1d(array))
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise ValueError(
            f"`{where}` must be a list of values, got {type(values).__name__}."
        )
    return list(values)


def _listed(rows: list[Any]) -> Grid:
    if not rows:
        raise ValueError("`grid` must have at least one point, got an empty list.")
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(
                f"`grid[{i}]` must be a mapping of names to values, got "
                f"{type(row).__name__}."
            )
    names = tuple(rows[0])
    if not names:
        raise ValueError("`grid[0]` must name at least one coordinate, got none.")
    for name in names:
        _check_name(name)
    for i, row in enumerate(rows):
        if set(row) != set(names):
            raise ValueError(
                f"`grid[{i}]` must have the names of the first point, "
                f"{', '.join(names)}, got {', '.join(map(str, row)) or 'none'}."
            )
    columns = [_axis(f"grid[…][{n!r}]", [row[n] for row in rows]) for n in names]
    points = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    # Random draws may repeat a point, which is computed once.
    return Grid(names, None, list({_text(point): point for point in points}.values()))


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"`grid` must have non-empty strings as names, got {name!r}.")
    taken = {
        POINT: "the dimension of a list of points",
        COMPUTED: "the variable that marks points with a result",
    }
    if name in taken:
        raise ValueError(
            f"`grid` must not use the name {name!r}, which is reserved for "
            f"{taken[name]}."
        )


def _axis(where: str, values: Sequence[Any]) -> list[Value]:
    """The values of one axis, which are all of one kind."""
    plain = [_plain(where, value) for value in values]
    kinds = {type(value) for value in plain}
    if kinds == {int, float}:
        return [float(value) for value in plain]
    if len(kinds) > 1:
        found = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"`{where}` must be only numbers, only booleans or only strings, got "
            f"{found}."
        )
    return plain


def _plain(where: str, value: object) -> Value:
    if hasattr(value, "__array__") and np.asarray(value).ndim == 0:
        value = np.asarray(value).item()
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"`{where}` must not be NaN, got {value!r}.")
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            if kind is int and not -(2**63) <= value < 2**63:
                raise ValueError(f"`{where}` must fit into 64 bits, got {value}.")
            return kind(value)
    raise ValueError(
        f"`{where}` must be numbers, booleans or strings, got {type(value).__name__} "
        "(to vary a vector, use a name or an index that `task` looks up)."
    )


def _canonical(value: Value) -> Value:
    """One value for equal coordinates: 1.0 is 1 and -0.0 is 0, but True is not 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _text(point: Mapping[str, Value]) -> str:
    return json.dumps({name: _canonical(point[name]) for name in sorted(point)})


def key_of(task: str, version: int, point: Mapping[str, Value]) -> str:
    """The key of a result in a store: a hash of task, version and point."""
    return hashlib.sha256(f"{task}\n{version}\n{_text(point)}".encode()).hexdigest()[
        :32
    ]


def merge(grids: Sequence[Grid]) -> Grid:
    """One grid with all points of several grids over the same names. Products become
    one product, which may have further points."""
    names = grids[0].names
    if all(grid.axes is not None for grid in grids):
        axes: dict[str, list[Value]] = {}
        for name in names:
            parts = [grid.axes[name] for grid in grids if grid.axes is not None]
            axes[name] = _merged_axis(parts)
        return Grid(names, axes, None)
    points = {_text(p): p for grid in reversed(grids) for p in grid.points()}
    order = dict.fromkeys(_text(p) for grid in grids for p in grid.points())
    return Grid(names, None, [points[text] for text in order])


def _merged_axis(parts: list[list[Value]]) -> list[Value]:
    union = {_canonical(v): v for part in reversed(parts) for v in part}
    merged: list[Value] = [
        union[c] for c in dict.fromkeys(_canonical(v) for p in parts for v in p)
    ]
    if {type(value) for value in merged} == {int, float}:
        merged = [float(value) for value in merged]
    numbers = all(type(value) in (int, float) for value in merged)
    rising = all(list(part) == sorted(part) for part in parts) if numbers else False
    return sorted(merged) if rising else merged
