"""`gradflow run --set`, `gradflow sweep` and `gradflow status`."""

import contextlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import sweep_tasks

import gradflow
from gradflow import open_store, sweep
from gradflow.cli import _sweep as command, main
from gradflow.sweeps import _runs

FLOWS = (
    *("run", "--stationary", "0.6,0.2,0.1,0.1", "--width", "3", "--head-width", "2"),
    *("--horizon", "8", "--rtol", "1e-5", "--solver", "tsit5", "--no-progress"),
)


def test_run_set(tmp_path, capsys, monkeypatch):
    """The task is that of `gradflow run`; tests/sweeps covers its way to workers."""
    asked, integrated = [], []

    def record(task, grid, **options):
        asked.append((task, grid, options))
        return sweep(
            sweep_tasks.unstorable, {"kind": ["empty"]}, store=tmp_path / "other"
        )

    monkeypatch.setattr(command, "sweep", record)
    output = tmp_path / "s"
    options = [*FLOWS, "--output", str(output), "--workers", "1"]
    assert main([*options, "--set", "seed=0,3", "--set", "scale=0.01"]) == 1
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
        _runs, "integrate", lambda *args, **kw: integrated.append((args, kw))
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
        ("--set seed", "--set must be NAME=A,B,C where NAME is one of"),
        ("--set colour=red", "--set must be NAME=A,B,C where NAME is one of"),
        ("--set seed=1,x", "--set seed must be values of type int separated by commas"),
        ("--set seed=1 --set seed=2", "--set must give seed only once"),
        ("--set width=3,0", "`width` must be a whole number of at least 1, got 0"),
        ("--set scale=-1", "`scale` must be a finite number, zero or more"),
        ("--set rtol=0", "`rtol` must be a positive number"),
        ("--set solver=magic", "`solver` must be one of"),
        ("--set step=0.1", "`step` must be left out unless `solver` is rk4 or euler"),
        ("--set seed=1 --engine dask", "`engine` must be 'local' or 'ray'"),
        ("--workers 2", "--workers needs --set"),
    ],
)
def test_bad_settings(arguments, message, tmp_path, capsys):
    output = tmp_path / "s"
    assert main(["run", *arguments.split(), "--output", str(output)]) == 2
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
    assert main(config(tmp_path, text + grid)) == 1
    assert "a = 7, b = 10.0: RuntimeError: seven" in capsys.readouterr().out
    assert open_store(store).x.sel(b=10.0).values.tolist()[:2] == [10, 12]

    assert main(["status", str(store)]) == 1
    printed = capsys.readouterr().out
    assert "cli_tasks:double, version 1" in printed
    assert "3 a × 3 b = 9 points" in printed
    assert "results          6 of 9 (67%)" in printed
    assert "a = 7, b = 1.0: RuntimeError: seven" in printed
    assert main(["status", str(store), "--traceback"]) == 1
    assert 'raise RuntimeError("seven")' in capsys.readouterr().out

    draws = (
        "[draws]\ncount = 3\ndistributions = { a = [1, 2], b = { uniform = [0, 1] } }\n"
    )
    drawn = text.replace(str(store), str(tmp_path / "t"))
    assert main(config(tmp_path, drawn + draws)) == 0
    assert main(["status", str(tmp_path / "t"), "--check"]) == 0
    capsys.readouterr()
    file = next((tmp_path / "t" / "results").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["status", str(tmp_path / "t"), "--check"]) == 1
    assert f"{file.name}' is damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("= 3", "is not a TOML file"),
        ("[grid]\na = [1]", "`store` in .* must be the path of a folder, got None"),
        ("store = 's'\ncolour = 1", "may have the keys .*, got 'colour'"),
        ("store = 's'", "must have one of `grid`, `points` and `draws`, got none"),
        ("store = 's'\n[grid]", "`grid` must have at least one point"),
        (
            "store = 's'\n[grid]\nseed = { log = [1] }",
            "`grid.seed` must be a list or one",
        ),
        (
            "store = 's'\n[grid]\nseed = { range = [] }",
            r"`grid.seed` cannot be { range = \[\] }: range expected",
        ),
        (
            "store = 's'\n[grid]\nseed = { linear = [0, 1] }",
            r"`grid.seed` must be \{ linear = \[first, last, count\] \}, got \[0, 1\]",
        ),
        ("store = 's'\n[grid]\na = [1]", "a sweep of runs can vary .*, got 'a'"),
        ("store = 's'\n[grid]\nwidth = [0]", "`width` must be a whole number"),
        ("store = 's'\ntask = 'x'\n[grid]\na = [1]", "must be module:function or"),
        ("store = 's'\ntask = 'no_such:f'\n[grid]\na = [1]", "No module named"),
        ("store = 's'\ntask = 'math:f'\n[grid]\na = [1]", "cannot be imported"),
        ("store = 's'\n[run]\ncolour = 1\n[grid]\nseed = [1]", "`run` in .* must be"),
        (
            "store = 's'\n[draws]\ncount = 3",
            "`draws` in .* must have `distributions`, `count`",
        ),
    ],
)
def test_bad_configurations(text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    arguments = ["sweep", "nowhere.toml"] if text is None else config(tmp_path, text)
    assert main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path("s").exists()


def test_status_of_no_store(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert "no store at" in capsys.readouterr().err


def test_interrupted_on_the_command_line(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "sweep", interrupted)
    with contextlib.chdir(tmp_path):
        assert main(["run", "--set", "seed=1,2"]) == 130
    assert "continues from there" in capsys.readouterr().err
