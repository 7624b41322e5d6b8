import jax
import numpy as np
import oracles
import pytest

import gradflow
from gradflow import HighOrderChain, MarkovChain

PI = oracles.REFERENCE_LAW


def random_matrix(seed, d):
    P = np.random.default_rng(seed).dirichlet(np.ones(d), size=d)
    return P / P.sum(axis=1, keepdims=True)


def nearly_reducible(d=8, leak=1e-13):
    """Two blocks that exchange almost nothing, at unequal rates."""
    half = d // 2
    P = np.zeros((d, d))
    P[:half, :half] = random_matrix(1, half)
    P[half:, half:] = random_matrix(2, d - half)
    P[0, half] = leak
    P[half, 0] = 3 * leak
    return P / P.sum(axis=1, keepdims=True)


def nearly_periodic(d=7, slack=1e-12):
    P = np.roll(np.eye(d), 1, axis=1) * (1 - slack)
    P[:, 0] += slack * np.linspace(0.5, 1.0, d)
    P[np.arange(d), np.arange(d)] += slack * np.linspace(0.5, 0.0, d)
    return P / P.sum(axis=1, keepdims=True)


def vanishing_probabilities(d=8):
    """A birth-death chain whose stationary probabilities fall by 1e-3 per state."""
    P = np.diag(np.full(d - 1, 1e-4), 1) + np.diag(np.full(d - 1, 1e-1), -1)
    return P + np.diag(1 - P.sum(axis=1))


@pytest.mark.parametrize(
    "P",
    [
        *(random_matrix(seed, d) for seed, d in enumerate([2, 3, 5, 9])),
        nearly_reducible(),
        nearly_reducible(9, 1e-15),
        nearly_periodic(),
        vanishing_probabilities(),
        np.roll(np.eye(6), 1, axis=1),
    ],
)
def test_stationary_distribution_is_exact_in_every_component(P):
    chain = MarkovChain(P)
    exact = oracles.exact_stationary_law(chain.transition)
    np.testing.assert_allclose(chain.stationary, exact, rtol=1e-14, atol=0)


@pytest.mark.parametrize("d", [63, 64, 65, 130, 700])
def test_stationary_distribution_of_large_chains(d):
    # Several blocks of the elimination, and probabilities of many magnitudes.
    pi = 1.0 / np.arange(1, d + 1) ** 2
    pi /= pi.sum()
    chain = MarkovChain.sticky(pi, 0.9)
    np.testing.assert_allclose(chain.stationary, pi, rtol=1e-14, atol=0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["sticky", "metropolis", "random"])
def test_constructors_have_the_given_stationary_distribution(name, seed):
    pi = np.random.default_rng(seed).dirichlet(np.full(6, 0.3)) + 1e-6
    pi /= pi.sum()
    make = {
        "sticky": lambda: MarkovChain.sticky(pi, 0.3),
        "metropolis": lambda: MarkovChain.metropolis(pi),
        "random": lambda: MarkovChain.random(pi, seed=seed),
    }[name]
    chain = make()
    np.testing.assert_allclose(chain.stationary, pi, rtol=1e-13)
    np.testing.assert_allclose(pi @ chain.transition, pi, rtol=1e-14)
    np.testing.assert_allclose(chain.transition.sum(axis=1), 1, rtol=1e-15)
    flow = pi[:, None] * chain.transition
    asymmetry = np.max(np.abs(flow - flow.T))
    assert (asymmetry > 1e-4) if name == "random" else (asymmetry < 1e-16)


