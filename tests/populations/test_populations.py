import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from gradflow import FiniteContext, InfiniteContext, MarkovChain, Problem
from gradflow._core import machine
from gradflow.models import OneLayerTransformer

THREE = MarkovChain.random([0.6, 0.3, 0.1], seed=3)


def problem(population, width=4):
    return Problem(OneLayerTransformer(population.vocabulary, width, 3), population)


@pytest.mark.parametrize("positions", ["last", "all"])
@pytest.mark.parametrize("start", ["stationary", "uniform"])
@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_finite_context_is_the_enumeration_of_all_sequences(
    length, start, positions, weights
):
    loss = problem(FiniteContext(THREE, length, start=start, positions=positions))
    params = loss.init(seed=length, scale=0.8)
    law = THREE.stationary if start == "stationary" else np.full(3, 1 / 3)
    enumerated = oracles.enumerated_loss(
        THREE.transition, law, length, *weights(params), positions=positions
    )
    assert float(loss(params)) == pytest.approx(enumerated, rel=1e-13)


def test_finite_context_tends_to_infinite_context_at_rate_one_over_length():
    infinite = problem(InfiniteContext(THREE))
    params = infinite.init(seed=1, scale=0.5)
    exact = infinite(params)
    Phi = params.W0 @ params.WQ @ params.WK.T @ params.W0.T
    assert 0.05 < np.linalg.norm(Phi) <= 1
    gaps = [
        abs(float(problem(FiniteContext(THREE, s))(params) - exact)) for s in (256, 512)
    ]
    assert math.log2(gaps[1] / gaps[0]) == pytest.approx(-1, abs=0.02)


def test_finite_context_arrays():
    population = FiniteContext(THREE, 5)
    assert population.size == 3 * math.comb(5 + 3 - 2, 2)
    np.testing.assert_allclose(population.weights.sum(), 1, rtol=1e-14)
    counts = np.exp(population.log_multiplicities)
    np.testing.assert_allclose(counts.sum(axis=1), 5, rtol=1e-14)
    # The last token is among those counted, and the last tokens have the law π.
    assert np.all(counts[np.arange(population.size), population.queries] > 0.5)
    np.testing.assert_allclose(population.query_weights, THREE.stationary, rtol=1e-13)
    np.testing.assert_array_equal(
        population.targets, THREE.transition[population.queries]
    )
    # The mean count of each token is 5π, by stationarity.
    np.testing.assert_allclose(
        population.weights @ counts, 5 * THREE.stationary, rtol=1e-13
    )


def test_infinite_context_arrays(reference_chain):
    population = InfiniteContext(reference_chain)
    np.testing.assert_array_equal(population.weights, reference_chain.stationary)
    np.testing.assert_array_equal(population.queries, np.arange(4))
    np.testing.assert_array_equal(population.targets, reference_chain.transition)
    np.testing.assert_allclose(
        np.exp(population.log_multiplicities),
        np.tile(reference_chain.stationary, (4, 1)),
        rtol=1e-15,
    )


@pytest.mark.parametrize(
    "population", [InfiniteContext(THREE), FiniteContext(THREE, 4)], ids=type
)
def test_query_rows_and_means_agree_with_indexing(population):
    table = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)))
    rows = population.query_rows(table)
    np.testing.assert_allclose(rows, table[population.queries], rtol=1e-15)
    np.testing.assert_allclose(population.mean_by_query(rows), table, rtol=1e-13)


def test_tokens_in_which_no_context_ends_leave_no_nan():
    chain = MarkovChain([[0, 1, 0], [0, 0, 1], [1, 0, 0]])
    loss = problem(FiniteContext(chain, 1, start=[1.0, 0.0, 0.0]))
    params = loss.init(scale=0.5)
    for name, observable in loss.observables.items():
        assert np.all(np.isfinite(observable(params))), name


def test_a_large_limit_is_remembered():
    cycle = MarkovChain(np.roll(np.eye(3), 1, axis=1))
    large = FiniteContext(cycle, 40, positions="all", max_contexts=10**7)
    again = FiniteContext(**large.stored_arguments())
    assert again.max_contexts == 10**7
    np.testing.assert_array_equal(again.weights, large.weights)


def test_impossible_contexts_are_left_out():
    chain = MarkovChain([[0, 1], [1, 0]])
    population = FiniteContext(chain, 6)
    assert population.size == 2  # 010101 and 101010


def test_four_tokens_and_length_64(reference_chain):
    population = FiniteContext(reference_chain, 64)
    assert population.size == 4 * math.comb(66, 3)
    loss = problem(population)
    params = loss.init(scale=0.5)
    value, gradient = jax.value_and_grad(loss)(params)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradient))


def test_gradient_of_finite_context_is_that_of_finite_differences():
    loss = problem(FiniteContext(THREE, 6, positions="all", start="uniform"))
    params = loss.init(seed=1, scale=0.7)
    direction = loss.init(seed=2, scale=1.0)
    gradient = jax.grad(loss)(params)
    h = 1e-5
    ahead, behind = (
        loss(jax.tree.map(lambda p, v, s=s: p + s * h * v, params, direction))
        for s in (1, -1)
    )
    slope = sum(
        float(np.vdot(g, v))
        for g, v in zip(
            jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True
        )
    )
    assert float(ahead - behind) / (2 * h) == pytest.approx(slope, rel=1e-8)


def test_floor_is_the_entropy_rate_and_below_every_loss():
    for population in (InfiniteContext(THREE), FiniteContext(THREE, 5)):
        loss = problem(population)
        assert loss.floor == pytest.approx(THREE.entropy_rate, rel=1e-13)
        assert all(
            float(loss(loss.init(seed=s, scale=2.0))) > loss.floor for s in range(5)
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FiniteContext(THREE, 0),
            "`length` must be a whole number of at least 1",
        ),
        (lambda: FiniteContext(THREE, 2.5), "`length` must be a whole number"),
        (lambda: FiniteContext(THREE, 4, positions="first"), "`positions` must be"),
        (lambda: FiniteContext(THREE, 4, start="zipf"), "`start` must be"),
        (lambda: FiniteContext(THREE, 4, start=[0.5, 0.5]), "`start` must have 3"),
        (lambda: FiniteContext(THREE, 4, start=[0.5, 0.4, 0.4]), "must sum to one"),
        (lambda: FiniteContext(np.eye(3), 4), "`chain` must be a gradflow.MarkovChain"),
        (lambda: InfiniteContext([[1.0]]), "`chain` must be a gradflow.MarkovChain"),
    ],
)
def test_bad_populations(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_contexts_beyond_the_available_memory_are_refused(monkeypatch):
    needed = FiniteContext(THREE, 4).size * 8 * (10 * 3 + 2)
    monkeypatch.setattr(machine, "available_memory", lambda: needed)
    assert FiniteContext(THREE, 4).size == 30
    monkeypatch.setattr(machine, "available_memory", lambda: needed - 1)
    refused = (
        "the 30 contexts of `length` = 4 takes about 7.68 kB, and .* are available"
    )
    with pytest.raises(ValueError, match=refused):
        FiniteContext(THREE, 4)


def test_too_many_contexts_are_refused_with_the_count_and_the_limit():
    chain = MarkovChain.sticky(np.full(20, 1 / 20), 0.5)
    count = 20 * math.comb(50 + 20 - 2, 19)
    with pytest.raises(ValueError, match=rf"{count:,} contexts.*limit is 4,000,000"):
        FiniteContext(chain, 50)
    with pytest.raises(ValueError, match="limit is 5 contexts"):
        FiniteContext(THREE, 4, max_contexts=5)
