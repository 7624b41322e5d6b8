"""The same code in another process, where XLA compiles loops as it does by itself.

`import gradflow` asks XLA to compile small loops whole (`gradflow/_xla.py`), which all
contestants of a process have the good of. What a benchmark calls a bare evaluation, or
a plain loop, is slower without.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

SERVE = "--serve"


class Elsewhere:
    """A script that was started with `--serve`, to be asked and to answer by lines."""

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
            raise RuntimeError(f"the process elsewhere ended: {self._process.wait()}")
        return answer.strip()

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(prepare: Callable[[], Callable[[str], Any]]) -> None:
    """Answer every line of the input by one of the output."""
    # XLA reads it when JAX first uses a device: not before `prepare`.
    os.environ.pop("XLA_FLAGS", None)
    answer = prepare()
    for line in sys.stdin:
        print(answer(line.strip()), flush=True)