def test_random_chains_differ_by_seed_and_repeat_by_it():
    a, b, c = (MarkovChain.random(PI, seed=s).transition for s in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert np.max(np.abs(a - c)) > 1e-3


def test_random_chains_take_a_key():
    keys = jax.random.split(jax.random.key(0))
    a, b, c = (MarkovChain.random(PI, seed=k) for k in (keys[0], keys[0], keys[1]))
    np.testing.assert_array_equal(a.transition, b.transition)
    assert np.max(np.abs(a.transition - c.transition)) > 1e-3
    with pytest.raises(ValueError, match=r"whole number of at least 0 or a `jax"):
        MarkovChain.random(PI, seed=keys)


def test_chains_of_high_order_take_a_key():
    keys = jax.random.split(jax.random.key(0))
    a, b, c = (HighOrderChain.random(3, (1, 1), seed=k) for k in (*keys, keys[0]))
    np.testing.assert_array_equal(a.matrices, c.matrices)
    assert np.max(np.abs(a.matrices - b.matrices)) > 1e-3
    x, y, z = (a.sample(50, seed=k) for k in (*keys, keys[0]))
    np.testing.assert_array_equal(x, z)
    assert np.any(x != y)


def test_integer_seeds_draw_the_same_numbers_in_every_version():
    """Published figures depend on them; NumPy keeps the stream of `default_rng`."""
    B = np.random.default_rng(3).normal(size=(2, 3, 3))
    B *= 3 / np.linalg.norm(B, axis=(1, 2), keepdims=True)
    chain = HighOrderChain.random(3, (1, 1), ratio=2.0, seed=3)
    np.testing.assert_allclose(chain.matrices[0], B[0], rtol=1e-15)
    np.testing.assert_allclose(chain.matrices[1], B[1] / 2, rtol=1e-15)


def test_sticky_matrix_and_entropies(reference_chain):
    np.testing.assert_allclose(
        reference_chain.transition, oracles.sticky(PI, 0.5), rtol=1e-15
    )
    assert reference_chain.size == 4
    assert reference_chain.labels == ("0", "1", "2", "3")
    assert reference_chain.unigram_entropy == pytest.approx(oracles.entropy(PI), 1e-14)
    assert reference_chain.unigram_entropy == pytest.approx(0.72714, abs=5e-6)
    assert reference_chain.entropy_rate == pytest.approx(0.553611, abs=5e-7)


def test_entropy_rate_with_impossible_moves():
    assert MarkovChain(np.roll(np.eye(3), 1, axis=1)).entropy_rate == 0.0


def test_negative_stickiness_is_allowed_down_to_a_zero_entry():
    chain = MarkovChain.sticky([0.5, 0.5], -1.0)
    np.testing.assert_allclose(chain.transition, [[0, 1], [1, 0]], atol=1e-16)


def test_from_counts():
    counts = [[1, 3], [2, 2]]
    chain = MarkovChain.from_counts(counts, labels=["a", "b"])
    np.testing.assert_allclose(chain.transition, [[0.25, 0.75], [0.5, 0.5]])
    smooth = MarkovChain.from_counts([[0, 4], [0, 0]], smoothing=1.0)
    np.testing.assert_allclose(smooth.transition, [[1 / 6, 5 / 6], [0.5, 0.5]])


def test_transition_keeps_its_digits_and_cannot_be_changed():
    P = random_matrix(3, 5)
    chain = MarkovChain(P)
    np.testing.assert_array_equal(chain.transition, P)
    with pytest.raises(ValueError, match="read-only"):
        chain.transition[0, 0] = 1.0
    P[0, 0] = 2.0
    assert chain.transition[0, 0] != 2.0


def test_rows_that_nearly_sum_to_one_are_rescaled():
    P = random_matrix(4, 3) * (1 + 5e-9)
    np.testing.assert_allclose(MarkovChain(P).transition.sum(axis=1), 1, rtol=1e-15)


@pytest.mark.parametrize("miss", [9e-4, -9e-4, 1e-6, 2e-8])
def test_rows_that_were_rounded_are_refused_with_a_remedy(miss):
    P = np.array([[0.5, 0.5], [0.25, 0.75 + miss]])
    with pytest.raises(
        ValueError, match=r"row 1 sums to .*: renormalise it with `P / P"
    ):
        MarkovChain(P)
    # The remedy works as it is written.
    MarkovChain(P / P.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("miss", [2e-3, -0.5, 1.0])
def test_rows_that_are_far_from_stochastic_are_refused_without_it(miss):
    P = np.array([[0.5, 0.5], [0.25, 0.75 + miss]])
    with pytest.raises(ValueError, match=r"row 1 sums to [\d.]+\.$"):
        MarkovChain(P)


def test_one_token():
    chain = MarkovChain([[1.0]])
    assert chain.stationary.tolist() == [1.0]
    assert chain.entropy_rate == 0.0


@pytest.mark.parametrize(
    ("P", "message"),
    [
        (np.ones((2, 3)) / 3, r"`transition` must be a square matrix.*\(2, 3\)"),
        (np.ones(3), r"square matrix, got shape \(3,\)"),
        (np.zeros((0, 0)), "square matrix"),
        ([[0.5, 0.5], [1.5, -0.5]], r"not be negative, got -0.5 at index \(1, 1\)"),
        ([[0.5, 0.5], [np.nan, 1]], r"finite, got nan at index \(1, 0\)"),
        ([[0.5, 0.5j], [0.5, 0.5]], "must be real"),
        ([[0.5, 0.4], [0.5, 0.5]], r"row 0 sums to .*0\.9"),
        ([["a", "b"], ["c", "d"]], "array of numbers"),
        ([[0.5, 0.5], [1.0]], "array of numbers"),
    ],
)
def test_bad_matrices(P, message):
    with pytest.raises(ValueError, match=message):
        MarkovChain(P)


@pytest.mark.parametrize(
    ("P", "unreachable"),
    [
        ([[1, 0], [0, 1]], "from the states 'a' the states 'b' cannot be reached"),
        ([[0.5, 0.5], [0, 1]], "from the states 'b' the states 'a' cannot be reached"),
        ([[1, 0], [0.5, 0.5]], "from the states 'a' the states 'b' cannot be reached"),
    ],
)
def test_reducible_chains_say_which_states_cannot_reach_which(P, unreachable):
    with pytest.raises(ValueError, match=unreachable):
        MarkovChain(P, labels=["a", "b"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MarkovChain(np.eye(1), labels=["a", "b"]),
            "`labels`.*1 tokens, got 2",
        ),
        (lambda: MarkovChain(np.eye(1), labels=[7]), "`labels` must be strings"),
        (lambda: MarkovChain.sticky(PI, 1.0), r"`stickiness` must lie in \[.*got 1"),
        (lambda: MarkovChain.sticky(PI, -0.5), r"`stickiness` must lie in"),
        (lambda: MarkovChain.sticky(PI, np.nan), "`stickiness` must be finite"),
        (lambda: MarkovChain.sticky(PI, [0.5]), "`stickiness` must be a number"),
        (lambda: MarkovChain.sticky(PI, None), "`stickiness` must be a number"),
        (lambda: MarkovChain(np.eye(1), labels=5), "`labels` must be a list of str"),
        (
            lambda: MarkovChain.from_counts([[1, 1], [0, 0]], labels=["a"]),
            "each of the 2 tokens, got 1",
        ),
        (lambda: MarkovChain.sticky([0.5, 0.6], 0.1), "must sum to one, got a sum"),
        (lambda: MarkovChain.sticky([1.0, 0.0], 0.1), "positive everywhere"),
        (lambda: MarkovChain.metropolis([1.5, -0.5]), "not be negative"),
        (lambda: MarkovChain.random([[0.5, 0.5]]), "one-dimensional"),
        (
            lambda: MarkovChain.from_counts([[1, 1], [0, 0]]),
            "token '1' is never followed",
        ),
        (
            lambda: MarkovChain.from_counts([[1, -1], [1, 1]]),
            "`counts` must not be neg",
        ),
        (lambda: MarkovChain.from_counts([[1]], smoothing=-1), "`smoothing` must be"),
    ],
)
def test_bad_constructor_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_repr_names_the_size(reference_chain):
    assert "size=4" in repr(reference_chain)
    assert gradflow.MarkovChain is MarkovChain
