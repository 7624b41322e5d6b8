"""Run files of every format version are read. `data/` keeps files of each version; the
script that wrote those of version 1 ran on gradflow 0.1.0."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow import Flow, Training
from gradflow._core import file_format

DATA = Path(__file__).parent / "data"
TS = np.append(0.0, np.geomspace(0.1, 50, 9))


@pytest.fixture(scope="module")
def population():
    return gradflow.InfiniteContext(
        gradflow.MarkovChain.sticky([0.75, 0.19, 0.05, 0.01], 0.5)
    )


@pytest.fixture(scope="module")
def problem(population):
    return gradflow.Problem(gradflow.OneLayerTransformer(4, 2), population)


def assert_follows(old, new):
    np.testing.assert_array_equal(old.ts, new.ts)
    np.testing.assert_allclose(old.loss, new.loss, rtol=1e-6)
    assert set(old.observables) == set(new.observables)


def test_a_flow_of_version_1(problem):
    old = Flow.load(DATA / "flow-v1.npz")
    new = gradflow.integrate(
        problem, problem.init(seed=1, scale=1e-2), 50.0, ts=TS, rtol=1e-6
    )
    assert_follows(old, new)
    assert old.settings == new.settings
    assert old.stats.versions["gradflow"] == "0.1.0"
    assert old.stats.num_accepted_steps == pytest.approx(
        new.stats.num_accepted_steps, rel=0.1
    )
    assert old.certificate.energy_imbalance < 1e-6
    assert set(old.certificate.drift) == set(new.certificate.drift)
    # It is complete: its loss is known, and it can be resumed.
    longer = gradflow.resume(old, 60.0)
    assert longer.certificate.energy_imbalance >= old.certificate.energy_imbalance
    assert longer.loss[-1] < old.loss[-1]


def test_a_renamed_class_of_version_1(population):
    old = Flow.load(DATA / "rank-one-v1.npz")
    assert isinstance(old.problem, gradflow.RankOneProblem)
    start = old.problem.init(seed=1, scale=1e-2)
    np.testing.assert_allclose(old.start.gamma, start.gamma, rtol=1e-12)


def test_a_training_run_of_version_1(problem):
    old = Training.load(DATA / "training-v1.npz")
    new = gradflow.train(
        problem, problem.init(seed=1, scale=1e-2), 0.1, 200, saved=[10, 100]
    )
    assert_follows(old, new)
    assert old.learning_rates == new.learning_rates == (0.1, 0.1)
    assert old.t1 == pytest.approx(new.t1)
    assert old.certificate.energy_imbalance == pytest.approx(
        new.certificate.energy_imbalance, rel=1e-6
    )
    with pytest.raises(gradflow.RunFileError, match=r"gradflow\.Training\.load"):
        Flow.load(DATA / "training-v1.npz")


def test_a_flow_of_a_users_loss_of_version_1():
    def own(p):
        return jnp.sum((p["a"] ** 2 - 1) ** 2)

    assert Flow.load(DATA / "own-loss-v1.npz").problem is None
    old = Flow.load(DATA / "own-loss-v1.npz", loss=own)
    assert float(own(old.at(2.5))) < old.loss[1]


def test_there_is_a_file_of_each_older_version():
    kept = {path.stem.rpartition("-v")[2] for path in DATA.glob("*.npz")}
    older = [v for v in file_format.READABLE_VERSIONS if v < file_format.FORMAT_VERSION]
    assert kept == {str(version) for version in older}
    assert file_format.FORMAT_VERSION in file_format.READABLE_VERSIONS
