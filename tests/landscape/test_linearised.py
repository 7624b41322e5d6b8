"""Linear flows about a point, against matrix exponentials and flows by SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from landscape_cases import (
    PI,
    ZERO,
    P,
    Quadratic,
    flat,
    parameters,
    perturbed,
    weights_of,
)

import gradflow
from gradflow.landscape import find_critical_point, linearised_flow


@pytest.fixture(scope="module")
def linear_problem():
    """Unstable, null and stiff directions, about a point that is not critical."""
    eigenvalues = np.r_[-0.3, -0.3, np.zeros(20), np.geomspace(1e-3, 30, 98)]
    H = oracles.symmetric(eigenvalues)
    rng = np.random.default_rng(2)
    g, centre, start = 0.1 * rng.normal(size=120), *rng.normal(size=(2, 120))
    ts = np.array([0.0, 1e-3, 0.5, 4.0, 4.5, 25.0])
    loss = Quadratic(H, g, centre)
    expected = centre + oracles.linear_flow(H, g, start - centre, ts)
    return loss, centre, start, ts, expected


@pytest.mark.parametrize("size", [None, 96, 24])
def test_linear_flow_is_the_exponential(linear_problem, monkeypatch, size):
    """By eigenvectors, in one Krylov space, and in many."""
    loss, centre, start, ts, expected = linear_problem
    if size is not None:
        monkeypatch.setattr(gradflow.landscape._linearised, "DENSE_SIZE", 10)
        monkeypatch.setattr(gradflow.landscape._linearised, "KRYLOV_SIZE", size)
    found = linearised_flow(loss, centre, start, ts)
    assert found.shape == (6, 120)
    scale = np.max(np.abs(expected), axis=1, keepdims=True)
    np.testing.assert_allclose(found / scale, expected / scale, atol=1e-10)
    with pytest.raises(ValueError, match="before the linear flow overflows"):
        linearised_flow(loss, centre, start, [0, 1.0, 3e3])


def test_linear_flow_about_a_critical_point_uses_its_spectrum(small, first_saddle):
    weights, _, _ = first_saddle
    point = find_critical_point(small, parameters(weights))
    start, ts = perturbed(weights, 1e-3, seed=5), np.array([0.0, 2.0, 9.0])
    found = linearised_flow(small, point, start, ts)
    H = oracles.infinite_context_hessian(PI, P, weights)
    theta = flat(weights)
    expected = theta + oracles.linear_flow(H, 0 * theta, flat(start) - theta, ts)
    assert found.W0.shape == (3, 4, 6)
    rows = np.concatenate([x.reshape(3, -1) for x in jax.tree.leaves(found)], axis=1)
    np.testing.assert_allclose(rows, expected, atol=1e-9)


@pytest.mark.parametrize(("place", "slope"), [("zero", 3), ("first saddle", 2)])
def test_the_error_of_the_linear_flow_scales_with_the_distance(
    small, first_saddle, place, slope
):
    """‖θ(t) - linear flow‖ ∝ ε³ about zero and ε² about θ¹ (theory.md)."""
    weights = ZERO if place == "zero" else first_saddle[0]
    point = find_critical_point(small, parameters(weights))
    ts, errors = np.array([0.0, 3.0]), []
    for scale in (1e-2, 1e-3):
        start = perturbed(weights, scale, seed=7)
        linear = linearised_flow(small, point, start, ts)
        true = oracles.scipy_flow(PI, P, [np.asarray(w) for w in weights_of(start)], ts)
        errors.append(
            np.linalg.norm(flat(jax.tree.map(lambda w: w[-1], linear)) - true[-1])
        )
    assert np.log10(errors[0] / errors[1]) == pytest.approx(slope, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((np.ones(2), np.ones(2), [0, np.nan]), "`ts` must be finite"),
        (
            (np.ones(2), np.ones(2), [1.0, 0.5]),
            "`ts` must increase strictly, but is no",
        ),
        ((np.ones(2), np.ones(2), [1.0, 1.0]), "`ts` must increase .* repeated"),
        ((np.ones(2), np.ones(2), [-1.0, 1.0]), "`ts` must not be negative, got -1"),
        ((np.ones(2), np.ones(2), []), "`ts` must be a one-dimensional list"),
        (
            (np.ones(2), np.ones(3), [1.0]),
            r"`params` must have the shape .*\(2,\), got",
        ),
        (([np.ones(2)], np.ones(2), [1.0]), "`params` must have the structure of"),
        ((np.ones(2), [np.ones(2)], [1.0]), "`params` must have the structure of"),
        ((np.array([np.nan]), np.ones(1), [1.0]), "`critical_point` must be finite"),
        ((np.ones(1), np.array([np.inf]), [1.0]), "`params` must be finite"),
    ],
)
def test_bad_linear_flows_are_refused(arguments, says):
    def loss(x):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(x))

    with pytest.raises(ValueError, match=says):
        linearised_flow(loss, *arguments)
