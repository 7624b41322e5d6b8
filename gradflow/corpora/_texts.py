"""Texts from a file, from the user's cache or from the public hub."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from .._core import checks
from .._core.checks import Checked
from .._core.file_format import write_whole
from ._hub import HubError, first_lines, parquet_texts
from ._tokens import tokenise

FIRST_LINES = 10_000
"""The number of lines of TinyStories (2 GB in all) that are fetched from the hub."""


def read_text(path: Checked[str | os.PathLike]) -> str:
    """The text of a file in UTF-8."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"`path` must be the path of a file, got {path!r}.")
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"`path` must be an existing file, got '{file}'.")
    content = file.read_bytes()
    try:
        text = content.decode("utf-8-sig")
        at = text.find("\0")
    except UnicodeDecodeError as error:
        text, at = "", error.start
    if at >= 0:
        raise ValueError(
            f"`path` must be a text file in UTF-8, got '{file}', which is not text at "
            f"byte {at:,}."
        )
    if not text.strip():
        raise ValueError(f"`path` must be a text file, got '{file}', which is empty.")
    # Line ends of any system become "\n", as in Python's text mode.
    return text.replace("\r\n", "\n")


def wikitext2(
    path: Checked[str | os.PathLike | None] = None,
    *,
    split: Checked[Literal["train", "valid", "test"]] = "train",
) -> list[str]:
    """The tokens of WikiText-2, split at white space, with `"<eos>"` at the end of
    every line.

    **Arguments:**

    - `path`: the text file, or a folder with `train.txt`, `valid.txt` and `test.txt`.
        By default the corpus is read from the user's cache; if it is not there, it is
        first fetched from the public hub and cached.
    - `split`: the part of the corpus.
    """
    _check_split(split, ("train", "valid", "test"))
    part = "validation" if split == "valid" else split

    def fetch() -> str:
        name = f"wikitext-2-v1/{part}-00000-of-00001.parquet"
        rows = parquet_texts("Salesforce/wikitext", name)
        # On the hub a blank line is an empty row; all other rows end in a line break.
        return "".join(row if row.endswith("\n") else row + "\n" for row in rows)

    text = _corpus("WikiText-2", "wikitext-2", f"{split}.txt", path, fetch)
    return tokenise(text, "whitespace", line_end="<eos>")


def tinystories(
    path: Checked[str | os.PathLike | None] = None,
    *,
    split: Checked[Literal["train", "valid"]] = "train",
    lines: Checked[int | None] = None,
) -> list[str]:
    """The tokens of TinyStories (GPT-4 version): words and punctuation marks. Each
    story ends in `"<|endoftext|>"`.

    **Arguments:**

    - `path`: the text file, or a folder with `train.txt` and `valid.txt`. By default
        the corpus is read from the user's cache; if it is not there, its first 10,000
        lines are first fetched from the public hub and cached.
    - `split`: the part of the corpus.
    - `lines`: the number of lines to read; by default all.
    """
    _check_split(split, ("train", "valid"))
    lines = None if lines is None else checks.whole_number("lines", lines)

    def fetch() -> str:
        name = f"TinyStoriesV2-GPT4-{split}.txt"
        return first_lines("roneneldan/TinyStories", name, FIRST_LINES)

    text = _corpus("TinyStories", "tinystories", f"{split}.txt", path, fetch)
    if lines is not None:
        text = "\n".join(text.split("\n", lines)[:lines])
    return tokenise(text, "words")


def _check_split(split: object, known: tuple[str, ...]) -> None:
    if split not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"`split` must be one of {names}, got {split!r}.")


def _corpus(
    title: str,
    folder: str,
    name: str,
    path: Checked[str | os.PathLike | None],
    fetch: Callable[[], str],
) -> str:
    if path is not None:
        given = isinstance(path, str | os.PathLike) and Path(path).is_dir()
        return read_text(Path(path) / name if given else path)
    kept = _cache() / folder / name
    if not kept.is_file():
        try:
            text = fetch()
        except HubError as error:
            raise FileNotFoundError(
                f"{title} was not found: put it at '{kept}', pass the `path` of a "
                f"copy, or {error}."
            ) from error
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, lambda file: file.write(text.encode()))
    return read_text(kept)


def _cache() -> Path:
    """The folder for corpora: in `GRADFLOW_CACHE`, or where the system keeps caches."""
    named = os.environ.get("GRADFLOW_CACHE")
    if named:
        return Path(named) / "corpora"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradflow" / "corpora"
