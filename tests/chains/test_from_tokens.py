"""Chains from tokens, against counting by hand."""

import itertools
from collections import Counter

import numpy as np
import pytest
from generated_text import TEXT, TOKENS

from gradflow import MarkovChain, OneLayerTransformer, Problem, SampledContext
from gradflow.corpora import Vocabulary, tokenise


def counted(sequences):
    """How often each pair occurs."""
    return Counter(
        pair for tokens in sequences for pair in itertools.pairwise(map(str, tokens))
    )


@pytest.mark.parametrize("smoothing", [1e-3, 0.5])
@pytest.mark.parametrize("form", ["strings", "numbers", "list of numbers", "lines"])
def test_a_chain_of_tokens_has_the_frequencies_of_pairs(form, smoothing):
    d = 15
    if form == "lines":
        given = [tokenise(line) for line in TEXT.splitlines()]
        sequences = given
    else:
        given, sequences = TOKENS, [TOKENS]
    words = Vocabulary.from_tokens(given, d)
    vocabulary = words
    if form == "strings":
        vocabulary = d
    elif "numbers" in form:
        given = words.encode(TOKENS)
        given = given.tolist() if form == "list of numbers" else given
    chain = MarkovChain.from_tokens(given, vocabulary, smoothing=smoothing)
    assert chain.labels == words.labels
    known = set(words.labels)
    named = [[t if t in known else "<rest>" for t in line] for line in sequences]
    pairs = counted(named)
    table = np.array([[pairs[a, b] for b in words.labels] for a in words.labels])
    assert table.sum() == sum(len(line) - 1 for line in sequences)
    P = table + smoothing
    P = P / P.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(chain.transition, P, rtol=1e-14)


def test_empty_sequences_count_for_nothing():
    pairs = [[0, 1, 0, 1, 1], []]
    chain = MarkovChain.from_tokens(pairs, smoothing=0.5)
    alone = MarkovChain.from_tokens(pairs[0], smoothing=0.5)
    np.testing.assert_array_equal(chain.transition, alone.transition)
    sample = SampledContext(chain, pairs, 2)
    problem = Problem(OneLayerTransformer(2, 2), sample)
    assert float(problem(problem.init())) == pytest.approx(np.log(2), rel=1e-3)


def test_the_stationary_law_of_a_closed_text_is_its_frequencies():
    # Without smoothing and with the first token again at the end, exactly.
    tokens = [*TOKENS, TOKENS[0]]
    chain = MarkovChain.from_tokens(tokens)
    counts = Counter(TOKENS)
    expected = [counts[label] / len(TOKENS) for label in chain.labels]
    np.testing.assert_allclose(chain.stationary, expected, rtol=1e-12)


def test_numbers_may_have_names_or_none():
    chain = MarkovChain.from_tokens([0, 1, 1, 0], labels=["x", "y"])
    np.testing.assert_allclose(chain.transition, [[0, 1], [0.5, 0.5]])
    assert chain.labels == ("x", "y")
    wider = MarkovChain.from_tokens([0, 1, 1, 0], 3, smoothing=1.0)
    assert wider.labels == ("0", "1", "2")
    np.testing.assert_allclose(wider.transition[2], 1 / 3)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([],), {}, "`tokens` must contain at least one token, got none"),
        (
            (["a"],),
            {},
            "`tokens` must contain a token and one after it, got no such pair",
        ),
        (([["a"], ["b"]],), {}, "got no such pair"),
        ((TEXT,), {}, "`tokens` must be a list of tokens, got a text"),
        ((TOKENS, 1000), {}, "at most the number of distinct tokens, "),
        ((TOKENS, 1), {}, "`vocabulary` must be a whole number of at least 2, got 1"),
        ((TOKENS, 9), {"keep": ["whale"]}, "got 'whale', which never occur"),
        ((TOKENS, 9), {"smoothing": -1}, "`smoothing` must be a finite number"),
        ((TOKENS, 9), {"labels": list("abcdefghi")}, "`labels` must be left out"),
        (([0, 2], 2), {}, "`vocabulary` must be a whole number of at least 3, got 2"),
        (([0, 2], Vocabulary(["a"])), {}, "in the vocabulary of 1, got 2"),
        (([0, -1],), {}, "`tokens` must not be negative, got -1"),
        (([0, 1],), {"keep": ["a"]}, "`keep` must be left out if `tokens` are num"),
        ((["a", "b"], Vocabulary(["a", "b"])), {"keep": ["a"]}, "if a `vocabulary`"),
        ((["a", 1],), {}, "`tokens` must be strings, got 1"),
    ],
)
def test_refused_tokens(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        MarkovChain.from_tokens(*arguments, **options)


def test_a_reducible_chain_is_refused_by_the_names_of_its_tokens():
    wanted = "`tokens` must make an irreducible chain .or pass more `smoothing`., but "
    with pytest.raises(ValueError, match=f"{wanted}nothing ever follows 'end'"):
        MarkovChain.from_tokens(["a", "b", "a", "b", "a", "end"])
    once = ["start", "a", "b", "a", "b", "a", "b"]
    with pytest.raises(
        ValueError, match=f"{wanted}from the states 'a', 'b' the states 'start' cannot"
    ):
        MarkovChain.from_tokens(once)
    # A smoothing that is lost in rounding leaves it as it was.
    with pytest.raises(ValueError, match="'start' cannot be reached"):
        MarkovChain.from_tokens(once, smoothing=5e-324)
    assert MarkovChain.from_tokens(once, smoothing=1e-3).size == 3
