"""Trajectories and ensembles as `xarray.Dataset`s."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.ravel import named_leaves
from .._stepping import result_name
from ..problems import AbstractLoss

if TYPE_CHECKING:
    import xarray

    from ._ensemble import Ensemble
    from ._trajectory import AbstractTrajectory

TOKEN_AXES = ("token", "query", "key", "next_token")
"""The axes along which token labels are coordinates."""


def dataset(trajectory: "AbstractTrajectory") -> "xarray.Dataset":
    """The trajectory over the dimension `time`; parameters that are not stored at all
    saved times have a dimension `params_time` of their own."""
    stored = trajectory.stored_ts
    clock = "time" if stored is None else "params_time"
    recorded = {"loss": trajectory.loss, "speed": trajectory.speed}
    recorded |= named_leaves(trajectory.observables)
    arrays = {name: (("time",), x) for name, x in recorded.items()}
    for name, leaf in named_leaves(trajectory.params).items():
        taken = name in arrays or name in ("", "time", "params_time")
        arrays[f"params.{name}".rstrip(".") if taken else name] = ((clock,), leaf)
    coordinates = {"time": trajectory.ts}
    if stored is not None:
        coordinates["params_time"] = stored
    return _dataset(
        arrays,
        coordinates,
        trajectory.knowledge,
        {
            "solver": trajectory.stats.solver,
            **trajectory.attributes,
            "result": result_name(trajectory.result),
            "certificate": str(trajectory.certificate),
        },
    )


def ensemble_dataset(ensemble: "Ensemble") -> "xarray.Dataset":
    """All members over the dimensions `member` and `time`."""
    arrays = {}
    for name in ("loss", "speed", *ensemble.observable_names):
        for inner, leaf in named_leaves(ensemble.values(name)).items():
            full = f"{name}.{inner}" if inner else name
            arrays[full] = (("member", "time"), leaf)
    return _dataset(
        arrays,
        {"time": ensemble.ts, "member": np.arange(len(ensemble))},
        ensemble.knowledge,
        {"failed": str(ensemble.failed)},
    )


def _dataset(
    arrays: Mapping[str, tuple[tuple[str, ...], np.ndarray]],
    coordinates: dict[str, np.ndarray],
    loss: AbstractLoss,
    attributes: dict[str, Any],
) -> "xarray.Dataset":
    import xarray

    labels, sizes = loss.token_labels, {}
    variables = {}
    for name, (leading, values) in arrays.items():
        shape = np.shape(values)[len(leading) :]
        dimensions = _dimensions(name, shape, loss, sizes)
        variables[name] = ((*leading, *dimensions), values)
        sizes |= dict(zip(dimensions, shape, strict=True))
    for axis in TOKEN_AXES:
        if labels is not None and sizes.get(axis) == len(labels):
            coordinates[axis] = np.array(labels)
    # NetCDF has no attributes that are None or boolean.
    kept = {k: _plain(v) for k, v in attributes.items() if v is not None}
    return xarray.Dataset(variables, coords=coordinates, attrs=kept)


def _dimensions(
    name: str, shape: tuple[int, ...], loss: AbstractLoss, sizes: dict[str, int]
) -> tuple[str, ...]:
    """The names of an array's axes: those the loss declares, unless they are in use
    with other sizes, or else numbered ones."""
    known = loss.axes.get(name.removeprefix("params."), ())
    if len(known) == len(shape) and all(
        sizes.get(axis, size) == size for axis, size in zip(known, shape, strict=True)
    ):
        return known
    return tuple(f"{name}_{i}" for i in range(len(shape)))


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value
