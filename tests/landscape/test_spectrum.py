"""Spectra of Hessians, against closed forms, NumPy and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import scipy.linalg
from landscape_cases import PI, P, Quadratic, bowl, flat

from gradflow.landscape import (
    Spectrum,
    SpectrumError,
    find_critical_point,
    hessian_spectrum,
)


def test_dense_spectrum_of_a_quadratic():
    eigenvalues = np.sort(np.r_[-3.0, -3.0, -1e-3, np.zeros(4), 0.5, 2.0, 2.0, 40.0])
    H = oracles.symmetric(eigenvalues)

    def loss(params):
        x = jnp.concatenate([params["a"].ravel(), params["b"][None], params["c"]])
        return 0.5 * x @ jnp.asarray(H) @ x

    rng = np.random.default_rng(1)
    params = {"a": rng.normal(size=(2, 3)), "b": np.array(1.0), "c": np.ones(4)}
    found = hessian_spectrum(loss, params)
    assert isinstance(found, Spectrum)
    np.testing.assert_allclose(found.eigenvalues, eigenvalues, atol=1e-13)
    V = found.eigenvectors
    np.testing.assert_allclose(V.T @ V, np.eye(11), atol=1e-13)
    residuals = np.linalg.norm(H @ V - V * found.eigenvalues, axis=0)
    assert np.max(residuals) < 1e-12
    assert np.max(found.residuals) < 1e-12
    assert found.is_complete
    # The same vector, in the shapes of the parameters.
    top = found.direction(-1)
    assert top["a"].shape == (2, 3)
    assert top["b"].shape == ()
    np.testing.assert_array_equal(flat(top), V[:, -1])
    assert "-3 (×2), -0.001, " in str(found)
    assert "all eigenvalues" in str(found)


@pytest.fixture(scope="module")
def at_random(reference):
    params = reference.init(seed=3, scale=0.7)
    return params, hessian_spectrum(reference, params)


def test_dense_spectrum_agrees_with_the_analytic_gradient(at_random, weights):
    params, found = at_random
    H = oracles.infinite_context_hessian(PI, P, weights(params))
    expected = np.linalg.eigvalsh(H)
    assert np.max(np.abs(expected)) > 1
    np.testing.assert_allclose(found.eigenvalues, expected, atol=1e-9)
    np.testing.assert_allclose(
        H @ found.eigenvectors[:, 0],
        expected[0] * found.eigenvectors[:, 0],
        atol=1e-9,
    )


def test_matrix_free_spectrum_agrees_with_the_dense_one(reference, at_random):
    """At zero, the same compiled search finds the lowest eigenvalue -‖π‖·‖π - 1/d‖ with
    its multiplicity m."""
    params, whole = at_random
    found = hessian_spectrum(reference, params, 12)
    assert found.method == "block Lanczos"
    assert found.products > 12
    expected = np.r_[whole.eigenvalues[:12], whole.eigenvalues[-12:]]
    np.testing.assert_allclose(found.eigenvalues, expected, atol=1e-8)
    # The residuals are those of the returned pairs.
    V, size = found.eigenvectors, np.abs(whole.eigenvalues).max()
    H = (whole.eigenvectors * whole.eigenvalues) @ whole.eigenvectors.T
    residuals = np.linalg.norm(H @ V - V * found.eigenvalues, axis=0)
    np.testing.assert_allclose(found.residuals, residuals, atol=1e-12)
    assert np.max(residuals) < 1e-8 * size
    np.testing.assert_allclose(V.T @ V, np.eye(24), atol=1e-12)

    zero = hessian_spectrum(reference, reference.init(scale=0.0), 12)
    rate = oracles.first_rate(PI)
    np.testing.assert_allclose(zero.eigenvalues[:10], -rate, atol=1e-14)
    np.testing.assert_allclose(zero.eigenvalues[10:14], 0, atol=1e-14)
    np.testing.assert_allclose(zero.eigenvalues[14:], rate, atol=1e-14)


@pytest.mark.parametrize("which", ["smallest", "largest", "both"])
def test_multiple_eigenvalues_are_found_with_their_multiplicity(which):
    """More copies than are wanted, and fewer, in a search that has to restart."""
    copies = np.r_[[-1.0] * 9, [1.75] * 4, [1.8] * 3]
    eigenvalues = np.sort(np.r_[copies, np.linspace(-0.8, 1.6, 184)])
    loss, k = Quadratic(oracles.symmetric(eigenvalues)), 6
    found = hessian_spectrum(loss, np.ones(200), k, which=which)
    low, high = eigenvalues[:k], eigenvalues[-k:]
    expected = {"smallest": low, "largest": high, "both": np.r_[low, high]}[which]
    np.testing.assert_allclose(found.eigenvalues, expected, atol=1e-8)
    assert found.products > 64
    assert np.max(found.residuals) < 1.8e-8


def test_against_scipy_on_a_disordered_chain():
    """n = 30,000, where the dense Hessian would take 7 GB."""
    n = 30_000
    rng = np.random.default_rng(0)
    diagonal = rng.normal(size=n) + 20 * (rng.random(n) < 3e-4) * rng.normal(size=n)
    off = np.full(n - 1, -1.0)
    expected = [
        scipy.linalg.eigh_tridiagonal(
            diagonal, off, eigvals_only=True, select="i", select_range=(i, i + 2)
        )
        for i in (0, n - 3)
    ]

    def loss(x):
        return 0.5 * jnp.sum(jnp.asarray(diagonal) * x**2) - jnp.sum(x[1:] * x[:-1])

    found = hessian_spectrum(loss, np.zeros(n), 3)
    np.testing.assert_allclose(found.eigenvalues, np.concatenate(expected), rtol=1e-10)
    for i in (0, 5):
        v = found.eigenvectors[:, i]
        Tv = diagonal * v - np.append(v[1:], 0) - np.append(0, v[:-1])
        assert np.linalg.norm(Tv - found.eigenvalues[i] * v) < 1e-6


def test_few_parameters_and_many_eigenpairs_are_dense():
    eigenvalues = np.arange(1.0, 13.0)
    loss = Quadratic(oracles.symmetric(eigenvalues))
    found = hessian_spectrum(loss, np.zeros(12), 2)
    assert found.method == "dense"
    np.testing.assert_allclose(found.eigenvalues, [1, 2, 11, 12])
    every = hessian_spectrum(loss, np.zeros(12), 12)
    np.testing.assert_allclose(every.eigenvalues, eigenvalues)


def test_a_search_that_does_not_converge_reports_its_result():
    """The lowest eigenvalues form a cluster that no short search resolves."""
    eigenvalues = np.sort(np.r_[np.linspace(0, 1e-3, 100), np.linspace(1, 2, 100)])
    loss = Quadratic(oracles.symmetric(eigenvalues))
    with pytest.raises(SpectrumError, match="did not converge within") as caught:
        hessian_spectrum(loss, np.ones(200), 6, which="smallest", max_products=90)
    found = caught.value.spectrum
    assert f"{np.max(found.residuals):.1e}" in str(caught.value)
    assert len(found.eigenvalues) == 6
    # Its result is as accurate as its residuals say.
    for value, residual in zip(found.eigenvalues, found.residuals, strict=True):
        assert np.min(np.abs(eigenvalues - value)) <= residual + 1e-12


def test_a_hessian_that_does_not_fit_is_refused():
    def loss(x):
        return jnp.sum(x**4)

    with pytest.raises(ValueError, match="n = 1,000,000") as caught:
        hessian_spectrum(loss, np.ones(1_000_000))
    assert "40 TB" in str(caught.value)
    assert "hessian_spectrum(loss, params, k=...)" in str(caught.value)
    with pytest.raises(ValueError, match="40 TB"):
        find_critical_point(loss, np.ones(1_000_000), dense=True)
    with pytest.raises(ValueError, match="`k` must be smaller"):
        hessian_spectrum(loss, np.ones(1_000_000), 400_000)


def test_a_seed_may_be_a_key():
    loss = Quadratic(oracles.symmetric(np.linspace(-1.0, 2.0, 200)))
    by_number, by_key = (
        hessian_spectrum(loss, np.ones(200), 2, tolerance=1e-4, seed=seed)
        for seed in (3, jax.random.key(3))
    )
    np.testing.assert_array_equal(by_number.eigenvalues, by_key.eigenvalues)


def test_a_direction_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="one of 3 eigenvectors, got 3"):
        hessian_spectrum(bowl, np.ones(3)).direction(3)
