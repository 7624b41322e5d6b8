"""The entry point of the command `gradflow`."""

import io
import sys
from collections.abc import Sequence

from ._common import BAD_INPUT, INTERRUPTED, BadInput, complain
from ._parser import parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process.

    Returns the exit code: 0 for success, 1 if a job failed on the way, 2 for bad input,
    130 after Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show ∇ gets its escape instead of a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = parser().parse_args(argv)
        return arguments.command(arguments)
    except BadInput as error:
        return complain(str(error), BAD_INPUT)
    except KeyboardInterrupt:
        return complain("interrupted.", INTERRUPTED)
    except SystemExit as stop:  # argparse ends --help and --version with it
        return int(stop.code or 0)
