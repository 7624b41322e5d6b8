"""Exit codes and errors that all commands share."""

import contextlib
import sys
from collections.abc import Iterator

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class BadInput(Exception):
    """A sentence about the command line, printed without a traceback."""


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """Report a ValueError raised inside the block as bad input."""
    try:
        yield
    except ValueError as error:
        raise BadInput(str(error)) from error


def complain(sentence: str, code: int) -> int:
    """Print `sentence` on standard error and return `code`."""
    print(f"gradflow: {sentence}", file=sys.stderr)
    return code
