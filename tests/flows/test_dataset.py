"""Flows and ensembles as datasets: dimensions with names, tokens with labels, and files
that NetCDF can hold."""

import jax.numpy as jnp
import numpy as np
import pytest

import gradflow

LABELS = ["the", "of", "cat", "mat"]


@pytest.fixture(scope="module")
def problem():
    chain = gradflow.MarkovChain.sticky([0.75, 0.19, 0.05, 0.01], 0.5, labels=LABELS)
    model = gradflow.OneLayerTransformer(4, 6, 3)
    return gradflow.Problem(model, gradflow.InfiniteContext(chain))


@pytest.fixture(scope="module")
def flow(problem):
    return gradflow.integrate(
        problem, problem.init(), 1.0, ts=[0.0, 0.5, 1.0], solver="tsit5", rtol=1e-4
    )


def test_dimensions_have_names_and_tokens_have_labels(flow):
    data = flow.to_xarray()
    assert data["attention"].dims == ("time", "query", "key")
    assert data["embedding_norms"].dims == ("time", "token")
    assert data["W0"].dims == ("time", "token", "width")
    assert list(data["query"].values) == LABELS
    np.testing.assert_allclose(
        data["attention"].sel(query="cat", key="the").values,
        flow.observables["attention"][:, 2, 0],
    )
    # Axes of one name and several lengths do not clash.
    assert data["singular_values_W0"].shape == (3, 4)
    assert data["singular_values_QK"].shape == (3, 6)


def test_a_dataset_can_be_written_to_netcdf(flow, tmp_path):
    xarray = pytest.importorskip("xarray")
    data = flow.to_xarray()
    assert all(isinstance(v, str | int | float) for v in data.attrs.values())
    assert not any(isinstance(v, bool) for v in data.attrs.values())
    path = tmp_path / "flow.nc"
    data.to_netcdf(path)
    with xarray.open_dataset(path) as again:
        np.testing.assert_array_equal(again["loss"].values, flow.loss)
        assert again.attrs["solver"] == "tsit5"


def test_training_runs_and_ensembles_too(problem, tmp_path):
    training = gradflow.train(problem, problem.init(), 0.1, 4)
    training.to_xarray().to_netcdf(tmp_path / "training.nc")
    assert training.to_xarray().attrs["largest_learning_rate"] == 0.1
    ensemble = gradflow.integrate_ensemble(
        problem,
        gradflow.stack([problem.init(seed=s) for s in range(2)]),
        1.0,
        ts=[0.5, 1.0],
        solver="tsit5",
        rtol=1e-4,
        observables=["attention"],
    )
    data = ensemble.to_xarray()
    assert data["attention"].dims == ("member", "time", "query", "key")
    assert list(data["key"].values) == LABELS
    data.to_netcdf(tmp_path / "ensemble.nc")


def test_a_plain_loss_has_numbered_dimensions():
    flow = gradflow.integrate(
        lambda p: jnp.sum(p["w"] ** 2), {"w": jnp.ones((2, 3))}, 1.0, solver="tsit5"
    )
    assert flow.to_xarray()["w"].dims == ("time", "w_0", "w_1")
