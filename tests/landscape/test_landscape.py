"""Critical points, spectra and linear flows, against closed forms, NumPy and SciPy."""

import doctest
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import scipy.linalg

import gradflow
from gradflow._core.compiled import CompileClock
from gradflow.landscape import (
    CriticalPoint,
    CriticalPointError,
    Spectrum,
    SpectrumError,
    find_critical_point,
    hessian_spectrum,
    linearised_flow,
)

PI = oracles.REFERENCE_LAW
P = oracles.sticky(PI, oracles.REFERENCE_STICKINESS)


class Quadratic(eqx.Module):
    """½(x - c)ᵀH(x - c) + gᵀ(x - c); compiled once for all of a size."""

    H: jax.Array
    g: jax.Array
    c: jax.Array

    def __init__(self, H, g=0.0, c=0.0):
        n = len(H)
        self.H, self.g, self.c = (
            jnp.asarray(np.broadcast_to(x, s))
            for x, s in ((H, (n, n)), (g, (n,)), (c, (n,)))
        )

    def __call__(self, x):
        return 0.5 * (x - self.c) @ self.H @ (x - self.c) + self.g @ (x - self.c)


class Polynomial(eqx.Module):
    """Σ c[i, j] xⁱ yʲ up to the fourth power; compiled once for all of them."""

    coefficients: jax.Array

    def __init__(self, **terms):
        """`x2y1=3.0` is 3x²y."""
        c = np.zeros((5, 5))
        for powers, coefficient in terms.items():
            c[int(powers[1]), int(powers[3])] = coefficient
        self.coefficients = jnp.asarray(c)

    def __call__(self, xy):
        powers = [jnp.stack([jnp.ones(()), z, z**2, z**3, z**4]) for z in xy]
        return powers[0] @ self.coefficients @ powers[1]


@pytest.fixture(scope="module")
def small():
    """The reference chain with m = 6, k = 3: 84 parameters."""
    model = gradflow.OneLayerTransformer(4, 6, 3)
    chain = gradflow.MarkovChain.sticky(PI, oracles.REFERENCE_STICKINESS)
    return gradflow.Problem(model, gradflow.InfiniteContext(chain))


def parameters(weights):
    return gradflow.OneLayerParameters(*map(jnp.asarray, weights))


def flat(params):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


def perturbed(weights, scale, seed=0):
    rng = np.random.default_rng(seed)
    return parameters([w + scale * rng.normal(size=w.shape) for w in weights])


@pytest.fixture(scope="module")
def first_saddle():
    return oracles.first_saddle(PI, 6, 3)


@pytest.fixture(scope="module")
def kappa(first_saddle):
    _, gamma, beta = first_saddle
    return oracles.focus_rate(PI, P, gamma, beta)


ZERO = [np.zeros(s) for s in ((4, 6), (6, 3), (6, 3), (6, 4))]


#
# Spectra
#


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


def test_dense_spectrum_is_that_of_the_gradient_on_paper(at_random, weights):
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
    """And at zero, by the same compiled search, the lowest eigenvalue comes as often as
    it should: m-fold, -‖π‖·‖π - 1/d‖."""
    params, whole = at_random
    found = hessian_spectrum(reference, params, 12)
    assert found.method == "block Lanczos"
    assert found.products > 12
    expected = np.r_[whole.eigenvalues[:12], whole.eigenvalues[-12:]]
    np.testing.assert_allclose(found.eigenvalues, expected, atol=1e-8)
    # The residuals are true.
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
def test_multiple_eigenvalues_come_as_often_as_they_should(which):
    """More copies than wanted, and fewer; from a search that has to restart."""
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


def test_a_search_that_does_not_converge_says_how_far_it_came():
    """The lowest eigenvalues crowd, so that no search tells them apart at once."""
    eigenvalues = np.sort(np.r_[np.linspace(0, 1e-3, 100), np.linspace(1, 2, 100)])
    loss = Quadratic(oracles.symmetric(eigenvalues))
    with pytest.raises(SpectrumError, match="did not converge within") as caught:
        hessian_spectrum(loss, np.ones(200), 6, which="smallest", max_products=90)
    found = caught.value.spectrum
    assert f"{np.max(found.residuals):.1e}" in str(caught.value)
    assert len(found.eigenvalues) == 6
    # What it has is as good as it says.
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


#
# Critical points
#


def test_a_quadratic_takes_one_step():
    """However badly conditioned: its Hessian does not turn, so all is certain."""
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
    # On paper: ∂L/∂x = 0 and ∂L/∂y = 0.
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


