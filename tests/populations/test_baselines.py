"""The losses of simple predictors, against closed forms and counting by hand."""

import math
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import oracles
import pytest
from generated_text import TOKENS

from gradflow import (
    AllContexts,
    FiniteContext,
    HighOrderChain,
    InfiniteContext,
    MarkovChain,
    OneLayerTransformer,
    Problem,
    Sample,
    SampledContext,
)
from gradflow.corpora import Vocabulary
from gradflow.populations._sparse import SparseContexts

CHAIN = MarkovChain.random([0.6, 0.3, 0.1], seed=3)
LAST = "best from the last token"


@pytest.mark.parametrize(
    "population",
    [
        InfiniteContext(CHAIN),
        FiniteContext(CHAIN, 4),
        FiniteContext(CHAIN, 4, positions="all"),
    ],
    ids=["infinite", "last position", "all positions"],
)
def test_closed_forms_of_a_stationary_chain(population):
    baselines = population.baselines
    assert list(baselines) == ["uniform", "best unigram", LAST]
    assert baselines["uniform"] == pytest.approx(math.log(3), rel=1e-15)
    entropy = oracles.entropy(CHAIN.stationary)
    assert baselines["best unigram"] == pytest.approx(entropy, rel=1e-13)
    assert baselines[LAST] == pytest.approx(CHAIN.entropy_rate, rel=1e-13)
    problem = Problem(OneLayerTransformer(3, 2), population)
    assert problem.baselines == baselines


def test_impossible_moves():
    cycle = InfiniteContext(MarkovChain(np.roll(np.eye(3), 1, axis=1)))
    assert cycle.baselines["best unigram"] == pytest.approx(math.log(3))
    assert cycle.baselines[LAST] == 0.0


def entropy_of(counts):
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


@pytest.fixture(scope="module")
def sample():
    words = Vocabulary.from_tokens(TOKENS, 9)
    chain = MarkovChain.from_tokens(TOKENS, words, smoothing=1e-3)
    return SampledContext(chain, words.encode(TOKENS), 3), words.encode(TOKENS)


def test_baselines_of_a_sample_are_those_of_its_examples(sample):
    population, numbers = sample
    after = defaultdict(Counter)
    for last, following in pairwise(numbers[2:]):
        after[int(last)][int(following)] += 1
    total = len(numbers) - 3
    unigram = Counter(int(token) for token in numbers[3:])
    baselines = population.baselines
    assert baselines["uniform"] == pytest.approx(math.log(9))
    assert baselines["best unigram"] == pytest.approx(entropy_of(unigram), rel=1e-12)
    expected = sum(entropy_of(c) * sum(c.values()) / total for c in after.values())
    assert baselines[LAST] == pytest.approx(expected, rel=1e-12)
    # Seeing more of the context can only help.
    assert float(population.entropy) < baselines[LAST] < baselines["best unigram"]


def test_baselines_of_a_sample_need_no_tables(sample, monkeypatch):
    def refuse(*_):
        raise AssertionError("a table over all tokens was built")

    monkeypatch.setattr(SparseContexts, "targets", refuse)
    monkeypatch.setattr(SparseContexts, "log_multiplicities", property(refuse))
    population, _ = sample
    assert set(population.baselines) == {"uniform", "best unigram", LAST}
    with pytest.raises(AssertionError, match="table"):
        _ = population.targets


def test_windows_have_the_baselines_of_any_population():
    chain = HighOrderChain.random(3, (1, 1), seed=2, scale=2.0)
    population = AllContexts(chain)
    tokens = chain.stationary.reshape(3, 3).sum(axis=1)
    expected = {"uniform": math.log(3), "best unigram": oracles.entropy(tokens)}
    assert population.baselines == pytest.approx(expected, rel=1e-12)
    seen = Sample([0, 1, 1, 0, 1], 1)
    unigram = oracles.entropy(np.array([0.25, 0.75]))
    assert seen.baselines["best unigram"] == pytest.approx(unigram)
