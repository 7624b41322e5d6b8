"""Worker processes on this machine."""

import os
from pathlib import Path

import numpy as np
import pytest
import sweep_tasks

import gradflow
from gradflow import sweep, sweeps


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
