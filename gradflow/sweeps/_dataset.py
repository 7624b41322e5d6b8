"""A store as an xarray dataset whose arrays are read on first use."""

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import xarray
from xarray.backends import BackendArray, BackendEntrypoint
from xarray.core import indexing

from . import _result
from ._grid import COMPUTED, POINT
from ._store import Store

TIME = "time"


def open_dataset(store: Store) -> xarray.Dataset:
    """The dataset of `store`. xarray keeps arrays in memory once they were read."""
    return xarray.open_dataset(str(store.path), engine=_Backend)


class _Backend(BackendEntrypoint):
    """The xarray backend that opens a store."""

    description = "Stores of gradflow.sweep"

    def open_dataset(
        self, filename_or_obj: Any, *, drop_variables: Any = None
    ) -> xarray.Dataset:
        dataset = _dataset(Store.at(Path(filename_or_obj)))
        return dataset.drop_vars(drop_variables or ())


def _dataset(store: Store) -> xarray.Dataset:
    grid = store.grid()
    points = list(grid.points())
    keys = [store.key(point) for point in points]
    summaries = store.summaries(keys)
    if grid.axes is None:
        dims, shape = (POINT,), (len(points),)
        coords: dict[str, Any] = {
            name: (POINT, np.array([point[name] for point in points]))
            for name in grid.names
        }
    else:
        dims = grid.names
        shape = tuple(len(values) for values in grid.axes.values())
        coords = {name: np.array(values) for name, values in grid.axes.items()}
    found = np.array([key if key in summaries else None for key in keys], object)
    outlines = [summaries.get(key) for key in keys]
    table = _Table(store, dims, found.reshape(shape), outlines)
    taken = {*coords, *dims, COMPUTED}
    variables = {
        _free(name, taken): variable
        for name in table.names()
        if (variable := table.variable(name)) is not None
    }
    computed = np.array([key in summaries for key in keys]).reshape(shape)
    variables[COMPUTED] = xarray.Variable(dims, computed)
    attributes = {"task": store.task, "version": store.version}
    return xarray.Dataset(variables, coords, attributes)


def _free(name: str, taken: Collection[str]) -> str:
    """`name`, prefixed by "result." if the grid uses it already."""
    return f"result.{name}" if name in taken else name


class _Table:
    """The variables of all results, from their summaries alone."""

    def __init__(
        self,
        store: Store,
        dims: tuple[str, ...],
        keys: np.ndarray,
        summaries: list[dict[str, Any] | None],
    ):
        self.store, self.dims, self.keys = store, dims, keys
        self.rows = [None if s is None else s["variables"] for s in summaries]
        self.kinds = {s["kind"] for s in summaries if s is not None}

    def names(self) -> list[str]:
        """The names of all variables, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.rows if row for name in row))

    def variable(self, name: str) -> xarray.Variable | None:
        """One variable: a number per point, or an array per point, read on first use.

        None, with a warning, if its arrays differ in rank.
        """
        cells = [None if row is None else row.get(name) for row in self.rows]
        found = [cell for cell in cells if cell is not None]
        ranks = {len(cell[1]) if isinstance(cell, list) else 0 for cell in found}
        if len(ranks) > 1:
            warnings.warn(
                f"{name!r} is left out of the dataset because its number of axes "
                f"differs between points: {', '.join(map(str, sorted(ranks)))}.",
                stacklevel=2,
            )
            return None
        whole = len(found) == len(cells)
        if ranks == {0}:
            return xarray.Variable(self.dims, self._numbers(cells, found, whole))
        shapes = np.array([cell[1] for cell in found])
        inner = tuple(int(n) for n in shapes.max(axis=0))
        dtype = np.result_type(*{np.dtype(cell[0]) for cell in found})
        if dtype.kind != "f" and not (whole and np.all(shapes == inner)):
            dtype = np.dtype(np.float64)  # has NaN for missing entries
        array = _LazyResults(self.store, self.keys, name, inner, dtype)
        lazy = indexing.LazilyIndexedArray(array)
        return xarray.Variable((*self.dims, *self._inner_dims(name, inner)), lazy)

    def _numbers(self, cells: list, found: list, whole: bool) -> np.ndarray:
        if whole:
            return np.array(cells).reshape(self.keys.shape)
        numbers = np.full(len(cells), np.nan)
        for i, cell in enumerate(cells):
            if cell is not None:
                numbers[i] = cell
        return numbers.reshape(self.keys.shape)

    def _inner_dims(self, name: str, inner: tuple[int, ...]) -> tuple[str, ...]:
        own = [f"{name}_{i}" for i in range(len(inner))]
        if self.kinds == {_result.FLOW}:  # all arrays of a flow run over time
            own = [TIME, *own[:-1]]
        return tuple(_free(dim, self.dims) for dim in own)


class _LazyResults(BackendArray):
    """One variable over the axes of the grid, followed by its own axes."""

    def __init__(
        self,
        store: Store,
        keys: np.ndarray,
        name: str,
        inner: tuple[int, ...],
        dtype: np.dtype,
    ):
        self.store, self.keys, self.name, self.inner = store, keys, name, inner
        self.shape = (*keys.shape, *inner)
        self.dtype = dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.OUTER, self._read
        )

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        """The entries at `key`: a number, slice or list for each axis. Only the files
        of these points are read."""
        depth = self.keys.ndim
        keys = _outer(self.keys, key[:depth])
        if not isinstance(keys, np.ndarray):
            return self._one(keys, key[depth:])
        inner = _outer(np.empty(self.inner, dtype=bool), key[depth:]).shape
        part = np.empty((keys.size, *inner), self.dtype)
        for i, one in enumerate(keys.ravel()):
            part[i] = self._one(one, key[depth:])
        return part.reshape(*keys.shape, *inner)

    def _one(self, result: str | None, key: tuple[Any, ...]) -> np.ndarray:
        padding = np.nan if self.dtype.kind == "f" else 0
        whole = np.full(self.inner, padding, self.dtype)
        if result is not None:
            _, variables = _result.variables(self.store.file(result))
            if self.name in variables:
                array = variables[self.name]
                whole[tuple(slice(n) for n in array.shape)] = array
        return np.asarray(_outer(whole, key))


def _outer(array: np.ndarray, key: tuple[Any, ...]) -> Any:
    """`array` indexed along each axis by its own part of `key`."""
    # Last axis first, because a number removes its axis.
    for axis in range(len(key) - 1, -1, -1):
        array = array[(slice(None),) * axis + (key[axis],)]
    return array
