"""Sweeps: nothing computed is lost, computed twice or used when damaged."""

import contextlib
import errno
import functools
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import sweep_tasks
import xarray

import gradflow
from gradflow import StoreError, SweepError, open_store, sweep, sweeps
from gradflow._core import storage
from gradflow.cli import _main as cli
from gradflow.sweeps import Store, _result

GRID = {"a": [1, 2, 3], "b": [1, 2]}


@pytest.fixture(scope="module")
def workers():
    """Workers that serve many tests, as each start of a process takes a while."""
    with sweeps.LocalWorkers(2) as workers:
        yield workers


def contents(store):
    """The bytes of all results."""
    return {path.name: path.read_bytes() for path in (store / "results").iterdir()}


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A file to which tasks write what they compute."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("SWEEP_LOG", str(path))
    return path


#
# Results
#


def test_a_product(tmp_path, workers):
    report = sweep(sweep_tasks.product, GRID, store=tmp_path / "s", engine=workers)
    assert (report.points, report.computed, report.reused) == (6, 6, 0)
    dataset = report.open()
    assert dataset.sizes == {"a": 3, "b": 2, "row_0": 2}
    np.testing.assert_array_equal(dataset.area, np.outer([1, 2, 3], [1, 2]))
    assert dataset.area.dtype == np.int64
    np.testing.assert_array_equal(dataset.square, np.eye(3, dtype=bool)[:, :2])
    # Rows of different lengths are padded.
    nan = np.nan
    np.testing.assert_array_equal(dataset.row.sel(a=2), [[2.0, nan], [2.0, 2.0]])
    assert dataset.attrs == {"task": "sweep_tasks:product", "version": 1}
    result = sweeps.load_result(tmp_path / "s", {"b": 2, "a": 3.0})
    assert isinstance(result, dict)
    assert (result["area"], result["square"]) == (6, False)
    np.testing.assert_array_equal(result["row"], [3.0, 3.0])


def test_only_what_is_missing_is_computed(tmp_path, workers):
    store = tmp_path / "s"
    sweep(sweep_tasks.product, GRID, store=store, engine=workers)
    first = contents(store)
    report = sweep(
        sweep_tasks.product, {"a": [2, 5], "b": [1, 2]}, store=store, engine=workers
    )
    assert (report.computed, report.reused) == (2, 2)
    assert first.items() <= contents(store).items()
    dataset = open_store(store)
    assert dataset.a.values.tolist() == [1, 2, 3, 5]
    np.testing.assert_array_equal(dataset.area, np.outer([1, 2, 3, 5], [1, 2]))
    assert bool(dataset.computed.all())


def test_points_without_results_are_nan(tmp_path, workers):
    store = tmp_path / "s"
    sweep(sweep_tasks.product, GRID, store=store, engine=workers)
    Store.at(store).file(Store.at(store).key({"a": 2, "b": 2})).unlink()
    dataset = open_store(store)
    np.testing.assert_array_equal(dataset.area, [[1, 2], [2, np.nan], [3, 6]])
    assert np.all(np.isnan(dataset.row.sel(a=2, b=2)))
    assert np.argwhere(~dataset.computed.values).tolist() == [[1, 1]]


def test_a_list_of_points(tmp_path, workers):
    points = [{"a": 3, "b": 1}, {"a": 1, "b": 2}, {"a": 3, "b": 1}]
    report = sweep(sweep_tasks.product, points, store=tmp_path / "s", engine=workers)
    assert report.computed == 2
    dataset = report.open()
    assert dataset.sizes["point"] == 2
    assert dataset.a.values.tolist() == [3, 1]
    assert dataset.area.values.tolist() == [3, 2]


