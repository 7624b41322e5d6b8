"""From text to tokens."""

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

from .._core.checks import Checked

# A mark such as <|endoftext|> is one token, a word keeps its apostrophes (that's), and
# any other character that is not white space is a token by itself.
_WORDS = re.compile(r"<\|\w+\|>|\w+(?:['’]\w+)*|[^\w\s]")


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
    - `by`: `"words"` separates words and punctuation marks, for raw text;
        `"whitespace"` splits at white space only, for text that is already tokenised;
        or a function from a string to its tokens.
    - `line_end`: a token to put at the end of every line, including blank lines. The
        text is then split line by line.
    """
    if not isinstance(text, str):
        raise ValueError(f"`text` must be a string, got {type(text).__name__}.")
    if line_end is not None and (not isinstance(line_end, str) or not line_end):
        raise ValueError(f"`line_end` must be a token or None, got {line_end!r}.")
    cut = _cutter(by)
    if not text.strip():
        raise ValueError(
            "`text` must contain more than white space, got "
            f"{len(text)} characters of white space."
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


def _cutter(by: object) -> Callable[[str], Iterable[str]]:
    if callable(by):

        def own(text: str) -> Iterable[Any]:  # `tokenise` checks the tokens
            tokens = by(text)
            # A string would pass for a list of its characters.
            if isinstance(tokens, str) or not isinstance(tokens, Iterable):
                raise ValueError(
                    f"`by` must return a list of tokens, got {tokens!r:.60}."
                )
            return tokens

        return own
    if by == "words":
        return _WORDS.findall
    if by == "whitespace":
        return str.split
    raise ValueError(
        f"`by` must be 'words', 'whitespace' or a function of the text, got {by!r}."
    )
