"""Processes that die: nothing computed is lost or computed twice."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import sweep_tasks
from sweep_tasks import contents

from gradflow import open_store, sweep
from gradflow.sweeps._store import Store


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