def test_random_points():
    laws = {
        "scale": sweeps.log_uniform(1e-4, 1e-1),
        "shift": sweeps.uniform(-1, 1),
        "seed": sweeps.integers(0, 10),
        "kind": ["one", "two"],
        "normal": lambda generator: generator.normal(),
    }
    points = sweeps.random_points(laws, 500, seed=1)
    assert sweeps.random_points(laws, 200, seed=1) == points[:200]
    fewer = sweeps.random_points({"seed": laws["seed"]}, 500, seed=1)
    assert [p["seed"] for p in fewer] == [p["seed"] for p in points]
    assert points != sweeps.random_points(laws, 500, seed=2)
    scales = np.log([p["scale"] for p in points])
    assert scales.min() >= np.log(1e-4)
    assert scales.max() <= np.log(1e-1)
    # The mean of 500 uniform numbers, within four standard deviations.
    spread = np.log(1e3) / np.sqrt(12 * 500)
    assert abs(scales.mean() - np.log(1e-4 * 1e-1) / 2) < 4 * spread
    assert abs(np.mean([p["shift"] for p in points])) < 4 * 2 / np.sqrt(12 * 500)
    assert {p["seed"] for p in points} == set(range(10))
    assert {p["kind"] for p in points} == {"one", "two"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sweeps.random_points({}, 3), "`laws` must map at least one name"),
        (
            lambda: sweeps.random_points({"a": "word"}, 3),
            r"`laws\['a'\]` must be a law",
        ),
        (lambda: sweeps.random_points({"a": [1]}, 0), "`count` must be a whole number"),
        (lambda: sweeps.uniform(2, 1), "`high` must be above `low` = 2, got 1"),
        (lambda: sweeps.log_uniform(0, 1), "`low` must be a positive number"),
        (lambda: sweeps.integers(3, 3), "`high` must be a whole number of at least 4"),
    ],
)
def test_bad_laws(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_one_and_one_point_zero_are_the_same_point(tmp_path, workers):
    store = tmp_path / "s"
    sweep(sweep_tasks.product, {"a": [1, 2], "b": 1}, store=store, engine=workers)
    report = sweep(
        sweep_tasks.product,
        {"a": np.array([1.0, 2.0]), "b": 1},
        store=store,
        engine=workers,
    )
    assert report.reused == 2


def test_a_task_of_a_script_is_sent_by_value(tmp_path, workers):
    offset = 10

    def shifted(point):
        return {"x": np.float64(point["a"] + offset), "y": np.arange(3) * point["a"]}

    with pytest.raises(ValueError, match="it captures `offset`, of which its name"):
        sweep(shifted, {"a": [1]}, store=tmp_path / "s", engine=workers)
    report = sweep(
        shifted, {"a": [1, 2]}, store=tmp_path / "s", engine=workers, name="shifted"
    )
    assert report.open().x.values.tolist() == [11.0, 12.0]
    np.testing.assert_array_equal(report.open().y, [[0, 1, 2], [0, 2, 4]])


def test_workers_have_their_own_cores_and_few_threads(tmp_path):
    cores = os.sched_getaffinity(0)
    count = min(2, len(cores))
    report = sweep(
        sweep_tasks.surroundings,
        {"a": range(40)},
        store=tmp_path / "s",
        workers=count,
    )
    dataset = report.open()
    pids = dataset.pid.values
    assert 1 <= len(set(pids)) <= count
    shares = {
        pid: frozenset(cpus)
        for pid, cpus in zip(pids, dataset.cpus.values, strict=True)
    }
    for pid, other in zip(shares, list(shares)[1:], strict=False):
        assert shares[pid].isdisjoint(shares[other])
    assert set().union(*shares.values()) <= {float(c) for c in cores}
    assert np.all(dataset.threads == 1)
    assert np.all(dataset.eigen)
    assert not np.any(dataset.jax)  # a task that does without need not pay for it
    for pid in pids:  # they ended with the sweep
        assert not Path(f"/proc/{pid}").exists()


def test_workers_outlive_a_sweep_that_they_were_given_to(tmp_path, workers):
    pids = set()
    for name in ("s", "t"):
        report = sweep(
            sweep_tasks.surroundings,
            {"a": range(20)},
            store=tmp_path / name,
            engine=workers,
        )
        pids |= set(report.open().pid.values)
    assert len(pids) <= 2


def test_progress(tmp_path, workers, capsys):
    sweep(
        sweep_tasks.product, GRID, store=tmp_path / "s", engine=workers, progress=True
    )
    assert re.search(r"sweep: 100%.*6/6 \[.*it/s\]", capsys.readouterr().err)


#
# Flows, export
#


@pytest.fixture(scope="module")
def flow():
    return gradflow.integrate(
        sweep_tasks.bowl,
        np.ones(2),
        1.0,
        ts=[0.0, 0.5, 1.0],
        observables={"norm": lambda w: (w**2).sum(), "twice": lambda w: 2 * w},
        solver="tsit5",
    )


@pytest.fixture
def flows(tmp_path, flow):
    """A store of two flows, one of which stopped early."""
    early = gradflow.Flow.from_contents(
        {
            **flow.contents(),
            "ts": flow.ts[:2],
            "loss": flow.loss[:2],
            "speed": flow.speed[:2],
            "observables": {k: v[:2] for k, v in flow.observables.items()},
        }
    )
    grid = sweeps._grid.as_grid({"loss": [1, 2]})
    store = Store.for_sweep(tmp_path / "flows", "flows", 1, grid)
    store.create(grid)
    for point, one in zip(grid.points(), (flow, early), strict=True):
        store.write(point, _result.encode(one, store.label(point)))
    return store


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


def stored_store(path, grid, result):
    """A store with the same result at all points."""
    grid = sweeps._grid.as_grid(grid)
    store = Store.for_sweep(path, "made", 1, grid)
    store.create(grid)
    for point in grid.points():
        store.write(point, _result.encode(result, store.label(point)))
    return store


def test_results_with_names_that_are_taken(tmp_path, flow):
    values = {"v": np.arange(3.0), "computed": 2.0}
    dataset = open_store(stored_store(tmp_path / "a", {"v_0": [1, 2]}, values).path)
    assert dataset.v.dims == ("v_0", "result.v_0")
    np.testing.assert_array_equal(dataset.v, [values["v"]] * 2)
    assert dataset.computed.values.tolist() == [True, True]
    assert dataset["result.computed"].values.tolist() == [2.0, 2.0]

    dataset = open_store(stored_store(tmp_path / "b", {"time": [1.0, 2.0]}, flow).path)
    assert dataset["loss"].dims == ("time", "result.time")
    np.testing.assert_array_equal(dataset["loss"].sel(time=2.0), flow.loss)

    content = flow.contents()
    named = gradflow.Flow.from_contents(
        {**content, "observables": {"final_loss": content["observables"]["norm"]}}
    )
    dataset = open_store(stored_store(tmp_path / "c", {"a": [1]}, named).path)
    assert dataset.final_loss.values.tolist() == [flow.loss[-1]]
    norm = dataset["observables.final_loss"].sel(a=1)
    np.testing.assert_array_equal(norm, flow.observables["norm"])

    with pytest.raises(ValueError, match="must name no coordinate 'computed'"):
        sweeps._grid.as_grid({"computed": [1]})


def test_two_grids_that_make_no_product_are_done_when_both_are(tmp_path, capsys):
    path = tmp_path / "s"
    for at in (1, 2):
        stored_store(path, {"a": [at], "b": [at]}, {"x": 1.0})
    assert cli.main(["status", str(path)]) == 0
    assert "results          2 of 2 (100%)" in capsys.readouterr().out


def test_a_flow_is_computed_and_stored_by_a_worker(tmp_path):
    report = sweep(sweep_tasks.flow, {"a": [1, 2]}, store=tmp_path / "s", workers=1)
    assert not report.failures
    exact = 2 * np.outer([1, 4], np.exp(-4 * np.array([0.0, 0.5, 1.0])))
    np.testing.assert_allclose(report.open()["loss"], exact, rtol=1e-6)
    loaded = sweeps.load_result(tmp_path / "s", {"a": 2})
    assert isinstance(loaded, gradflow.Flow)
    np.testing.assert_allclose(loaded.params[-1], 2 * np.exp([-2.0] * 2), rtol=1e-6)
    file = next((tmp_path / "s" / "results").glob("*.npz"))
    assert gradflow.Flow.load(file).ts[-1] == 1.0
    # Its loss is the user's own, and is given again.
    with pytest.raises(ValueError, match="needs the loss"):
        loaded.at(0.3)
    again = sweeps.load_result(tmp_path / "s", {"a": 2}, sweep_tasks.bowl)
    assert isinstance(again, gradflow.Flow)
    np.testing.assert_allclose(again.at(0.3), 2 * np.exp([-0.6] * 2), rtol=1e-6)


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


#
# Files
#


def test_an_index_that_lags_or_is_gone_costs_a_read_and_no_more(flows, monkeypatch):
    index = flows.path / "index.jsonl"
    whole = open_store(flows.path).load()
    lines = index.read_bytes().split(b"\n")
    broken = [line for line in lines if line]
    broken[0] = broken[0].replace(b"final_loss", b"final_gain")
    for content in (b"", b"\n".join(broken), b"\n".join(lines)[:-30]):
        index.write_bytes(content)
        xarray.testing.assert_identical(open_store(flows.path).load(), whole)
        # What was read is in the index now.
        with monkeypatch.context() as patch:
            patch.setattr(_result, "read", None)
            xarray.testing.assert_equal(
                open_store(flows.path).final_loss, whole.final_loss
            )
    index.unlink()
    xarray.testing.assert_identical(open_store(flows.path).load(), whole)


def test_the_index_is_not_believed_about_another_file(flows, flow):
    """Two sweeps computed a point and the line of the one that lost came last."""
    point = {"loss": 2}
    lines = (flows.path / "index.jsonl").read_bytes()
    flows.write(point, _result.encode(flow, flows.label(point)))
    (flows.path / "index.jsonl").write_bytes(lines)
    assert open_store(flows.path).final_time.values.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("place", [0, 11, 200, -70, -3])
def test_a_flipped_byte_is_reported_and_computed_again(place, tmp_path, workers):
    store = tmp_path / "s"
    sweep(sweep_tasks.product, GRID, store=store, engine=workers)
    before = contents(store)
    file = Store.at(store).file(Store.at(store).key({"a": 2, "b": 2}))
    damaged = bytearray(before[file.name])
    damaged[place] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(gradflow.RunFileError, match=file.name):
        sweeps.load_result(store, {"a": 2, "b": 2})
    with pytest.warns(
        UserWarning, match=f"{file.name}' is damaged.* counts as missing"
    ):
        assert np.isnan(open_store(store).area.sel(a=2, b=2))
    with pytest.warns(UserWarning, match=f"{file.name}' is damaged.* computed again"):
        report = sweep(sweep_tasks.product, GRID, store=store, engine=workers)
    assert report.damaged == [file]
    assert (report.computed, report.reused) == (1, 5)
    assert str(file) in str(report)
    assert contents(store) == before


def test_a_result_under_the_name_of_another_is_not_used(tmp_path, workers):
    store = tmp_path / "s"
    sweep(sweep_tasks.product, GRID, store=store, engine=workers)
    one, other = (
        Store.at(store).file(Store.at(store).key({"a": a, "b": 1})) for a in (1, 2)
    )
    other.write_bytes(one.read_bytes())
    with pytest.warns(UserWarning, match=f"{other.name}' is damaged"):
        assert sweep(
            sweep_tasks.product, GRID, store=store, engine=workers
        ).damaged == [other]


def test_nothing_on_disk_is_a_pickle(tmp_path, workers):
    report = sweep(sweep_tasks.product, GRID, store=tmp_path / "s", engine=workers)
    for file in (report.store / "results").iterdir():
        with np.load(file, allow_pickle=False) as archive:
            assert {"header", "digest"} <= set(archive)
    for file in report.store.rglob("*.json"):
        json.loads(file.read_text())


def test_a_full_disk_stops_the_sweep_and_leaves_the_store_valid(
    tmp_path, workers, monkeypatch
):
    store, calls = tmp_path / "s", []
    fsync = os.fsync

    def full(handle):
        calls.append(handle)
        if len(calls) > 6:  # two of them for the store itself
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        with pytest.raises(
            SweepError, match=r"No space left on device.* the 4 results computed until"
        ):
            sweep(sweep_tasks.product, GRID, store=store, engine=workers)
    assert len(contents(store)) == 4
    assert not list(store.rglob(".*"))
    assert int(open_store(store).computed.sum()) == 4
    report = sweep(sweep_tasks.product, GRID, store=store, engine=workers)
    assert (report.computed, report.reused) == (2, 4)


def test_what_a_killed_sweep_left_is_removed(tmp_path, workers):
    store = tmp_path / "s"
    sweep(sweep_tasks.product, GRID, store=store, engine=workers)
    old, new = store / "results" / ".x.npz.old", store / "results" / ".x.npz.new"
    for path in (old, new):
        path.write_bytes(b"half a res")
    os.utime(old, (1.0, 1.0))
    sweep(sweep_tasks.product, GRID, store=store, engine=workers)
    assert not old.exists()
    assert new.exists()  # another sweep may be writing it
    assert int(open_store(store).computed.sum()) == 6


#
# Failures
#


def test_failures_are_listed_and_the_rest_kept(tmp_path, log):
    with pytest.warns(UserWarning, match="2 of 6 points failed"):
        report = sweep(
            sweep_tasks.cursed, {"a": range(6)}, store=tmp_path / "s", retries=1
        )
    assert report.computed == 4
    failures = {f.point["a"]: f for f in report.failures}
    assert failures[3].reason == (
        "the worker process died 2 times, the last time by signal 9"
    )
    assert failures[4].reason == "RuntimeError: four is too many"
    assert 'raise RuntimeError("four is too many")' in failures[4].traceback
    assert "_worker.py" not in failures[4].traceback
    assert "a = 4: RuntimeError: four is too many" in str(report)
    # One that raises is not tried again, one whose worker died is.
    assert sorted(log.read_text().split()) == sorted("0123345")
    assert {f.point["a"] for f in Store.at(tmp_path / "s").failures()} == {3, 4}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("text", "TypeError: `task` must return real numbers .* got str for 'x'"),
        ("none", "TypeError: .* got NoneType for 'x'"),
        ("complex", "TypeError: .* got complex for 'x'"),
        ("huge", "ValueError: .* at most 64 bits, got 1180591620717411303424 for 'x'"),
        ("objects", "TypeError: .* got entries of type object for 'x'"),
        ("ragged", "ValueError: .* arrays of numbers, got for 'x'"),
        ("list", "TypeError: `task` must return a Flow or a mapping .* got list"),
        ("empty", "ValueError: `task` must return at least one number, got none"),
        ("coordinate", "ValueError: .* the name of a coordinate, got 'kind'"),
        ("key", "ValueError: `task` must name its results by text .* got 3"),
    ],
)
def test_what_cannot_be_stored(kind, reason, tmp_path, workers):
    with pytest.warns(UserWarning, match="1 of 1 points failed"):
        report = sweep(
            sweep_tasks.unstorable,
            {"kind": [kind]},
            store=tmp_path / "s",
            engine=workers,
        )
    assert re.fullmatch(f"{reason}.*", report.failures[0].reason, flags=re.DOTALL)
    assert not contents(tmp_path / "s")


