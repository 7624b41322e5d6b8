"""Stores: results that are lost, damaged or foreign are never used."""

import errno
import json
import os
import stat

import numpy as np
import pytest
import sweep_tasks
import xarray
from sweep_tasks import GRID, contents

import gradflow
from gradflow import StoreError, SweepError, open_store, sweep, sweeps
from gradflow._core import file_format
from gradflow.sweeps import _result
from gradflow.sweeps._store import Store


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
    with pytest.warns(
        UserWarning, match=f"{file.name}' is damaged.* will be computed again"
    ):
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
        if stat.S_ISREG(os.fstat(handle).st_mode):  # folders take no more space
            calls.append(handle)
        if len(calls) > 6:  # two of them for the store itself
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(file_format.os, "fsync", full)
        with pytest.raises(
            SweepError, match=r"No space left on device.* The 4 results computed before"
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


def test_foreign_stores_are_refused(tmp_path, workers):
    store = tmp_path / "s"

    def refused(match, task=sweep_tasks.product, grid=GRID, **options):
        with pytest.raises(StoreError, match=match):
            sweep(task, grid, **{"store": store, "version": 2, **options})

    sweep(sweep_tasks.product, GRID, store=store, engine=workers, version=2)
    refused(
        "results of the task 'sweep_tasks:product', got 'sweep_tasks:nothing'",
        sweep_tasks.nothing,
    )
    refused("version 2 of its task, got the older version 1", version=1)
    refused(r"points over a \(number\), b \(number\), got a \(number\)", grid={"a": 1})
    refused(r"b \(number\), got a \(number\), b \(string\)", grid={"a": 1, "b": "x"})
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
    refused("`store` must be a store or a new folder, got .* has other files in it")
    store = tmp_path / "file"
    store.write_text("mine")
    refused("is a file, not a store")
    with pytest.raises(StoreError, match="no store at"):
        open_store(tmp_path / "nowhere")
