"""Stores as datasets: shapes, names, missing points, lazy reads and export."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import sweep_tasks
import xarray
from sweep_tasks import GRID

import gradflow
from gradflow import open_store, sweep, sweeps
from gradflow.sweeps import _result
from gradflow.sweeps._grid import as_grid
from gradflow.sweeps._store import Store


def test_points_without_results_are_nan(tmp_path, workers):
    store = tmp_path / "s"
    sweep(sweep_tasks.product, GRID, store=store, engine=workers)
    Store.at(store).file(Store.at(store).key({"a": 2, "b": 2})).unlink()
    dataset = open_store(store)
    np.testing.assert_array_equal(dataset.area, [[1, 2], [2, np.nan], [3, 6]])
    assert np.all(np.isnan(dataset.row.sel(a=2, b=2)))
    assert np.argwhere(~dataset.computed.values).tolist() == [[1, 1]]


def test_flows(flows, flow):
    dataset = open_store(flows.path)
    nan = np.nan
    np.testing.assert_array_equal(dataset.ts, [flow.ts, [0.0, 0.5, nan]])
    # The grid has taken the name.
    np.testing.assert_array_equal(dataset["result.loss"].sel(loss=1), flow.loss)
    np.testing.assert_array_equal(dataset.final_loss, flow.loss[[2, 1]])
    np.testing.assert_array_equal(dataset.final_time, [1.0, 0.5])
    np.testing.assert_array_equal(dataset.twice.sel(loss=1), flow.observables["twice"])
    assert dataset.twice.dims == ("loss", "time", "twice_0")
    assert bool(dataset.successful.all())
    assert dataset.rtol.values.tolist() == [flow.settings.rtol] * 2
    imbalance = float(dataset.energy_imbalance.sel(loss=1))
    assert imbalance == flow.certificate.energy_imbalance
    loaded = sweeps.load_result(flows.path, {"loss": 1})
    assert isinstance(loaded, gradflow.Flow)
    assert str(loaded.certificate) == str(flow.certificate)
    np.testing.assert_array_equal(loaded.params, flow.params)


def test_a_training_run(tmp_path, stored):
    def bowl(w):
        return (w**2).sum()

    training = gradflow.train(bowl, np.ones(2), 0.1, 5)
    path = stored(tmp_path / "s", {"seed": [0, 1]}, training).path
    dataset = open_store(path)
    np.testing.assert_array_equal(dataset["loss"].sel(seed=1), training.loss)
    assert dataset.final_time.values.tolist() == [training.ts[-1]] * 2
    assert bool(dataset.successful.all())
    assert "rtol" not in dataset
    loaded = sweeps.load_result(path, {"seed": 0}, bowl)
    assert isinstance(loaded, gradflow.Training)
    np.testing.assert_array_equal(loaded.params, training.params)
    assert loaded.learning_rates == training.learning_rates


def test_results_with_names_that_are_taken(tmp_path, flow, stored):
    values = {"v": np.arange(3.0), "computed": 2.0}
    dataset = open_store(stored(tmp_path / "a", {"v_0": [1, 2]}, values).path)
    assert dataset.v.dims == ("v_0", "result.v_0")
    np.testing.assert_array_equal(dataset.v, [values["v"]] * 2)
    assert dataset.computed.values.tolist() == [True, True]
    assert dataset["result.computed"].values.tolist() == [2.0, 2.0]

    dataset = open_store(stored(tmp_path / "b", {"time": [1.0, 2.0]}, flow).path)
    assert dataset["loss"].dims == ("time", "result.time")
    np.testing.assert_array_equal(dataset["loss"].sel(time=2.0), flow.loss)

    content = flow.contents()
    named = gradflow.Flow.from_contents(
        {**content, "observables": {"final_loss": content["observables"]["norm"]}}
    )
    dataset = open_store(stored(tmp_path / "c", {"a": [1]}, named).path)
    assert dataset.final_loss.values.tolist() == [flow.loss[-1]]
    norm = dataset["observables.final_loss"].sel(a=1)
    np.testing.assert_array_equal(norm, flow.observables["norm"])

    with pytest.raises(ValueError, match="must not use the name 'computed'"):
        as_grid({"computed": [1]})


def test_export_to_netcdf(tmp_path, flows):
    dataset = open_store(flows.path)
    dataset.to_netcdf(tmp_path / "flows.nc", engine="scipy")
    with xarray.open_dataset(tmp_path / "flows.nc", engine="scipy") as again:
        xarray.testing.assert_equal(again.load(), dataset.load())


@pytest.mark.skipif(importlib.util.find_spec("zarr") is None, reason="zarr is an extra")
def test_export_to_zarr(tmp_path, flows):
    code = (
        "import sys, gradflow, xarray; dataset = gradflow.open_store(sys.argv[1]);"
        "dataset.to_zarr(sys.argv[2]);"
        "xarray.testing.assert_equal(xarray.open_zarr(sys.argv[2], chunks=None), "
        "dataset)"
    )
    command = [sys.executable, "-c", code, flows.path, tmp_path / "flows.zarr"]
    subprocess.run(command, check=True, capture_output=True)


def test_arrays_are_read_when_they_are_used(flows, monkeypatch):
    read = []
    original = _result.read
    monkeypatch.setattr(
        _result, "read", lambda path: read.append(path) or original(path)
    )
    dataset = open_store(flows.path)
    assert dataset.final_loss.values.shape == (2,)
    assert not read
    assert dataset.ts.sel(loss=2).isel(time=0) == 0.0
    assert read == [flows.file(flows.key({"loss": 2}))]
    rows = dataset.twice.isel(time=[0, 2], twice_0=1, loss=[1, 0]).values
    np.testing.assert_array_equal(rows[1], dataset.twice.values[0, [0, 2], 1])
    np.testing.assert_array_equal(rows[0], dataset.twice.values[1, [0, 2], 1])
