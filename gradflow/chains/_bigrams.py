"""How often each token comes right after each, in tokens of any form."""

from collections.abc import Sized
from typing import Any

import numpy as np
from jaxtyping import Float

from .._core import checks
from ..corpora import Vocabulary


def bigrams(
    tokens: Any, vocabulary: Any, keep: Any, labels: Any
) -> tuple[Float[np.ndarray, "d d"], Any]:
    """The number of times that j comes right after i, and the names of the tokens; the
    arguments are those of `MarkovChain.from_tokens`."""
    known = isinstance(vocabulary, Vocabulary)
    if _are_numbers(tokens):
        if _given(keep):
            raise ValueError("`keep` must be left out where `tokens` are numbers.")
        sequences = checks.token_sequences("tokens", tokens)
        seen = 1 + max(int(piece.max()) for piece in sequences if piece.size)
        if known and vocabulary.size < seen:
            raise ValueError(
                f"`tokens` must be in the vocabulary of {vocabulary.size}, got "
                f"{seen - 1}."
            )
        d = vocabulary.size if known else seen if vocabulary is None else vocabulary
        d = checks.whole_number("vocabulary", d, least=seen)
        names = vocabulary.labels if known and labels is None else labels
        return _pairs(sequences, d), names
    if labels is not None:
        raise ValueError("`labels` must be left out where `tokens` are strings.")
    if known and _given(keep):
        raise ValueError("`keep` must be left out where a `vocabulary` is given.")
    if not known and vocabulary is not None:
        checks.whole_number("vocabulary", vocabulary, least=2)
    words = (
        vocabulary if known else Vocabulary.from_tokens(tokens, vocabulary, keep=keep)
    )
    numbers = words.encode(tokens)
    sequences = numbers if isinstance(numbers, list) else [numbers]
    return _pairs(sequences, words.size), words.labels


def _given(keep: Any) -> bool:
    return not (isinstance(keep, Sized) and len(keep) == 0)


def _are_numbers(tokens: Any) -> bool:
    """Whether the first of `tokens` is a whole number."""
    while isinstance(tokens, list | tuple):
        # Sequences may be empty, but not all.
        nested = list | tuple | np.ndarray
        tokens = next((t for t in tokens if not isinstance(t, nested) or len(t)), None)
    if isinstance(tokens, np.ndarray):
        return tokens.dtype.kind in "iu"
    return isinstance(tokens, int | np.integer) and not isinstance(tokens, bool)


def _pairs(sequences: list[np.ndarray], d: int) -> Float[np.ndarray, "d d"]:
    # One number names a pair, so that they are counted in one pass.
    pairs = [tokens[:-1].astype(np.int64) * d + tokens[1:] for tokens in sequences]
    table = np.bincount(np.concatenate(pairs), minlength=d * d).reshape(d, d)
    if not table.any():
        raise ValueError("`tokens` must hold a token and one after it, got no pair.")
    return table.astype(float)
