"""The saddles that a flow passes, compared with closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import gradflow
from gradflow import InfiniteContext, MarkovChain, OneLayerTransformer, Problem

LAW, STICKINESS = np.array(oracles.REFERENCE_LAW), oracles.REFERENCE_STICKINESS


@pytest.fixture(scope="module")
def narrow():
    """The reference chain with m = 6, k = 3, as in theory.md (n = 84)."""
    chain = MarkovChain.sticky(LAW, STICKINESS)
    return Problem(OneLayerTransformer(4, 6, 3), InfiniteContext(chain))


@pytest.fixture(scope="module")
def flows(narrow):
    """From starts of falling scale, until after the first focus."""
    return {
        scale: gradflow.integrate(
            narrow, narrow.init(seed=1, scale=scale), horizon, observables=()
        )
        for scale, horizon in ((1e-3, 150.0), (1e-6, 300.0))
    }


@pytest.fixture(scope="module")
def saddles(flows):
    return {scale: gradflow.find_saddles(flow) for scale, flow in flows.items()}


def test_the_saddles_of_theory_are_found(saddles):
    _, gamma, beta = oracles.first_saddle(LAW, 6, 3)
    kappa = oracles.focus_rate(LAW, oracles.sticky(LAW, STICKINESS), gamma, beta)
    for scale, found in saddles.items():
        zero, first = found[:2]
        assert zero.known.name == "θ⁰"
        assert zero.loss == pytest.approx(np.log(4), abs=1e-12)
        assert zero.index == 6
        assert zero.predicted_rate == pytest.approx(
            np.linalg.norm(LAW) * np.linalg.norm(LAW - 0.25), rel=1e-9
        )
        assert zero.measured_rate == pytest.approx(zero.predicted_rate, rel=1e-3)
        assert first.known.name == "θ¹"
        assert first.known.rate == pytest.approx(kappa, rel=1e-12)
        assert first.loss == pytest.approx(-LAW @ np.log(LAW), abs=1e-9)
        assert first.point.gradient_norm < 1e-12
        assert first.index == 3
        assert (first.symmetry_nullity, first.nullity) == (5, 75)
        assert first.other_nullity == 70
        assert first.distance < 200 * np.sqrt(scale) * 0.1
    # Both the eigenvalue at the saddle that was passed and the growth that was measured
    # tend to theory's rate.
    errors = {
        scale: [
            abs(found[1].predicted_rate / kappa - 1),
            abs(found[1].measured_rate / kappa - 1),
        ]
        for scale, found in saddles.items()
    }
    assert max(errors[1e-6]) < 0.01
    assert max(errors[1e-3]) < 0.05
    assert np.all(np.array(errors[1e-6]) < 0.3 * np.array(errors[1e-3]))


def test_why_the_flow_left(saddles, narrow):
    """Along the escape eigenspace, in the time that linear theory says."""
    first = saddles[1e-6][1]
    assert first.overlap > 0.99
    assert first.predicted_residence == pytest.approx(
        first.measured_residence, rel=0.02
    )
    # It is the attention that left.
    parts = {k: np.linalg.norm(getattr(first.departure, k)) for k in oracles.SHAPES}
    assert np.hypot(parts["WQ"], parts["WK"]) == pytest.approx(1.0, abs=0.02)
    # The eigenspace is one of the Hessian's, and of its lowest eigenvalue.
    escape = first.escape
    np.testing.assert_allclose(escape.T @ escape, np.eye(3), atol=1e-10)
    y, unravel = jax.flatten_util.ravel_pytree(first.params)
    hessian = np.asarray(jax.hessian(lambda y: narrow(unravel(y)))(y))
    np.testing.assert_allclose(
        hessian @ escape, -first.predicted_rate * escape, atol=1e-7
    )
    lowest = np.linalg.eigvalsh(hessian)[0]
    assert first.predicted_rate == pytest.approx(-lowest, rel=1e-9)
    table = str(saddles[1e-6])
    for word in ("θ¹", "0.72714", "0.07978", "5+70"):
        assert word in table
    titles, *lines = table.splitlines()
    assert len(set(titles.split())) == 13  # the names of columns are unique
    assert [line.split()[0] for line in lines[-13:]] == titles.split()
    assert all(line.endswith(".") for line in lines[-13:])


def tilted(p):
    """A saddle at (1, 0) with eigenvalues 2 and -0.1, which flows enter from x = 0."""
    return (p["x"] - 1) ** 2 - 0.05 * p["y"] ** 2 + 0.0125 * p["y"] ** 4


def test_a_saddle_known_exactly():
    start = {"x": jnp.asarray(0.0), "y": jnp.asarray(1e-4)}
    flow = gradflow.integrate(tilted, start, 200.0)
    (saddle,) = gradflow.find_saddles(flow)
    assert float(saddle.params["x"]) == pytest.approx(1.0, abs=1e-12)
    # ‖∇L‖ = 0.1 |y| is below 1e-12.
    assert float(saddle.params["y"]) == pytest.approx(0.0, abs=1e-11)
    np.testing.assert_allclose(saddle.point.eigenvalues, [-0.1, 2.0], atol=1e-9)
    assert saddle.known is None
    assert (saddle.index, saddle.nullity, saddle.symmetry_nullity) == (1, 0, None)
    # y = 1e-4 exp(t/10) exactly, as long as its cube does not count.
    assert saddle.measured_rate == pytest.approx(0.1, rel=1e-3)
    assert saddle.overlap == pytest.approx(1.0, abs=1e-3)
    assert saddle.measured_residence == pytest.approx(
        saddle.predicted_residence, rel=0.05
    )
    # Slowest where 4(x-1)² + (y/10)² = 4 exp(-4t) + 1e-10 exp(0.2t) is least.
    # There x - 1 is 2e-6, which a tolerance of 1e-8 leaves uncertain to a percent.
    assert saddle.t == pytest.approx(np.log(16 / 0.2e-10) / 4.2, rel=1e-4)


def test_a_flow_without_saddles_says_why(narrow):
    resting = gradflow.integrate(lambda x: 0.5 * jnp.sum(x**2), jnp.ones(2), 5.0)
    found = gradflow.find_saddles(resting)
    assert len(found) == 0
    assert "only loses speed" in str(found)
    with pytest.raises(ValueError, match="`flow` must be a Flow, got str"):
        gradflow.find_saddles("flow")
    with pytest.raises(ValueError, match="`gap` must be a finite number"):
        gradflow.find_saddles(resting, gap=-1)


def test_a_gap_that_is_too_wide_says_how_far_it_came(flows):
    found = gradflow.find_saddles(flows[1e-3], gap=10.0)
    assert len(found) == 0
    assert "No critical point was reached" in str(found)


def test_generators_leave_the_loss_alone(narrow):
    params = narrow.init(seed=3, scale=0.5)
    generators = narrow.symmetry_generators(params)
    count = len(generators.W0)
    assert count == 6 * 5 // 2 + 3 * 2 // 2
    gradient = jax.grad(narrow)(params)
    for i in range(count):
        row = jax.tree.map(lambda g, i=i: g[i], generators)
        slope = sum(
            jnp.sum(a * b)
            for a, b in zip(
                jax.tree.leaves(row), jax.tree.leaves(gradient), strict=True
            )
        )
        assert abs(float(slope)) < 1e-14
