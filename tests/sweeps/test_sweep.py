"""`sweep`: each point is computed once, and bad input is refused before any work."""

import functools
import importlib.util
import re
import threading

import numpy as np
import pytest
import sweep_tasks
from sweep_tasks import GRID, contents, nothing

from gradflow import open_store, sweep, sweeps
from gradflow.sweeps._store import Store


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


def test_a_task_of_a_script_is_sent_by_value(tmp_path, workers):
    offset = 10

    def shifted(point):
        return {"x": np.float64(point["a"] + offset), "y": np.arange(3) * point["a"]}

    with pytest.raises(
        ValueError, match="it captures `offset`, which its name does not show"
    ):
        sweep(shifted, {"a": [1]}, store=tmp_path / "s", engine=workers)
    report = sweep(
        shifted, {"a": [1, 2]}, store=tmp_path / "s", engine=workers, name="shifted"
    )
    assert report.open().x.values.tolist() == [11.0, 12.0]
    np.testing.assert_array_equal(report.open().y, [[0, 1, 2], [0, 2, 4]])


def test_progress(tmp_path, workers, capsys):
    sweep(
        sweep_tasks.product, GRID, store=tmp_path / "s", engine=workers, progress=True
    )
    assert re.search(r"sweep: 100%.*6/6 \[.*it/s\]", capsys.readouterr().err)


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
        ("huge", "ValueError: .* fit into 64 bits, got 1180591620717411303424 for 'x'"),
        ("objects", "TypeError: .* got entries of type object for 'x'"),
        ("ragged", "ValueError: .* arrays of numbers, got 'x': "),
        ("list", "TypeError: `task` must return a Flow, a Training or .* got list"),
        ("empty", "ValueError: `task` must return at least one number, got none"),
        ("coordinate", "ValueError: .* the name of a coordinate, got 'kind'"),
        ("key", "ValueError: `task` must name its results by strings .* got 3"),
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
        (nothing, {}, {}, "`grid` must have at least one point, got no names"),
        (nothing, [], {}, "`grid` must have at least one point, got an empty list"),
        (nothing, {"a": []}, {}, r"`grid\['a'\]` must have at least one value"),
        (nothing, 3, {}, "`grid` must map names to values or be a list .* got int"),
        (nothing, "ab", {}, "`grid` must map .* got str"),
        (nothing, {"a": [1, 1.0]}, {}, r"`grid\['a'\]` must not repeat a value"),
        (nothing, {"a": [1, "x"]}, {}, "only numbers, only booleans or only strings"),
        (nothing, {"a": [np.nan]}, {}, r"`grid\['a'\]` must not be NaN"),
        (nothing, {"a": [[1]]}, {}, "must be numbers, booleans or strings, got list"),
        (nothing, {"a": np.eye(2)}, {}, r"must be a one-dimensional list .* \(2, 2\)"),
        (nothing, {"a": {}}, {}, r"`grid\['a'\]` must be a list of values, got dict"),
        (nothing, {3: [1]}, {}, "must have non-empty strings as names, got 3"),
        (
            nothing,
            {"point": [1]},
            {},
            "must not use the name 'point', which is reserved",
        ),
        (nothing, [1], {}, r"`grid\[0\]` must be a mapping .* got int"),
        (
            nothing,
            [{"a": 1}, {"b": 1}],
            {},
            r"`grid\[1\]` must have the names .* got b",
        ),
        (3, {"a": [1]}, {}, "`task` must be a function of a point, got int"),
        (Callable, {"a": [1]}, {}, "`task` must be .* got the class Callable"),
        (Callable(), {"a": [1]}, {}, "it is a Callable, which has no name: "),
        (lambda p: p, {"a": [1]}, {}, "it is a lambda, .*: pass `name`"),
        (functools.partial(nothing), {"a": [1]}, {}, "it is a partial, which has no"),
        (
            locked(threading.Lock()),
            {"a": [1]},
            {"name": "locked"},
            "`task` must be .* but `lock`, which it uses, cannot be pickled: ",
        ),
        (nothing, {"a": [1]}, {"engine": "dask"}, "`engine` must be 'local' or 'ray'"),
        (nothing, {"a": [1]}, {"gpus": 1}, "`gpus` must be left out unless `engine`"),
        (nothing, {"a": [1]}, {"workers": 0}, "`workers` must be a whole number"),
        (nothing, {"a": [1]}, {"cpus": 9999}, "`cpus` must be at most the .* cores"),
        (nothing, {"a": [1]}, {"retries": -1}, "`retries` must be a whole number"),
        (nothing, {"a": [1]}, {"version": "new"}, "`version` must be a whole number"),
        (
            nothing,
            {"a": [1]},
            {"name": ""},
            "`name` must be a non-empty string, got ''",
        ),
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
