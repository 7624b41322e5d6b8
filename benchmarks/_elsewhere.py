"""Run the same code in another process, with XLA's default options.

`import gradflow` asks XLA to compile small loops whole (`gradflow/_configure.py`), and
everything in the same process benefits. Without it, a bare evaluation or a plain loop
is slower; this process measures by how much.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

SERVE = "--serve"


class Elsewhere:
    """A script started with `--serve`, which answers each line with one line."""

    def __init__(self, script: str):
        self._process = subprocess.Popen(
            [sys.executable, script, SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, question: Any) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(question, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            raise RuntimeError(f"the other process ended with exit code {code}")
        return answer.strip()

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(prepare: Callable[[], Callable[[str], Any]]) -> None:
    """Answer every line on standard input with one line on standard output."""
    # XLA reads the flags when JAX first uses a device, which is in `prepare`.
    os.environ.pop("XLA_FLAGS", None)
    answer = prepare()
    for line in sys.stdin:
        print(answer(line.strip()), flush=True)
