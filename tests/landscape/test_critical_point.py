"""Critical points, against closed forms and flows by SciPy."""

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from landscape_cases import (
    PI,
    ZERO,
    Factorisation,
    P,
    Polynomial,
    Quadratic,
    flat,
    parameters,
    perturbed,
    weights_of,
)

from gradflow.landscape import CriticalPoint, CriticalPointError, find_critical_point


def test_a_quadratic_takes_one_step():
    """However badly conditioned: the Hessian is constant, so every direction is
    certain."""
    eigenvalues = np.array([-1e3, -1e-5, 1e-6, 2.0, 5e4])
    c = np.array([1.0, -2.0, 0.5, 3.0, -1.0])
    found = find_critical_point(Quadratic(np.diag(eigenvalues), c=c), np.zeros(5))
    assert found.steps == 1
    np.testing.assert_allclose(found.params, c, rtol=1e-9)
    np.testing.assert_allclose(found.eigenvalues, np.sort(eigenvalues))
    assert (found.index, found.nullity) == (2, 0)
    assert found.distance == pytest.approx(np.linalg.norm(c), rel=1e-9)


# (x² + y - 11)² + (x + y² - 7)²
HIMMELBLAU = Polynomial(
    x4y0=1, x2y1=2, x2y0=-21, x0y2=-13, x0y1=-22, x1y2=2, x0y4=1, x1y0=-14, x0y0=170
)


@pytest.mark.parametrize(
    ("near", "point", "index"),
    [
        # The roots of ∇L in closed form are those of a quintic; these digits are from
        # its companion matrix, see below.
        ((0.2, 3.0), (0.0866775, 2.8842547), 1),
        ((-3.2, 0.1), (-3.0730258, -0.0813530), 1),
        ((-0.4, -1.1), (-0.2708446, -0.9230386), 2),
        ((3.1, 1.8), (3.0, 2.0), 0),
    ],
)
def test_critical_points_of_himmelblaus_function(near, point, index):
    found = find_critical_point(HIMMELBLAU, np.array(near))
    np.testing.assert_allclose(found.params, point, atol=1e-7)
    x, y = found.params
    # ∂L/∂x = 0 and ∂L/∂y = 0, differentiated by hand.
    assert abs(4 * x * (x**2 + y - 11) + 2 * (x + y**2 - 7)) < 1e-11
    assert abs(2 * (x**2 + y - 11) + 4 * y * (x + y**2 - 7)) < 1e-11
    assert (found.index, found.nullity) == (index, 0)
    assert found.kind == ("Minimum", "Saddle", "Maximum")[index]


def test_a_cubic_saddle_converges_quadratically():
    loss = Polynomial(x2y0=1, x0y2=-1, x3y0=1, x1y2=1)
    found = find_critical_point(loss, np.array([0.1, -0.1]))
    np.testing.assert_allclose(found.params, 0, atol=1e-12)
    assert found.steps <= 5
    assert (found.index, found.nullity) == (1, 0)


def test_a_degenerate_point_is_recognised():
    """Newton's method converges slowly, and every eigenvalue counts as null."""
    start = np.array([0.3, 0.1])
    monkey = find_critical_point(Polynomial(x3y0=1, x1y2=-3), start)
    np.testing.assert_allclose(monkey.params, 0, atol=1e-6)
    assert (monkey.index, monkey.nullity) == (0, 2)
    assert monkey.kind == "Degenerate critical point"
    # Degenerate in one of two directions.
    half = find_critical_point(Polynomial(x4y0=1, x0y2=-1), start)
    np.testing.assert_allclose(half.params, 0, atol=1e-4)
    assert (half.index, half.nullity) == (1, 1)


def test_a_circle_of_minima_is_reached_on_the_shortest_way():
    # (x² + y² - 1)²
    loss = Polynomial(x4y0=1, x2y2=2, x0y4=1, x2y0=-2, x0y2=-2, x0y0=1)
    found = find_critical_point(loss, np.array([0.9, 1.2]))
    np.testing.assert_allclose(found.params, [0.6, 0.8], atol=1e-9)
    assert (found.index, found.nullity) == (0, 1)
    assert found.kind == "Critical point of index 0"
    np.testing.assert_allclose(found.eigenvalues, [0, 8], atol=1e-9)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e-2])
def test_zero_is_recovered(small, scale):
    start = perturbed(ZERO, scale)
    found = find_critical_point(small, start)
    assert isinstance(found, CriticalPoint)
    assert found.gradient_norm <= 1e-12
    assert found.loss == pytest.approx(np.log(4), abs=1e-13)
    assert (found.index, found.nullity) == (6, 72)
    rate = oracles.first_rate(PI)
    np.testing.assert_allclose(found.eigenvalues[:6], -rate, rtol=1e-12 + 4 * scale**2)
    # It moved no farther than its initial distance.
    assert found.distance <= np.linalg.norm(flat(start))
    moved = np.linalg.norm(flat(found.params) - flat(start))
    assert found.distance == pytest.approx(moved, rel=1e-10)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e-3, 1e-2])
