"""Reading a store: all results as a dataset, or one result."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Array, PyTree

from .._core.checks import Checked
from . import _result
from ._grid import Value, as_grid
from ._store import Store, StoreError

if TYPE_CHECKING:
    import xarray


def open_store(path: Checked[str | os.PathLike]) -> "xarray.Dataset":
    """The results of a sweep as an `xarray.Dataset` with the grid as coordinates.

    A product grid gives one dimension per name, a list of points the single dimension
    `point`. Numbers are available at once; arrays are read, and checked, on first use,
    so that a store of any size opens quickly. Points without a result are NaN, and
    `computed` is false there. Arrays whose size differs from point to point are padded
    with NaN.

    For flows and training runs the variables are `ts`, `loss`, `speed` and the
    observables over `time`; `final_loss`, `final_time` and `successful`; from the
    certificate `energy_imbalance`, `energy_released` and `largest_drift`; and, for
    flows, `rtol`.
    `load_result` returns the flow itself. A variable whose name the grid already uses
    is called `result.…`.

    `dataset.to_netcdf(path)` and `dataset.to_zarr(path)` export the dataset: NetCDF 3
    needs nothing else, NetCDF 4 and Zarr need `pip install gradflow[export]`.

    **Arguments:**

    - `path`: the folder of the store.
    """
    store = Store.at(checked_path("path", path))
    from ._dataset import open_dataset  # imports xarray

    return open_dataset(store)


def load_result(
    path: Checked[str | os.PathLike],
    point: Checked[Mapping[str, Value]],
    loss: Callable[[PyTree], Array] | None = None,
    *,
    like: PyTree | None = None,
    solver: Any = None,
) -> _result.Result:
    """The result at one point of a store, as the task returned it: a `Flow`, a
    `Training` or a dictionary of numbers and arrays.

    **Arguments:**

    - `path`: the folder of the store.
    - `point`: the point, as a mapping from names to values.
    - `loss`, `like`, `solver`: for the flow of a loss or solver that is not gradflow's,
        as in `Flow.load`.
    """
    store = Store.at(checked_path("path", path))
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


def checked_path(name: str, path: object) -> Path:
    """A user's path, checked."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"`{name}` must be a path, got {type(path).__name__}.")
    return Path(os.fspath(path))