def test_a_degenerate_point_is_called_so():
    """Newton's method gets there, slowly, and every eigenvalue counts as null."""
    start = np.array([0.3, 0.1])
    monkey = find_critical_point(Polynomial(x3y0=1, x1y2=-3), start)
    np.testing.assert_allclose(monkey.params, 0, atol=1e-6)
    assert (monkey.index, monkey.nullity) == (0, 2)
    assert monkey.kind == "Degenerate critical point"
    # Half of it degenerate.
    half = find_critical_point(Polynomial(x4y0=1, x0y2=-1), start)
    np.testing.assert_allclose(half.params, 0, atol=1e-4)
    assert (half.index, half.nullity) == (1, 1)


def test_on_a_circle_of_minima_it_goes_the_shortest_way():
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
    # It moved no farther than it was away.
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
    # The growth rate varies along the manifold: at a distance of √84·scale it differs.
    np.testing.assert_allclose(found.eigenvalues[:3], -kappa, rtol=1e-9 + 2 * scale)
    assert found.distance <= np.linalg.norm(flat(start) - flat(weights))
    assert "index            3 of 84: λ = -0.0" in str(found)
    assert "75 of 84" in str(found)


def test_from_the_slowest_point_of_a_flow(small, kappa):
    """Where steps along null directions would end at a rate of 0.0003 (theory.md)."""
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


def test_gap_keeps_it_from_moving_where_it_may_not():
    # x² - (y - 1)²/100 + x y²
    loss = Polynomial(x2y0=1, x0y2=-0.01, x0y1=0.02, x0y0=-0.01, x1y2=1)
    start = np.array([0.1, 0.8])
    free = find_critical_point(loss, start)
    assert free.gap < 1e-4
    with pytest.raises(CriticalPointError, match="`gap` = 5") as caught:
        find_critical_point(loss, start, gap=5)
    np.testing.assert_array_equal(caught.value.params, start)
    # Null is what lies within the gap, whatever the gradient says.
    wide = find_critical_point(loss, free.params, gap=1.0)
    assert wide.nullity == int(np.sum(np.abs(wide.eigenvalues) <= 1.0)) > 0
    assert wide.gap == 1.0
    assert wide.steps == 0


def test_where_there_is_no_critical_point_it_says_so():
    with pytest.raises(CriticalPointError, match="cannot be told from zero") as caught:
        find_critical_point(Polynomial(x1y0=1, x0y2=1), np.array([0.3, 0.1]))
    error = caught.value
    assert error.gradient_norm == pytest.approx(1.0)
    np.testing.assert_allclose(error.params, [0.3, 0.0], atol=1e-12)
    assert f"After {error.steps} steps" in str(error)
    assert "‖∇L‖ is 1.00e+00 (it was 1.02e+00)" in str(error)


def test_steps_run_out(small, first_saddle):
    with pytest.raises(CriticalPointError, match="`max_steps` = 1 were not") as caught:
        find_critical_point(small, perturbed(first_saddle[0], 1e-3), max_steps=1)
    assert caught.value.steps == 1
    # It is nearer than it was: what it had come to is kept.
    weights = [np.asarray(w) for w in _leaves(caught.value.params)]
    _, gradient, _, _ = oracles.infinite_context_gradient(PI, P, *weights)
    assert np.linalg.norm(flat(gradient)) == pytest.approx(
        caught.value.gradient_norm, rel=1e-6
    )
    assert caught.value.gradient_norm < 1e-4


class Factorisation(eqx.Module):
    """½‖UVᵀ - A‖²."""

    A: jax.Array

    def __call__(self, params):
        U, V = params
        return 0.5 * jnp.sum((U @ V.T - self.A) ** 2)


@pytest.mark.parametrize("taken", [0, 1])
def test_matrix_free_search_finds_the_saddles_of_a_factorisation(taken):
    """n = 240; in closed form. At zero there are more than the first sixteen
    eigenvalues that are looked for."""
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


