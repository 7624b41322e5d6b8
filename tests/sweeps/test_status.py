"""The state of a store, the objects that users print, and the names that they see."""

import pytest

import gradflow
from gradflow import StoreError, sweeps
from gradflow.sweeps._store import Failure, Store


def test_two_grids_that_make_no_product_are_done_when_both_are(tmp_path, stored):
    for at in (1, 2):
        stored(tmp_path / "s", {"a": [at], "b": [at]}, {"x": 1.0})
    status = sweeps.status(tmp_path / "s")
    assert (status.results, status.points, status.is_complete) == (2, 2, True)
    assert "results          2 of 2 (100%)" in str(status)


def test_status_lists_failures_damage_and_older_versions(tmp_path, stored):
    path = tmp_path / "s"
    store: Store = stored(path, {"a": [1, 2, 3]}, {"x": 1.0})
    keys = [store.key({"a": a}) for a in (1, 2, 3)]
    store.file(keys[0]).unlink()
    store.write_failure(Failure({"a": 1}, "RuntimeError: one", "line 1\nline 2\n"))
    store.file(keys[1]).write_bytes(b"half a res")
    (path / "results" / "of another version.npz").touch()

    unchecked = sweeps.status(path)
    assert unchecked.damaged is None
    assert "damaged" not in str(unchecked)
    status = sweeps.status(path, check=True)
    assert repr(status) == "Status(2 of 3 results, 1 failed)"
    assert not status.is_complete
    assert status.damaged is not None
    assert str(status).splitlines() == [
        f"store            {path}",
        "task             made, version 1",
        "grid             3 a = 3 points",
        "results          2 of 3 (67%)",
        "failed           1",
        "  a = 1: RuntimeError: one",
        "older versions   1 results",
        "damaged          1",
        f"  {status.damaged[0]}",
    ]
    assert f"{keys[1]}.npz' is damaged" in status.damaged[0]
    assert "    line 2" in status.table(tracebacks=True).splitlines()


def test_damage_alone_makes_a_store_incomplete(tmp_path, stored):
    store = stored(tmp_path / "s", {"a": [1]}, {"x": 1.0})
    store.file(store.key({"a": 1})).write_bytes(b"half a res")
    assert sweeps.status(tmp_path / "s").is_complete
    assert not sweeps.status(tmp_path / "s", check=True).is_complete


@pytest.mark.parametrize(
    ("path", "message"),
    [(3, "`path` must be a path, got int"), ("nowhere", "no store at 'nowhere'")],
)
def test_status_of_no_store(path, message):
    with pytest.raises(ValueError, match=message):
        sweeps.status(path)


def test_a_sweep_is_short_in_a_prompt_and_a_table_when_printed(tmp_path):
    failures = [Failure({"a": a}, "RuntimeError", "…") for a in range(12)]
    sweep = sweeps.Sweep(tmp_path, 1012, 400, 600, failures, [tmp_path / "x.npz"])
    assert repr(sweep) == "Sweep(1,012 points: 600 computed, 400 reused, 12 failed)"
    lines = str(sweep).splitlines()
    assert lines[:4] == [
        f"Sweep over 1,012 points into {tmp_path}",
        "computed         600",
        "reused           400",
        "failed           12",
    ]
    assert lines[4] == "  a = 0: RuntimeError"
    assert lines[-3:] == [
        "  … and 2 more",
        "damaged          1, computed again",
        f"  {tmp_path / 'x.npz'}",
    ]


def test_workers_say_how_many_they_are():
    assert repr(sweeps.LocalWorkers(2)) == "LocalWorkers(2, cpus=1)"


def test_the_namespace_lists_what_users_may_use():
    assert dir(sweeps) == sorted(sweeps.__all__)
    for name in sweeps.__all__:
        value = getattr(sweeps, name)
        assert value.__module__.startswith("gradflow.sweeps.")
        assert value.__doc__
    assert not [name for name in dir(sweeps) if name.startswith("_")]
    assert StoreError is sweeps.StoreError
    assert gradflow.sweep is sweeps.sweep
