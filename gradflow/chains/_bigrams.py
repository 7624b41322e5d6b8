"""Counts of pairs of successive tokens, for tokens in any form."""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
from jaxtyping import Float

from .._core import checks
from ._vocabulary import Vocabulary


def bigrams(
    tokens: Any, vocabulary: object, keep: Any, labels: Sequence[str] | None
) -> tuple[Float[np.ndarray, "d d"], Sequence[str] | None]:
    """How often token j comes right after token i, and the labels of the tokens; the
    arguments are those of `MarkovChain.from_tokens`."""
    if _are_numbers(tokens):
        if _given(keep):
            raise ValueError("`keep` must be left out if `tokens` are numbers.")
        return _bigrams_of_numbers(tokens, vocabulary, labels)
    if labels is not None:
        raise ValueError("`labels` must be left out if `tokens` are strings.")
    words = _vocabulary_of_strings(tokens, vocabulary, keep)
    return _pairs(words.encode_all(tokens), words.size), words.labels


def _bigrams_of_numbers(
    tokens: object, vocabulary: object, labels: Sequence[str] | None
) -> tuple[Float[np.ndarray, "d d"], Sequence[str] | None]:
    sequences = checks.token_sequences("tokens", tokens)
    seen = 1 + max(int(piece.max()) for piece in sequences if piece.size)
    if isinstance(vocabulary, Vocabulary):
        if vocabulary.size < seen:
            raise ValueError(
                f"`tokens` must be in the vocabulary of {vocabulary.size}, got "
                f"{seen - 1}."
            )
        names = vocabulary.labels if labels is None else labels
        return _pairs(sequences, vocabulary.size), names
    d = seen if vocabulary is None else vocabulary
    return _pairs(sequences, checks.whole_number("vocabulary", d, least=seen)), labels


def _vocabulary_of_strings(tokens: Any, vocabulary: object, keep: Any) -> Vocabulary:
    if isinstance(vocabulary, Vocabulary):
        if _given(keep):
            raise ValueError("`keep` must be left out if a `vocabulary` is given.")
        return vocabulary
    if vocabulary is not None:
        vocabulary = checks.whole_number("vocabulary", vocabulary, least=2)
    return Vocabulary.from_tokens(tokens, vocabulary, keep=keep)


def _given(keep: object) -> bool:
    return not (isinstance(keep, Sized) and len(keep) == 0)


def _are_numbers(tokens: object) -> bool:
    """Whether the first of `tokens` is a whole number."""
    while isinstance(tokens, list | tuple):
        # Some sequences may be empty, but not all of them.
        nested = list | tuple | np.ndarray
        tokens = next((t for t in tokens if not isinstance(t, nested) or len(t)), None)
    if isinstance(tokens, np.ndarray):
        return tokens.dtype.kind in "iu"
    return isinstance(tokens, int | np.integer) and not isinstance(tokens, bool)


def _pairs(sequences: list[np.ndarray], d: int) -> Float[np.ndarray, "d d"]:
    # One number stands for a pair, so that all pairs are counted in one pass.
    pairs = [tokens[:-1].astype(np.int64) * d + tokens[1:] for tokens in sequences]
    table = np.bincount(np.concatenate(pairs), minlength=d * d).reshape(d, d)
    if not table.any():
        raise ValueError(
            "`tokens` must contain a token and one after it, got no such pair."
        )
    return table.astype(float)