def nothing(point):
    return {"x": 0.0}


class Callable:
    def __call__(self, point):
        return {"x": 0.0}


def locked(lock):
    def task(point):
        with lock:
            return {"x": 0.0}

    return task


@pytest.mark.parametrize(
    ("task", "grid", "options", "message"),
    [
        (nothing, {}, {}, "`grid` must hold at least one point, got no names"),
        (nothing, [], {}, "`grid` must hold at least one point, got an empty list"),
        (nothing, {"a": []}, {}, r"`grid\['a'\]` must hold at least one value"),
        (nothing, 3, {}, "`grid` must map names to values or be a list .* got int"),
        (nothing, "ab", {}, "`grid` must map .* got str"),
        (nothing, {"a": [1, 1.0]}, {}, r"`grid\['a'\]` must not repeat a value"),
        (nothing, {"a": [1, "x"]}, {}, "numbers, truth values or text alone"),
        (nothing, {"a": [np.nan]}, {}, r"`grid\['a'\]` must not be NaN"),
        (nothing, {"a": [[1]]}, {}, "must hold numbers, .* got list"),
        (nothing, {"a": np.eye(2)}, {}, r"must be a one-dimensional list .* \(2, 2\)"),
        (nothing, {"a": {}}, {}, r"`grid\['a'\]` must be a list of values, got dict"),
        (nothing, {3: [1]}, {}, "must name its coordinates by text, got 3"),
        (nothing, {"point": [1]}, {}, "no coordinate 'point'"),
        (nothing, [1], {}, r"`grid\[0\]` must be a mapping .* got int"),
        (
            nothing,
            [{"a": 1}, {"b": 1}],
            {},
            r"`grid\[1\]` must have the names .* got b",
        ),
        (3, {"a": [1]}, {}, "`task` must be a function of a point, got int"),
        (Callable, {"a": [1]}, {}, "`task` must be .* got the class Callable"),
        (Callable(), {"a": [1]}, {}, "it is a Callable, which has no name of its own"),
        (lambda p: p, {"a": [1]}, {}, "it is a lambda, .*: pass `name`"),
        (functools.partial(nothing), {"a": [1]}, {}, "it is a partial, which has no"),
        (
            locked(threading.Lock()),
            {"a": [1]},
            {"name": "locked"},
            "`task` must be .* but `lock`, which it uses, cannot: cannot pickle",
        ),
        (nothing, {"a": [1]}, {"engine": "dask"}, "`engine` must be 'local' or 'ray'"),
        (nothing, {"a": [1]}, {"gpus": 1}, "`gpus` must be left out unless `engine`"),
        (nothing, {"a": [1]}, {"workers": 0}, "`workers` must be a whole number"),
        (nothing, {"a": [1]}, {"cpus": 9999}, "`cpus` must be at most the .* cores"),
        (nothing, {"a": [1]}, {"retries": -1}, "`retries` must be a whole number"),
        (nothing, {"a": [1]}, {"version": "new"}, "`version` must be a whole number"),
        (nothing, {"a": [1]}, {"name": ""}, "`name` must be text, got ''"),
        (nothing, {"a": [1]}, {"store": 3}, "`store` must be a path, got int"),
    ],
)
def test_bad_input(task, grid, options, message, tmp_path):
    store = tmp_path / "s"
    with pytest.raises(ValueError, match=message):
        sweep(task, grid, **{"store": store, **options})
    assert not store.exists()