#
# Linear flows
#


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
    """By eigenvectors; in one Krylov space, and in many."""
    loss, centre, start, ts, expected = linear_problem
    if size is not None:
        monkeypatch.setattr(gradflow.landscape._linearised, "DENSE_SIZE", 10)
        monkeypatch.setattr(gradflow.landscape._linearised, "KRYLOV_SIZE", size)
    found = linearised_flow(loss, centre, start, ts)
    assert found.shape == (6, 120)
    scale = np.max(np.abs(expected), axis=1, keepdims=True)
    np.testing.assert_allclose(found / scale, expected / scale, atol=1e-10)
    with pytest.raises(ValueError, match="leaves the floating numbers"):
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
def test_the_error_of_the_linear_flow_in_the_distance(
    small, first_saddle, place, slope
):
    """‖θ(t) - linear flow‖ ∝ ε³ about zero and ε² about θ¹ (theory.md)."""
    weights = ZERO if place == "zero" else first_saddle[0]
    point = find_critical_point(small, parameters(weights))
    ts, errors = np.array([0.0, 3.0]), []
    for scale in (1e-2, 1e-3):
        start = perturbed(weights, scale, seed=7)
        linear = linearised_flow(small, point, start, ts)
        true = oracles.scipy_flow(PI, P, [np.asarray(w) for w in _leaves(start)], ts)
        errors.append(np.linalg.norm(flat(_at(linear, -1)) - true[-1]))
    assert np.log10(errors[0] / errors[1]) == pytest.approx(slope, abs=0.1)


def _leaves(params):
    return [getattr(params, name) for name in oracles.SHAPES]


def _at(params, i):
    return parameters([w[i] for w in _leaves(params)])


#
# What is refused
#


def bowl(x):
    return jnp.sum(x**2)


LINEAR = functools.partial(linearised_flow, bowl)
REFUSED = [
    (lambda f: f(bowl, np.array([1.0, np.nan])), "`params` must be finite"),
    (lambda f: f(bowl, np.array([1, 2])), "`params` must be a floating array, got"),
    (lambda f: f(bowl, {"a": np.ones(2), "b": 3}), "`params.b` must be a floating"),
    (lambda f: f(bowl, {}), "`params` must contain at least one number"),
    (lambda f: f(lambda x: x, np.ones(2)), "`loss` must return a real scalar"),
    (lambda f: f(lambda x: 1j * x[0], np.ones(2)), "`loss` must return a real scalar"),
    (lambda f: f(None, np.ones(2)), "`loss` must be a callable"),
    (lambda f: f(lambda x: jnp.log(x[0]), -np.ones(2)), "`loss` must be finite at"),
]


@pytest.mark.parametrize("function", [hessian_spectrum, find_critical_point])
@pytest.mark.parametrize(("call", "says"), REFUSED)
def test_bad_losses_and_points_are_refused(function, call, says):
    with pytest.raises(ValueError, match=says):
        call(function)


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        (hessian_spectrum, {"k": 0}, "`k` must be a whole number of at least 1, got 0"),
        (hessian_spectrum, {"k": 2.5}, "`k` must be a whole number"),
        (hessian_spectrum, {"k": 4}, "`k` must be at most the number of parameters, 3"),
        (hessian_spectrum, {"k": 1, "which": "top"}, "`which` must be one of both, la"),
        (hessian_spectrum, {"which": "largest"}, "`which` = 'largest' needs `k`"),
        (hessian_spectrum, {"k": 1, "tolerance": 0}, "`tolerance` must be a positive"),
        (hessian_spectrum, {"k": 1, "max_products": 0}, "`max_products` must be"),
        (hessian_spectrum, {"k": 1, "seed": -1}, "`seed` must be a whole number"),
        (find_critical_point, {"gap": -1e-3}, "`gap` must be a finite number, zero or"),
        (find_critical_point, {"gap": np.inf}, "`gap` must be a finite number"),
        (find_critical_point, {"tolerance": -1}, "`tolerance` must be a positive"),
        (find_critical_point, {"max_steps": 0}, "`max_steps` must be a whole number"),
        (find_critical_point, {"dense": "yes"}, "`dense` must be True, False or None"),
    ],
)
def test_bad_options_are_refused(function, arguments, says):
    with pytest.raises(ValueError, match=says):
        function(bowl, np.ones(3), **arguments)


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


def test_a_direction_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="`i` must name one of 3 eigenvectors, got 3"):
        hessian_spectrum(bowl, np.ones(3)).direction(3)


#
# Compilation and documentation
#


def test_a_second_call_compiles_nothing(small, reference, first_saddle):
    def all_of_them(seed):
        start = perturbed(first_saddle[0], 1e-3, seed)
        point = find_critical_point(small, start)
        linearised_flow(small, point, start, np.array([0.0, 1.0 + seed]))
        hessian_spectrum(reference, reference.init(seed), 12)

    all_of_them(1)
    clock = CompileClock()
    all_of_them(2)
    assert clock.seconds() == 0


@pytest.mark.parametrize(
    "function", [hessian_spectrum, find_critical_point, linearised_flow]
)
def test_the_examples_in_the_documentation_run(function):
    (example,) = doctest.DocTestFinder(recurse=False).find(function, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
