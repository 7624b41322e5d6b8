"""Vocabularies, against counting by hand."""

from collections import Counter

import numpy as np
import pytest
from generated_text import TEXT, TOKENS

from gradflow import chains, corpora
from gradflow.corpora import Vocabulary


def test_corpora_and_chains_share_one_class():
    assert corpora.Vocabulary is chains.Vocabulary


def test_a_vocabulary_has_the_most_frequent_tokens_and_one_for_the_rest():
    words = Vocabulary.from_tokens(TOKENS, 12)
    frequent = [token for token, _ in Counter(TOKENS).most_common(11)]
    assert words.labels == (*frequent, "<rest>")
    assert words.size == 12
    numbers = words.encode(TOKENS)
    assert numbers.dtype == np.int64
    expected = [t if t in frequent else "<rest>" for t in TOKENS]
    assert [words.labels[i] for i in numbers] == expected
    assert words.labels[words.index("the")] == "the"


def test_tokens_are_kept_by_name_in_the_places_of_the_least_frequent():
    ranked = [token for token, _ in Counter(TOKENS).most_common()]
    rare, common = ranked[-3], ranked[0]
    words = Vocabulary.from_tokens(TOKENS, 8, keep=[rare, common])
    assert words.labels == (*ranked[:6], rare, "<rest>")


def test_the_rest_may_be_a_token_of_the_text():
    tokens = ["a", "a", "a", "<unk>", "<unk>", "<unk>", "<unk>", "b", "b", "c"]
    words = Vocabulary.from_tokens(tokens, 3, rest="<unk>")
    assert words.labels == ("a", "b", "<unk>")
    # It has its place, so to keep it costs none.
    assert Vocabulary.from_tokens(tokens, 3, rest="<unk>", keep=["<unk>"]) == words
    np.testing.assert_array_equal(words.encode(tokens), [0] * 3 + [2] * 4 + [1, 1, 2])


def test_several_sequences_are_encoded_one_by_one():
    pieces = [["a", "b"], [], ["b", "c", "b"]]
    words = Vocabulary.from_tokens(pieces)
    assert words.labels == ("b", "a", "c")
    assert words.rest is None
    found = [list(piece) for piece in words.encode(pieces)]
    assert found == [[1, 0], [], [0, 2, 0]]
    np.testing.assert_array_equal(words.encode(np.array(["c", "a"])), [2, 1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Vocabulary.from_tokens(["a", "b", "a"], 3),
            "`size` must be at most the number of distinct tokens, 2, got 3",
        ),
        (
            lambda: Vocabulary.from_tokens(TOKENS, 9, keep=["the", "whale", "sea"]),
            "`keep` must be tokens that occur in the text, got 'whale', 'sea', which",
        ),
        (
            lambda: Vocabulary.from_tokens(TOKENS, keep=["whale"]),
            "got 'whale', which never occur",
        ),
        (
            lambda: Vocabulary.from_tokens(TOKENS, 3, keep=["the", "a", "cat"]),
            "`keep` must leave a place for the rest: at most 2 tokens",
        ),
        (
            lambda: Vocabulary.from_tokens(TOKENS, 3, keep="the"),
            "`keep` must be a list",
        ),
        (lambda: Vocabulary.from_tokens([], 3), "`tokens` must contain at least one"),
        (
            lambda: Vocabulary.from_tokens([[], []], 3),
            "must contain at least one token",
        ),
        (lambda: Vocabulary.from_tokens(TEXT, 3), "got a text .*tokenise"),
        (lambda: Vocabulary.from_tokens(7, 3), "`tokens` must be a list of tokens"),
        (lambda: Vocabulary.from_tokens([["a"], "bc"]), "one list of tokens or a list"),
        (lambda: Vocabulary.from_tokens(["a", 1, "b"]), "must be strings, got 1"),
        (lambda: Vocabulary.from_tokens(TOKENS, 1), "`size` must be a whole number"),
        (lambda: Vocabulary.from_tokens(TOKENS, 4, rest=""), "`rest` must be a token"),
        (lambda: Vocabulary(["a", "a"]), "`labels` must be distinct tokens, got 2"),
        (lambda: Vocabulary(["a"], "b"), "`rest` must be one of `labels`, got 'b'"),
        (lambda: Vocabulary(["a"]).encode(["a", "x"]), "in the vocabulary, got 'x'"),
        (lambda: Vocabulary(["a"]).index("x"), "`token` must be in the vocabulary"),
    ],
)
def test_refused_vocabularies(make, message):
    with pytest.raises(ValueError, match=message):
        make()
