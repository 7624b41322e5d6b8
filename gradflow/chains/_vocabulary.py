"""Vocabularies: from tokens to numbers."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any, TypeGuard

import numpy as np
from jaxtyping import Int

from .._core import checks
from .._core.checks import Checked

REST = "<rest>"
"""The default label of the token that stands for all tokens left out."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A numbering of tokens: token `labels[i]` has the number i."""

    labels: Checked[tuple[str, ...]]
    """The tokens, the most frequent first; the one for the rest comes last."""
    rest: Checked[str | None] = None
    """The label that stands for all other tokens; None if no others are allowed."""

    def __post_init__(self):
        if isinstance(self.labels, str) or not isinstance(self.labels, Iterable):
            raise ValueError(f"`labels` must be a list of tokens, got {self.labels!r}.")
        object.__setattr__(self, "labels", tuple(self.labels))
        if not self.labels or len(set(self.labels)) < len(self.labels):
            raise ValueError(
                f"`labels` must be distinct tokens, got {len(self.labels)}, of which "
                f"{len(set(self.labels))} differ."
            )
        if self.rest is not None and self.rest not in self.labels:
            raise ValueError(f"`rest` must be one of `labels`, got {self.rest!r}.")

    @classmethod
    def from_tokens(
        cls,
        tokens: Checked[Sequence[str] | Sequence[Sequence[str]]],
        size: Checked[int | None] = None,
        *,
        keep: Checked[Iterable[str]] = (),
        rest: Checked[str] = REST,
    ) -> "Vocabulary":
        """The `size` - 1 most frequent tokens and one for the rest.

        **Arguments:**

        - `tokens`: strings, as one sequence or a list of several.
        - `size`: the number of tokens d. By default all tokens that occur, without one
            for the rest.
        - `keep`: tokens that must have a number of their own; they replace the least
            frequent ones.
        - `rest`: the label of the token for the rest. It may occur in the text, like
            `"<unk>"`, and then counts as part of the rest.
        """
        counts = Counter(chain.from_iterable(string_sequences(tokens)))
        wrong = next((token for token in counts if not isinstance(token, str)), None)
        if wrong is not None:
            raise ValueError(f"`tokens` must be strings, got {wrong!r} among them.")
        kept = _kept(keep, counts)
        if size is None:
            return cls(tuple(token for token, _ in counts.most_common()))
        size = checks.whole_number("size", size, least=2)
        if not isinstance(rest, str) or not rest:
            raise ValueError(f"`rest` must be a token, got {rest!r}.")
        if len(counts) < size:
            raise ValueError(
                "`size` must be at most the number of distinct tokens, "
                f"{len(counts):,}, got {size:,}."
            )
        kept.discard(rest)
        if len(kept) > size - 1:
            raise ValueError(
                f"`keep` must leave a place for the rest: at most {size - 1} tokens "
                f"for `size` = {size}, got {len(kept)}."
            )
        # Of equally frequent tokens, the one that occurs first comes first.
        ranked = [token for token, _ in counts.most_common() if token != rest]
        free = size - 1 - len(kept)
        chosen = kept.union([token for token in ranked if token not in kept][:free])
        return cls((*(token for token in ranked if token in chosen), rest), rest)

    @property
    def size(self) -> int:
        """The number of tokens, d."""
        return len(self.labels)

    def index(self, token: Checked[str]) -> int:
        """The number of a token that has one of its own."""
        if token not in self.labels:
            raise ValueError(f"`token` must be in the vocabulary, got {token!r}.")
        return self.labels.index(token)

    # The return type depends on whether `tokens` are one sequence or several.
    def encode(self, tokens: Checked[Sequence[str] | Sequence[Sequence[str]]]) -> Any:
        """The numbers of `tokens`: an array for one sequence, a list of arrays for a
        list of several."""
        encoded = self.encode_all(tokens)
        return encoded if _are_several(tokens) else encoded[0]

    def encode_all(
        self, tokens: Checked[Sequence[str] | Sequence[Sequence[str]]]
    ) -> list[Int[np.ndarray, " length"]]:
        """The numbers of `tokens` as a list of arrays, one for each sequence."""
        pieces = string_sequences(tokens)
        numbers = {token: i for i, token in enumerate(self.labels)}
        other = -1 if self.rest is None else numbers[self.rest]
        encoded = [
            np.fromiter(map(numbers.get, piece, repeat(other)), np.int64, len(piece))
            for piece in pieces
        ]
        for piece, codes in zip(pieces, encoded, strict=True):
            if codes.size and codes.min() < 0:
                unknown = piece[int(codes.argmin())]
                raise ValueError(
                    f"`tokens` must be in the vocabulary, got {unknown!r} (a "
                    "vocabulary made with a `size` has a token for the rest)."
                )
        return encoded

    def __repr__(self) -> str:
        first = ", ".join(map(repr, self.labels[:4]))
        more = ", …" if self.size > 4 else ""
        return f"Vocabulary(size={self.size}, labels=({first}{more}))"


def _kept(keep: object, counts: Counter[str]) -> set[str]:
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise ValueError(f"`keep` must be a list of tokens, got {keep!r}.")
    kept = list(keep)
    absent = [token for token in kept if token not in counts]
    if absent:
        raise ValueError(
            "`keep` must be tokens that occur in the text, got "
            f"{', '.join(map(repr, absent))}, which never occur."
        )
    return set(kept)


def string_sequences(tokens: object) -> list[Sequence[Any]]:
    """`tokens` as a list of sequences. The caller checks that their entries are
    strings, where that costs less."""
    if isinstance(tokens, str | bytes):
        raise ValueError(
            "`tokens` must be a list of tokens, got a text (`corpora.tokenise` splits "
            "a text into tokens)."
        )
    if not isinstance(tokens, Sequence | np.ndarray):
        raise ValueError(
            f"`tokens` must be a list of tokens, got {type(tokens).__name__}."
        )
    given = list(tokens) if _are_several(tokens) else [tokens]
    pieces = [p.tolist() if isinstance(p, np.ndarray) else p for p in given]
    if any(isinstance(p, str) or not isinstance(p, Sequence) for p in pieces):
        raise ValueError("`tokens` must be one list of tokens or a list of such lists.")
    if not any(len(piece) for piece in pieces):
        raise ValueError("`tokens` must contain at least one token, got none.")
    return pieces


def _are_several(tokens: Sequence | np.ndarray) -> TypeGuard[Sequence[Sequence[Any]]]:
    return len(tokens) > 0 and isinstance(tokens[0], list | tuple | np.ndarray)