def test_a_task_that_workers_cannot_load(tmp_path, monkeypatch):
    """Known before any point is computed and before there is a store."""
    module = tmp_path / "here_only.py"
    module.write_text(
        "import os\nif 'HERE' not in os.environ: raise ImportError('not here')\n"
        "def task(point): return {'x': 1.0}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HERE", "yes")
    task = importlib.import_module("here_only").task
    monkeypatch.delenv("HERE")
    with pytest.raises(
        ValueError, match=r"`task` must be .* raised ImportError: not here"
    ):
        sweep(task, {"a": [1, 2]}, store=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_foreign_stores_are_refused(tmp_path, workers):
    store = tmp_path / "s"

    def refused(match, task=sweep_tasks.product, grid=GRID, **options):
        with pytest.raises(StoreError, match=match):
            sweep(task, grid, **{"store": store, "version": 2, **options})

    sweep(sweep_tasks.product, GRID, store=store, engine=workers, version=2)
    refused(
        "results of the task 'sweep_tasks:product', got 'test_sweeps:nothing'", nothing
    )
    refused("version 2 of its task, got the older version 1", version=1)
    refused(r"points over a \(number\), b \(number\), got a \(number\)", grid={"a": 1})
    refused(r"b \(number\), got a \(number\), b \(text\)", grid={"a": 1, "b": "x"})
    # A newer version of the task counts none of the older results.
    newer = sweep(
        sweep_tasks.product, {"a": 1, "b": 1}, store=store, engine=workers, version=3
    )
    assert newer.computed == 1
    assert int(newer.open().computed.sum()) == 1
    description = json.loads((store / "store.json").read_text())
    description["version"] = 2
    (store / "store.json").write_text(json.dumps(description))
    refused("version 2, written by a newer gradflow", version=3)
    with pytest.raises(StoreError, match="written by a newer gradflow"):
        open_store(store)
    del description["task"]
    for text in ("{", json.dumps(description)):
        (store / "store.json").write_text(text)
        refused("store.json' is damaged")
    (store / "store.json").unlink()
    refused("`store` must be a store or a new folder, got .* holds other files")
    store = tmp_path / "file"
    store.write_text("mine")
    refused("is a file, not a store")
    with pytest.raises(StoreError, match="no store at"):
        open_store(tmp_path / "nowhere")


#
# Processes that die
#


@pytest.fixture(scope="module")
def forking():
    """Processes that start with gradflow loaded, so that many can be killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gradflow", "sweep_tasks"])
    return context


def start(forking, store, grid, log):
    arguments = (grid, str(store), str(log))
    process = forking.Process(target=sweep_tasks.forked_sweep, args=arguments)
    process.start()
    return process


def computed(log):
    """Worker and point of each computation that began."""
    lines = log.read_text().splitlines()
    return [(int(pid), (int(a), int(b))) for pid, a, b in map(str.split, lines)]


def stored(store, grid):
    there = Store.at(store).present() if (store / "store.json").exists() else {}
    keys = {
        Store.at(store).key({"a": a, "b": b}): (a, b)
        for a in grid["a"]
        for b in grid["b"]
        if there
    }
    return {keys[key] for key in there}


KILLS = 20
WORKERS = 2


def test_killed_at_random_moments(tmp_path, log, forking):
    grid = {"a": list(range(20)), "b": list(range(10))}
    generator = np.random.default_rng()
    store = tmp_path / "s"
    at_risk: set[tuple[int, int]] = set()
    earlier = 0
    process = start(forking, store, grid, log)
    for kill in range(KILLS):
        before = len(computed(log))
        deadline = time.monotonic() + 30
        # Some points after the last kill, so that there are points left for the next.
        while len(computed(log)) < before + generator.integers(1, 9):
            assert time.monotonic() < deadline
            assert process.is_alive()
            time.sleep(0.003)
        time.sleep(generator.uniform(0, 0.02))
        began = computed(log)
        if kill % 2:
            os.kill(began[-1][0], signal.SIGKILL)
            at_risk.add(began[-1][1])
            continue
        process.kill()
        process.join()
        began = computed(log)
        lost = {point for _, point in began[earlier:]} - stored(store, grid)
        earlier = len(began)
        # A point on each worker, one that waits and one that is being written.
        assert len(lost) <= WORKERS + 2
        at_risk |= lost
        process = start(forking, store, grid, log)
    process.join(60)
    assert process.exitcode == 0

    # No worker outlives its parent, however that died.
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid, _ in computed(log)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    points = [point for _, point in computed(log)]
    assert set(points) == stored(store, grid)
    assert len(stored(store, grid)) == 200
    again = {point for point in points if points.count(point) > 1}
    assert again <= at_risk
    sweep(sweep_tasks.slow, grid, store=tmp_path / "t", workers=WORKERS)
    whole = {n: c for n, c in contents(store).items() if not n.startswith(".")}
    assert whole == contents(tmp_path / "t")


def test_ctrl_c_leaves_a_store_that_goes_on(tmp_path, log, forking):
    # Long enough that a busy machine does not end it before it is interrupted.
    grid = {"a": list(range(20)), "b": list(range(15))}
    process = start(forking, tmp_path / "s", grid, log)
    while len(computed(log)) < 8:
        time.sleep(0.005)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(10)
    assert process.exitcode == 1  # a KeyboardInterrupt, not a signal
    for pid, _ in computed(log):
        assert not Path(f"/proc/{pid}").exists()
    kept = stored(tmp_path / "s", grid)
    assert 0 < len(kept) < 300
    process = start(forking, tmp_path / "s", grid, log)
    process.join(60)
    assert process.exitcode == 0
    assert len(stored(tmp_path / "s", grid)) == 300
    points = [point for _, point in computed(log)]
    assert all(points.count(point) == 1 for point in kept)


def test_two_sweeps_share_a_store(tmp_path, log, forking):
    grid = {"a": list(range(10)), "b": list(range(8))}
    both = [start(forking, tmp_path / "s", grid, log) for _ in range(2)]
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    dataset = open_store(tmp_path / "s").load()
    np.testing.assert_array_equal(dataset.area, np.outer(range(10), range(8)))
    # Each goes its own way through the points and looks before it computes one.
    assert len(computed(log)) < 1.5 * 80


#
# Ray
#

RAY = """
import sys
import gradflow, sweep_tasks
if __name__ == "__main__":
    def by_value(point):
        return {"y": point["a"] + 0.5}
    grid = {"a": [1, 2, 3], "b": [1, 2]}
    options = {"engine": "ray", "workers": 2}
    import ray
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    report = gradflow.sweep(sweep_tasks.product, grid, store=sys.argv[1], **options)
    assert report.computed == 6, report
    report = gradflow.sweep(by_value, {"a": [1]}, store=sys.argv[2], **options)
    assert report.open().y.values.tolist() == [1.5]
    report = gradflow.sweep(
        sweep_tasks.cursed, {"a": [4, 5]}, store=sys.argv[3], **options
    )
    assert report.computed == 1, report
    for failure in report.failures:
        print(failure)
    try:
        gradflow.sweep(by_value, {"a": [2]}, store=sys.argv[2], engine="ray", gpus=1)
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is an extra")
def test_ray_gives_the_same_store(tmp_path, log, workers):
    script = tmp_path / "with_ray.py"
    script.write_text(RAY)
    run = subprocess.run(
        [sys.executable, script, *(tmp_path / name for name in "rvf")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HOME": str(tmp_path),  # where Ray puts the token of its cluster
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    )
    assert run.returncode == 0, run.stderr
    sweep(sweep_tasks.product, GRID, store=tmp_path / "l", engine=workers)
    assert contents(tmp_path / "r") == contents(tmp_path / "l")
    assert "a = 4: RuntimeError: four is too many" in run.stdout
    assert "`gpus` must be at most what the Ray cluster has, 0, got 1" in run.stdout


#
# The command line
#

FLOWS = (
    *("run", "--stationary", "0.6,0.2,0.1,0.1", "--width", "3", "--head-width", "2"),
    *("--horizon", "8", "--rtol", "1e-5", "--solver", "tsit5", "--no-progress"),
)


def test_run_set(tmp_path, capsys, monkeypatch):
    """The task is that of `gradflow run`; a worker's part in it is tested above."""
    asked, integrated = [], []

    def record(task, grid, **options):
        asked.append((task, grid, options))
        return sweep(
            sweep_tasks.unstorable, {"kind": ["empty"]}, store=tmp_path / "other"
        )

    monkeypatch.setattr(cli, "sweep", record)
    output = tmp_path / "s"
    options = [*FLOWS, "--output", str(output), "--workers", "1"]
    assert cli.main([*options, "--set", "seed=0,3", "--set", "scale=0.01"]) == 1
    assert "failed           1" in capsys.readouterr().out
    ((task, grid, options),) = asked
    assert grid == {"seed": [0, 3], "scale": [0.01]}
    assert options["store"] == output
    assert (options["workers"], options["engine"]) == (1, "local")
    # The name tells all that is fixed, and nothing that varies.
    assert options["name"] == (
        "gradflow run --head-width 2 --horizon 8.0 --rtol 1e-05 --solver tsit5 "
        "--stationary 0.6,0.2,0.1,0.1 --stickiness 0.5 --width 3"
    )
    monkeypatch.setattr(
        sweeps._runs, "integrate", lambda *args, **kw: integrated.append((args, kw))
    )
    task({"seed": 3, "scale": 0.01})
    (((problem, params, horizon), settings),) = integrated
    chain = gradflow.MarkovChain.sticky([0.6, 0.2, 0.1, 0.1], 0.5)
    np.testing.assert_array_equal(problem.population.chain.transition, chain.transition)
    np.testing.assert_array_equal(params.WQ, problem.init(3, 0.01).WQ)
    assert params.WQ.shape == (3, 2)
    assert (horizon, settings["rtol"], settings["solver"]) == (8.0, 1e-5, "tsit5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--set seed", "--set must be name=a,b,c with a name of"),
        ("--set colour=red", "--set must be name=a,b,c with a name of"),
        ("--set seed=1,x", "--set seed must be a list of int separated by commas"),
        ("--set seed=1 --set seed=2", "--set must name seed once"),
        ("--set width=3,0", "`width` must be a whole number of at least 1, got 0"),
        ("--set scale=-1", "`scale` must be a finite number, zero or more"),
        ("--set rtol=0", "`rtol` must be a positive number"),
        ("--set solver=magic", "`solver` must be one of"),
        ("--set step=0.1", "`step` must go with rk4 and euler"),
        ("--set seed=1 --engine dask", "`engine` must be 'local' or 'ray'"),
        ("--workers 2", "--workers goes with --set"),
    ],
)
def test_bad_settings(arguments, message, tmp_path, capsys):
    output = tmp_path / "s"
    assert cli.main(["run", *arguments.split(), "--output", str(output)]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def config(folder, text):
    path = folder / "config.toml"
    path.write_text(text)
    return ["sweep", str(path), "--no-progress"]


TASKS = """
def double(point):
    if point["a"] == 7:
        raise RuntimeError("seven")
    return {"x": 2 * point["a"]}
"""


def test_sweep_and_status(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "cli_tasks.py").write_text(TASKS)
    store = tmp_path / "s"
    text = f"task = 'cli_tasks.py:double'\nstore = '{store}'\nworkers = 1\n"
    grid = "[grid]\na = { range = [5, 8] }\nb = { logarithmic = [1, 100, 3] }\n"
    assert cli.main(config(tmp_path, text + grid)) == 1
    assert "a = 7, b = 10.0: RuntimeError: seven" in capsys.readouterr().out
    assert open_store(store).x.sel(b=10.0).values.tolist()[:2] == [10, 12]

    assert cli.main(["status", str(store)]) == 1
    printed = capsys.readouterr().out
    assert "cli_tasks:double, version 1" in printed
    assert "3 a × 3 b = 9 points" in printed
    assert "results          6 of 9 (67%)" in printed
    assert "a = 7, b = 1.0: RuntimeError: seven" in printed
    assert cli.main(["status", str(store), "--traceback"]) == 1
    assert 'raise RuntimeError("seven")' in capsys.readouterr().out

    draws = "[draws]\ncount = 3\nlaws = { a = [1, 2], b = { uniform = [0, 1] } }\n"
    drawn = text.replace(str(store), str(tmp_path / "t"))
    assert cli.main(config(tmp_path, drawn + draws)) == 0
    assert cli.main(["status", str(tmp_path / "t"), "--check"]) == 0
    capsys.readouterr()
    file = next((tmp_path / "t" / "results").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    assert cli.main(["status", str(tmp_path / "t"), "--check"]) == 1
    assert f"{file.name}' is damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("= 3", "is not a TOML file"),
        ("[grid]\na = [1]", "must name its `store`"),
        ("store = 's'\ncolour = 1", "must have no other keys than"),
        ("store = 's'", "must have one of `grid`, `points` and `draws`, got none"),
        ("store = 's'\n[grid]", "`grid` must hold at least one point"),
        (
            "store = 's'\n[grid]\nseed = { log = [1] }",
            "`grid.seed` must be a list or one",
        ),
        ("store = 's'\n[grid]\nseed = { range = [] }", "`grid.seed` must have other"),
        (
            "store = 's'\n[grid]\nseed = { linear = [0, 1] }",
            r"`grid.seed` must be \{ linear = \[first, last, count\] \}, got \[0, 1\]",
        ),
        ("store = 's'\n[grid]\na = [1]", "a sweep of runs varies one of"),
        ("store = 's'\n[grid]\nwidth = [0]", "`width` must be a whole number"),
        ("store = 's'\ntask = 'x'\n[grid]\na = [1]", "must be module:function or"),
        ("store = 's'\ntask = 'no_such:f'\n[grid]\na = [1]", "No module named"),
        ("store = 's'\ntask = 'math:f'\n[grid]\na = [1]", "cannot be imported"),
        ("store = 's'\n[run]\ncolour = 1\n[grid]\nseed = [1]", "`run` in .* must be"),
        ("store = 's'\n[draws]\ncount = 3", "`draws` in .* must have `laws`, `count`"),
    ],
)
def test_bad_configurations(text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    arguments = ["sweep", "nowhere.toml"] if text is None else config(tmp_path, text)
    assert cli.main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path("s").exists()


def test_status_of_no_store(tmp_path, capsys):
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "no store at" in capsys.readouterr().err


def test_interrupted_on_the_command_line(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "sweep", interrupted)
    with contextlib.chdir(tmp_path):
        assert cli.main(["run", "--set", "seed=1,2"]) == 130
    assert "goes on from there" in capsys.readouterr().err
