import jax
import numpy as np
import oracles
import pytest

import gradflow
from gradflow import (
    FiniteContext,
    InfiniteContext,
    MarkovChain,
    OneLayerTransformer,
    Problem,
)

CHAIN = MarkovChain.random([0.5, 0.3, 0.15, 0.05], seed=1)


@pytest.fixture(scope="module")
def problem():
    return Problem(OneLayerTransformer(4, 6, 2), InfiniteContext(CHAIN))


def test_initial_parameters(problem):
    params = problem.init(seed=3, scale=0.01)
    assert params.W0.shape == (4, 6)
    assert params.WQ.shape == params.WK.shape == (6, 2)
    assert params.W1.shape == (6, 4)
    entries = np.concatenate([np.ravel(w) for w in jax.tree.leaves(params)])
    assert entries.dtype == np.float64
    assert entries.std() == pytest.approx(0.01, rel=0.25)
    again, other = problem.init(seed=3, scale=0.01), problem.init(seed=4, scale=0.01)
    np.testing.assert_array_equal(params.W0, again.W0)
    assert not np.array_equal(params.W0, other.W0)
    # The direction does not depend on the scale, so that ε can be varied alone.
    np.testing.assert_allclose(problem.init(seed=3, scale=1.0).W0 * 0.01, params.W0)


def test_head_width_is_the_width_by_default():
    assert OneLayerTransformer(4, 6).head_width == 6


def test_observables_are_what_their_names_say(problem, weights):
    params = problem.init(seed=0, scale=0.9)
    W0, WQ, WK, W1 = weights(params)
    pi, P = CHAIN.stationary, CHAIN.transition
    seen = {name: np.asarray(f(params)) for name, f in problem.observables.items()}
    loss, _, _, _ = oracles.infinite_context_gradient(pi, P, W0, WQ, WK, W1)
    A = np.exp(W0 @ WQ @ WK.T @ W0.T) * pi
    A /= A.sum(axis=1, keepdims=True)
    U, s, _ = np.linalg.svd(W0)
    entropies = [oracles.entropy(row) for row in A]
    expected = {
        "excess_loss": loss - CHAIN.entropy_rate,
        "singular_values_W0": s,
        "singular_values_W1": np.linalg.svd(W1)[1],
        "singular_values_QK": np.linalg.svd(WQ @ WK.T)[1],
        "alignment": abs(U[:, 0] @ pi) / np.linalg.norm(pi),
        "attention": A,
        "attention_entropy": entropies,
        "mean_attention_entropy": pi @ entropies,
        "attention_mass": pi @ A,
        "embedding_norms": np.sqrt(np.sum(W0**2, axis=1)),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(seen[name], value, rtol=1e-10, atol=1e-14)
    coordinates = seen.pop("embedding_coordinates")
    np.testing.assert_allclose(coordinates @ coordinates.T, W0 @ W0.T, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(coordinates, axis=0), s[:4], rtol=1e-10)
    assert set(seen) == set(expected)


def test_attention_of_finite_contexts_is_the_mean_over_contexts():
    """By enumeration: query i's mean attention on all occurrences of token j."""
    import itertools

    length = 4
    problem = Problem(OneLayerTransformer(4, 6, 2), FiniteContext(CHAIN, length))
    params = problem.init(seed=0, scale=0.9)
    W0, WQ, WK = (np.asarray(w) for w in (params.W0, params.WQ, params.WK))
    Phi = W0 @ WQ @ WK.T @ W0.T
    mean, entropy = np.zeros((4, 4)), np.zeros(4)
    for x in itertools.product(range(4), repeat=length):
        p = CHAIN.stationary[x[0]]
        for a, b in itertools.pairwise(x):
            p *= CHAIN.transition[a, b]
        a = np.exp(Phi[x[-1], list(x)])
        mass = np.bincount(x, a / a.sum(), minlength=4)
        mean[x[-1]] += p * mass / CHAIN.stationary[x[-1]]
        entropy[x[-1]] += p * oracles.entropy(mass) / CHAIN.stationary[x[-1]]
    seen = problem.observables
    np.testing.assert_allclose(seen["attention"](params), mean, rtol=1e-12)
    np.testing.assert_allclose(seen["attention_entropy"](params), entropy, rtol=1e-12)
    np.testing.assert_allclose(
        seen["attention_mass"](params), CHAIN.stationary @ mean, rtol=1e-12
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OneLayerTransformer(0, 3), "`vocabulary` must be a whole number"),
        (lambda: OneLayerTransformer(3, 0), "`width` must be a whole number"),
        (lambda: OneLayerTransformer(3, 3, 0), "`head_width` must be a whole number"),
        (lambda: OneLayerTransformer(3.0, 3), "`vocabulary` must be a whole number"),
        (
            lambda: Problem(OneLayerTransformer(3, 3), InfiniteContext(CHAIN)),
            "vocabulary of 3 tokens and `population` one of 4",
        ),
        (lambda: PROBLEM().init(seed=-1), "`seed` must be a whole number"),
        (lambda: PROBLEM().init(seed=2**64), "`seed` must be at most"),
        (
            lambda: OneLayerTransformer(4, 10**9),
            r"model with [\d,]+ parameters takes about .* available: `vocabulary` = 4",
        ),
        (lambda: PROBLEM().init(scale=-1e-3), "`scale` must be"),
        (lambda: PROBLEM().init(scale=float("nan")), "`scale` must be"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def PROBLEM():
    return Problem(OneLayerTransformer(4, 3), InfiniteContext(CHAIN))


def test_wrong_parameters_are_refused_by_name(problem):
    other = Problem(OneLayerTransformer(4, 7, 2), InfiniteContext(CHAIN))
    with pytest.raises(ValueError, match=r"`params\.W0` must have shape \(4, 6\)"):
        gradflow.integrate(problem, other.init(), 1.0)
    with pytest.raises(ValueError, match="must be OneLayerParameters"):
        gradflow.integrate(problem, {"W0": np.ones(3)}, 1.0)
