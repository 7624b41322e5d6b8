"""Ensembles: kept stacked, sliced on demand, saved and loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow import Ensemble


def bowl(p):
    return 0.5 * jnp.sum(p["w"] ** 2)


@pytest.fixture(scope="module")
def ensemble():
    starts = {"w": np.array([[1.0, 2.0], [3.0, 4.0], [0.5, 0.1]])}
    return gradflow.integrate_ensemble(
        bowl, starts, [1.0, 2.0, 3.0], ts=[0.5, 1.5, 3.0], solver="tsit5"
    )


def test_each_member_has_its_own_horizon(ensemble):
    np.testing.assert_array_equal(ensemble.end, [1.0, 2.0, 3.0])
    assert [flow.settings.t1 for flow in ensemble] == [1.0, 2.0, 3.0]
    exact = 0.5 * np.array([5.0, 25.0, 0.26])[:, None] * np.exp(-2 * ensemble.ts)
    there = ensemble.ts <= ensemble.end[:, None]
    np.testing.assert_allclose(ensemble.loss[there], exact[there], rtol=1e-6)
    assert np.all(np.isnan(ensemble.loss[~there]))
    np.testing.assert_array_equal(ensemble[0].ts, [0.5, 1.0])
    np.testing.assert_array_equal(ensemble[1].ts, [0.5, 1.5, 2.0])
    final = np.array([[1.0, 2.0], [3.0, 4.0], [0.5, 0.1]])
    final *= np.exp(-ensemble.end)[:, None]
    np.testing.assert_allclose(ensemble.final["w"], final, rtol=1e-6)


def test_members_are_those_of_integrate(ensemble):
    for member, start in zip(ensemble, ([1.0, 2.0], [3.0, 4.0]), strict=False):
        alone = gradflow.integrate(
            bowl,
            {"w": np.array(start)},
            member.settings.t1,
            ts=member.ts,
            solver="tsit5",
        )
        np.testing.assert_allclose(member.loss, alone.loss, rtol=1e-9)
        np.testing.assert_allclose(member.final["w"], alone.final["w"], rtol=1e-9)
        assert member.settings == alone.settings
        assert str(member.certificate).split()[:2] == ["energy", "balance"]


def test_it_is_a_sequence(ensemble):
    assert len(ensemble) == 3
    assert ensemble[-1] is ensemble[2]
    assert ensemble[1:] == (ensemble[1], ensemble[2])
    assert next(iter(ensemble)) is ensemble[0]
    with pytest.raises(IndexError):
        ensemble[3]


@pytest.mark.parametrize("t1", [[1.0, 2.0], [1.0, -2.0, 3.0], [[1.0, 2.0, 3.0]]])
def test_horizons_must_fit_the_members(t1):
    starts = {"w": np.ones((3, 2))}
    with pytest.raises(ValueError, match=r"`t1` must be a positive number, or one for"):
        gradflow.integrate_ensemble(bowl, starts, t1)


def test_saved_and_loaded(ensemble, tmp_path):
    path = ensemble.save(tmp_path / "ensemble.npz")
    loaded = Ensemble.load(path)
    assert len(loaded) == 3
    assert str(loaded) == str(ensemble)
    np.testing.assert_array_equal(loaded.loss, ensemble.loss)
    np.testing.assert_array_equal(loaded[1].params["w"], ensemble[1].params["w"])
    assert loaded[1].certificate == ensemble[1].certificate
    assert loaded[1].problem is None
    known = Ensemble.load(path, loss=bowl)
    np.testing.assert_allclose(
        known[0].at(0.75)["w"], np.exp(-0.75) * np.array([1.0, 2.0]), rtol=1e-6
    )
    with pytest.raises(gradflow.RunFileError, match=r"gradflow\.Ensemble\.load"):
        gradflow.Flow.load(path)
    with pytest.raises(gradflow.RunFileError, match=r"gradflow\.Flow\.load"):
        Ensemble.load(ensemble[0].save(tmp_path / "flow.npz"))


def test_an_ensemble_of_problems_comes_back_with_its_losses(tmp_path):
    problems = [
        gradflow.Problem(
            gradflow.OneLayerTransformer(2, 2),
            gradflow.InfiniteContext(gradflow.MarkovChain.sticky([0.7, 0.3], s)),
        )
        for s in (0.3, 0.6)
    ]
    starts = gradflow.stack([problem.init(scale=0.1) for problem in problems])
    ensemble = gradflow.integrate_ensemble(
        problems, starts, 1.0, ts=[1.0], solver="tsit5", observables=()
    )
    loaded = Ensemble.load(ensemble.save(tmp_path / "e.npz"))
    for a, b in zip(ensemble, loaded, strict=True):
        params = jax.tree.map(jnp.asarray, a.final)
        assert float(b.problem(params)) == float(a.problem(params))