def test_first_saddle_is_recovered(small, first_saddle, kappa, scale):
    weights, _, _ = first_saddle
    start = perturbed(weights, scale)
    found = find_critical_point(small, start)
    assert found.gradient_norm <= 1e-12
    assert found.loss == pytest.approx(oracles.entropy(PI), abs=1e-13)
    assert (found.index, found.nullity) == (3, 75)
    assert found.gap < 1e-5
    # The growth rate varies along the manifold, over a distance of √84·scale.
    np.testing.assert_allclose(found.eigenvalues[:3], -kappa, rtol=1e-9 + 2 * scale)
    assert found.distance <= np.linalg.norm(flat(start) - flat(weights))
    assert "index            3 of 84: λ = -0.0" in str(found)
    assert "75 of 84" in str(found)


def test_from_the_slowest_point_of_a_flow(small, kappa):
    """Steps along null directions would end at a point with rate 0.0003 (theory.md)."""
    rng = np.random.default_rng(0)
    weights = [1e-3 * rng.normal(size=w.shape) for w in ZERO]
    ts = np.linspace(0, 80, 161)
    states = oracles.scipy_flow(PI, P, weights, ts, rtol=1e-8)

    def unpacked(y):
        parts = np.split(y, np.cumsum([w.size for w in ZERO])[:-1])
        return [p.reshape(w.shape) for p, w in zip(parts, ZERO, strict=True)]

    def speed(y):
        _, g, _, _ = oracles.infinite_context_gradient(PI, P, *unpacked(y))
        return np.linalg.norm(flat(g))

    speeds = np.array([speed(y) for y in states])
    peak = int(np.argmax(speeds))
    slowest = states[peak + int(np.argmin(speeds[peak:]))]
    for gap in (None, 1e-2):
        found = find_critical_point(small, parameters(unpacked(slowest)), gap=gap)
        assert found.loss == pytest.approx(oracles.entropy(PI), abs=1e-12)
        assert (found.index, found.nullity) == (3, 75)
        np.testing.assert_allclose(found.eigenvalues[:3], -kappa, rtol=0.02)
        assert found.distance < 0.3


def test_gap_forbids_steps_along_flat_directions():
    # x² - (y - 1)²/100 + x y²
    loss = Polynomial(x2y0=1, x0y2=-0.01, x0y1=0.02, x0y0=-0.01, x1y2=1)
    start = np.array([0.1, 0.8])
    free = find_critical_point(loss, start)
    assert free.gap < 1e-4
    with pytest.raises(CriticalPointError, match="`gap` = 5") as caught:
        find_critical_point(loss, start, gap=5)
    np.testing.assert_array_equal(caught.value.params, start)
    # Eigenvalues within the gap count as null, whatever the gradient.
    wide = find_critical_point(loss, free.params, gap=1.0)
    assert wide.nullity == int(np.sum(np.abs(wide.eigenvalues) <= 1.0)) > 0
    assert wide.gap == 1.0
    assert wide.steps == 0


def test_a_loss_without_critical_points_is_reported():
    with pytest.raises(CriticalPointError, match="cannot be told from zero") as caught:
        find_critical_point(Polynomial(x1y0=1, x0y2=1), np.array([0.3, 0.1]))
    error = caught.value
    assert error.gradient_norm == pytest.approx(1.0)
    np.testing.assert_allclose(error.params, [0.3, 0.0], atol=1e-12)
    assert f"After {error.steps} steps" in str(error)
    assert "‖∇L‖ is 1.00e+00 (it was 1.02e+00)" in str(error)


def test_steps_run_out(small, first_saddle):
    with pytest.raises(
        CriticalPointError, match="`max_steps` = 1 steps were"
    ) as caught:
        find_critical_point(small, perturbed(first_saddle[0], 1e-3), max_steps=1)
    assert caught.value.steps == 1
    # The exception holds the point that the search had reached, which is nearer.
    weights = [np.asarray(w) for w in weights_of(caught.value.params)]
    _, gradient, _, _ = oracles.infinite_context_gradient(PI, P, *weights)
    assert np.linalg.norm(flat(gradient)) == pytest.approx(
        caught.value.gradient_norm, rel=1e-6
    )
    assert caught.value.gradient_norm < 1e-4


@pytest.mark.parametrize("taken", [0, 1])
def test_matrix_free_search_finds_the_saddles_of_a_factorisation(taken):
    """Against the closed form, with n = 240. At zero, more eigenvalues are negative
    than the sixteen that the search computes first."""
    A = oracles.symmetric(np.r_[3.0, 2.0, 1.5, np.zeros(12)])
    width = 8
    loss = Factorisation(jnp.asarray(A))
    weights, value, index, lowest = oracles.factorisation_saddle(A, width, taken)
    rng = np.random.default_rng(1)
    start = [w + 1e-3 * rng.normal(size=w.shape) for w in weights]
    found = find_critical_point(loss, start, dense=False)
    assert found.loss == pytest.approx(value, rel=1e-12)
    assert found.gradient_norm <= 1e-12
    assert found.index == index == (24, 14)[taken]
    assert found.nullity is None
    assert found.eigenvalues[0] == pytest.approx(lowest, rel=1e-5)
    assert len(found.eigenvalues) == (32, 16)[taken]
    assert found.distance < np.linalg.norm(flat(start) - flat(weights))
