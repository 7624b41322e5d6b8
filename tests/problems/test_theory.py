"""Every closed form of theory.md, section 1, for infinite context."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import gradflow
from gradflow import InfiniteContext, MarkovChain, OneLayerTransformer, Problem

PI = oracles.REFERENCE_LAW


def parameters(weights):
    return gradflow.OneLayerParameters(*map(jnp.asarray, weights))


def hessian(problem, params):
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    return np.asarray(jax.jit(jax.hessian(lambda y: problem(unravel(y))))(flat))


def random_instance(seed, d=5, width=6, head_width=3):
    rng = np.random.default_rng(seed)
    pi = rng.dirichlet(np.ones(d))
    kind = ("sticky", "metropolis", "random")[seed % 3]
    chain = {
        "sticky": lambda: MarkovChain.sticky(pi, rng.uniform(0.1, 0.9)),
        "metropolis": lambda: MarkovChain.metropolis(pi),
        "random": lambda: MarkovChain.random(pi, seed=seed),
    }[kind]()
    model = OneLayerTransformer(d, width, head_width)
    return Problem(model, InfiniteContext(chain))


@pytest.mark.parametrize("seed", range(6))
def test_loss_and_gradient_are_the_hand_written_ones(seed, weights):
    problem = random_instance(seed)
    chain = problem.population.chain
    params = problem.init(seed=seed, scale=0.9)
    loss, gradient, _, _ = oracles.infinite_context_gradient(
        chain.stationary, chain.transition, *weights(params)
    )
    assert float(problem(params)) == pytest.approx(loss, rel=1e-14)
    for found, expected in zip(
        weights(jax.grad(problem)(params)), gradient, strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-14)


def test_gradient_is_that_of_finite_differences(reference):
    params = reference.init(seed=4, scale=0.6)
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    gradient = jax.grad(lambda y: reference(unravel(y)))(flat)
    value = jax.jit(lambda y: reference(unravel(y)))
    h = 1e-5
    for i in range(0, flat.size, 17):
        step = jnp.zeros_like(flat).at[i].set(h)
        slope = float(value(flat + step) - value(flat - step)) / (2 * h)
        assert slope == pytest.approx(float(gradient[i]), rel=1e-7, abs=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_at_zero(seed, weights):
    problem = random_instance(seed)
    pi = problem.population.chain.stationary
    d, m = problem.model.vocabulary, problem.model.width
    zero = problem.init(scale=0.0)
    assert float(problem(zero)) == pytest.approx(np.log(d), rel=1e-15)
    assert all(np.all(w == 0) for w in weights(jax.grad(problem)(zero)))
    # ∂L/∂M, seen through W1 at W0 = I where M = W1 and through M alone.
    _, _, G_M, G_Phi = oracles.infinite_context_gradient(
        pi, problem.population.chain.transition, *weights(zero)
    )
    np.testing.assert_allclose(G_M, np.outer(pi, 1 / d - pi), rtol=1e-12, atol=1e-16)
    assert np.all(G_Phi == 0)
    eigenvalues = np.linalg.eigvalsh(hessian(problem, zero))
    lowest = -oracles.first_rate(pi)
    np.testing.assert_allclose(eigenvalues[:m], lowest, rtol=1e-12)
    assert eigenvalues[m] > lowest + 1e-6


def test_gradient_with_respect_to_M_at_zero_is_seen_through_the_weights():
    problem = random_instance(0, d=5, width=5)
    pi = problem.population.chain.stationary
    eye = np.eye(5)
    params = parameters((eye, np.zeros((5, 3)), np.zeros((5, 3)), np.zeros((5, 5))))
    np.testing.assert_allclose(
        jax.grad(problem)(params).W1, np.outer(pi, 1 / 5 - pi), rtol=1e-12, atol=1e-16
    )


def test_reference_numbers(reference):
    weights, gamma, beta = oracles.first_saddle(PI, 10, 10)
    assert oracles.first_rate(PI) == pytest.approx(0.4595, abs=5e-5)
    assert np.linalg.norm(gamma) == pytest.approx(2.0308, abs=5e-5)
    rate = oracles.focus_rate(PI, oracles.sticky(PI, 0.5), gamma, beta)
    assert rate == pytest.approx(0.07978, abs=5e-6)
    assert float(reference(parameters(weights))) == pytest.approx(0.72714, abs=5e-6)
    lowest = np.linalg.eigvalsh(hessian(reference, reference.init(scale=0.0)))[0]
    assert lowest == pytest.approx(-0.4595, abs=5e-5)


@pytest.mark.parametrize("seed", range(6))
def test_first_saddle(seed):
    problem = random_instance(seed)
    chain, model = problem.population.chain, problem.model
    weights, gamma, beta = oracles.first_saddle(
        chain.stationary, model.width, model.head_width, seed
    )
    params = parameters(weights)
    assert float(problem(params)) == pytest.approx(
        oracles.entropy(chain.stationary), rel=1e-13
    )
    assert all(
        np.max(np.abs(g)) < 1e-14 for g in jax.tree.leaves(jax.grad(problem)(params))
    )
    kappa = oracles.focus_rate(chain.stationary, chain.transition, gamma, beta)
    eigenvalues = np.linalg.eigvalsh(hessian(problem, params))
    k = model.head_width
    np.testing.assert_allclose(eigenvalues[:k], -abs(kappa), rtol=1e-9)
    assert eigenvalues[k] > -1e-12


def test_focus_rate_of_a_sticky_chain_is_a_covariance():
    _, gamma, beta = oracles.first_saddle(PI, 10, 10)
    covariance = PI @ (gamma * beta) - (PI @ gamma) * (PI @ beta)
    variance = PI @ gamma**2 - (PI @ gamma) ** 2
    P = oracles.sticky(PI, 0.5)
    assert oracles.focus_rate(PI, P, gamma, beta) == pytest.approx(
        0.5 * covariance * variance, rel=1e-13
    )


def test_attention_grows_along_alpha_at_the_first_saddle():
    problem = random_instance(1)
    chain, model = problem.population.chain, problem.model
    (W0, WQ, WK, W1), gamma, beta = oracles.first_saddle(
        chain.stationary, model.width, model.head_width
    )
    kappa = oracles.focus_rate(chain.stationary, chain.transition, gamma, beta)
    alpha = W1 @ beta / (beta @ beta)
    rng = np.random.default_rng(0)
    WQ, WK = (1e-5 * rng.normal(size=WQ.shape) for _ in range(2))
    velocity = jax.tree.map(
        jnp.negative, jax.grad(problem)(parameters((W0, WQ, WK, W1)))
    )
    expected = kappa * np.outer(alpha, alpha)
    np.testing.assert_allclose(velocity.WQ, expected @ WK, rtol=1e-6, atol=1e-14)
    np.testing.assert_allclose(velocity.WK, expected @ WQ, rtol=1e-6, atol=1e-14)


def test_conserved_quantities_are_conserved_by_the_vector_field(weights):
    """Their rate of change along -∇L vanishes, wherever one looks."""
    for seed in range(3):
        problem = random_instance(seed)
        params = problem.init(seed=seed, scale=1.0)
        velocity = jax.tree.map(jnp.negative, jax.grad(problem)(params))
        _, rates = jax.jvp(problem.conserved, (params,), (velocity,))
        assert set(rates) == {
            "embedding_balance",
            "attention_balance",
            "projection_sum",
        }
        for rate in rates.values():
            assert np.max(np.abs(rate)) < 1e-14
        W0, WQ, WK, W1 = weights(params)
        np.testing.assert_allclose(
            problem.conserved(params)["embedding_balance"],
            W0.T @ W0 - W1 @ W1.T - WQ @ WQ.T - WK @ WK.T,
            rtol=1e-12,
            atol=1e-13,
        )
        np.testing.assert_allclose(
            problem.conserved(params)["attention_balance"],
            WQ.T @ WQ - WK.T @ WK,
            rtol=1e-12,
            atol=1e-13,
        )
        np.testing.assert_allclose(
            problem.conserved(params)["projection_sum"], W1.sum(axis=1), rtol=1e-12
        )
