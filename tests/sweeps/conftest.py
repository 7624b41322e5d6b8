"""Workers and logs that the tests of sweeps share."""

import numpy as np
import pytest
import sweep_tasks

import gradflow
from gradflow import sweeps
from gradflow.sweeps import _result
from gradflow.sweeps._grid import as_grid
from gradflow.sweeps._store import Store


@pytest.fixture(scope="session")
def workers():
    """Workers that serve many tests, as each start of a process takes a while."""
    with sweeps.LocalWorkers(2) as workers:
        yield workers


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A file to which tasks write what they compute."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("SWEEP_LOG", str(path))
    return path


@pytest.fixture(scope="session")
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
    grid = as_grid({"loss": [1, 2]})
    store = Store.for_sweep(tmp_path / "flows", "flows", 1, grid)
    store.create(grid)
    for point, one in zip(grid.points(), (flow, early), strict=True):
        store.write(point, _result.encode(one, store.label(point)))
    return store


@pytest.fixture
def stored():
    """A function that makes a store with the same result at all points."""

    def make(path, grid, result):
        grid = as_grid(grid)
        store = Store.for_sweep(path, "made", 1, grid)
        store.create(grid)
        for point in grid.points():
            store.write(point, _result.encode(result, store.label(point)))
        return store

    return make
