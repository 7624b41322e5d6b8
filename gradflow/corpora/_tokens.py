"""From text to tokens, and from tokens to numbers."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, Literal

import numpy as np

from .._core import checks
from .._core.checks import Checked

# A mark such as <|endoftext|> is one token, a word keeps its apostrophes (that's), and
# what else is no white space stands alone.
_WORDS = re.compile(r"<\|\w+\|>|\w+(?:['’]\w+)*|[^\w\s]")

REST = "<rest>"
"""The name of the token that stands for all that a vocabulary leaves out."""


def tokenise(
    text: Checked[str],
    by: Checked[
        Literal["words", "whitespace"] | Callable[[str], Iterable[str]]
    ] = "words",
    *,
    line_end: Checked[str | None] = None,
) -> list[str]:
    """The tokens of a text, in order.

    **Arguments:**

    - `text`: a string that is not empty.
    - `by`: `"words"` splits words from punctuation marks, for raw text; `"whitespace"`
        splits at white space only, for text that is tokenised already; or a function
        from a string to its tokens.
    - `line_end`: a token to put at the end of every line, blank ones too. The text is
        then split line by line.
    """
    if not isinstance(text, str):
        raise ValueError(f"`text` must be a string, got {type(text).__name__}.")
    if line_end is not None and (not isinstance(line_end, str) or not line_end):
        raise ValueError(f"`line_end` must be a token or None, got {line_end!r}.")
    cut = _cutter(by)
    if not text.strip():
        raise ValueError(
            f"`text` must hold something beside white space, got {len(text)} "
            "characters of it."
        )
    if line_end is None:
        tokens = list(cut(text))
    else:
        tokens = []
        for line in text.removesuffix("\n").split("\n"):
            tokens.extend(cut(line))
            tokens.append(line_end)
    wrong = next((token for token in tokens if not isinstance(token, str)), None)
    if wrong is not None or not tokens:
        found = "none" if wrong is None else repr(wrong)
        raise ValueError(f"`by` must return tokens as strings, got {found}.")
    return tokens


def _cutter(by: Any) -> Callable[[str], Iterable[str]]:
    def own(text: str) -> Iterable[Any]:
        tokens = by(text)
        # A string would pass for a list of its characters.
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise ValueError(f"`by` must return a list of tokens, got {tokens!r:.60}.")
        return tokens

    if callable(by):
        return own
    if by == "words":
        return _WORDS.findall
    if by == "whitespace":
        return str.split
    raise ValueError(
        f"`by` must be 'words', 'whitespace' or a function of the text, got {by!r}."
    )


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A number for each token: token `labels[i]` has the number i."""

    labels: Checked[tuple[str, ...]]
    """The tokens, the most frequent first, what stands for the rest last."""
    rest: Checked[str | None] = None
    """The label of all other tokens; None if there may be no others."""

    def __post_init__(self):
        if isinstance(self.labels, str) or not isinstance(self.labels, Iterable):
            raise ValueError(f"`labels` must be a list of tokens, got {self.labels!r}.")
        object.__setattr__(self, "labels", tuple(self.labels))
        if not self.labels or len(set(self.labels)) < len(self.labels):
            raise ValueError(
                f"`labels` must be distinct tokens, got {len(self.labels)} of which "
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
        """The most frequent `size` - 1 tokens and one for the rest.

        **Arguments:**

        - `tokens`: strings, in a sequence or a list of several.
        - `size`: the number of tokens d; by default all that occur, and no rest.
        - `keep`: tokens that must have a number of their own; they take the places of
            the least frequent.
        - `rest`: the name of what stands for the rest. It may be a token of the text,
            such as `"<unk>"`, which then is counted among the rest.
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
        # Of equally frequent tokens the one that occurs first.
        ranked = [token for token, _ in counts.most_common() if token != rest]
        free = size - 1 - len(kept)
        chosen = kept.union([token for token in ranked if token not in kept][:free])
        return cls((*(token for token in ranked if token in chosen), rest), rest)

    @property
    def size(self) -> int:
        """d, the number of tokens."""
        return len(self.labels)

    def index(self, token: Checked[str]) -> int:
        """The number of a token that has one of its own."""
        if token not in self.labels:
            raise ValueError(f"`token` must be in the vocabulary, got {token!r}.")
        return self.labels.index(token)

    def encode(self, tokens: Checked[Sequence[str] | Sequence[Sequence[str]]]) -> Any:
        """The numbers of `tokens`: an array for a sequence, a list of arrays for a
        list of several."""
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
                    f"`tokens` must be in the vocabulary, got {unknown!r} (one made "
                    "with a `size` has a token for the rest)."
                )
        return encoded if _are_several(tokens) else encoded[0]

    def __repr__(self) -> str:
        first = ", ".join(map(repr, self.labels[:4]))
        more = ", …" if self.size > 4 else ""
        return f"Vocabulary(size={self.size}, labels=({first}{more}))"


def _kept(keep: Any, counts: Counter) -> set[str]:
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise ValueError(f"`keep` must be a list of tokens, got {keep!r}.")
    kept = list(keep)
    absent = [token for token in kept if token not in counts]
    if absent:
        raise ValueError(
            "`keep` must be tokens that occur in the text, got "
            f"{', '.join(map(repr, absent))}, which never do."
        )
    return set(kept)


def string_sequences(tokens: Any) -> list[Sequence[Any]]:
    """`tokens` as a list of sequences of strings; that what they hold are strings is
    for others to check, where it costs less."""
    if isinstance(tokens, str | bytes):
        raise ValueError(
            "`tokens` must be a list of tokens, got a text (`corpora.tokenise` makes "
            "tokens of it)."
        )
    if not isinstance(tokens, Sequence | np.ndarray):
        raise ValueError(
            f"`tokens` must be a list of tokens, got {type(tokens).__name__}."
        )
    pieces: list[Any] = list(tokens) if _are_several(tokens) else [tokens]
    pieces = [p.tolist() if isinstance(p, np.ndarray) else p for p in pieces]
    if any(isinstance(p, str) or not isinstance(p, Sequence) for p in pieces):
        raise ValueError("`tokens` must be one list of tokens or a list of such.")
    if not any(len(piece) for piece in pieces):
        raise ValueError("`tokens` must hold at least one token, got none.")
    return pieces


def _are_several(tokens: Any) -> bool:
    return len(tokens) > 0 and isinstance(tokens[0], list | tuple | np.ndarray)
