"""The worker's side of a sweep: load the task, compute points, return results.

A worker process runs this file as a script. It imports only the standard library, so
that it starts at once and imports JAX only if its task does. gradflow itself imports
the same functions for Ray.
"""

import importlib
import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any, TypedDict

Shipped = tuple[str, ...] | tuple[str, bytes]
"""A task that is sent to a worker: ("reference", module, name) or ("value", pickle)."""


class Label(TypedDict):
    """A point to compute, with the name and version of its task."""

    task: str
    version: int
    point: dict[str, bool | int | float | str]


def load(shipped: Shipped) -> Callable:
    """The task that `shipped` describes."""
    kind, *where = shipped
    if kind == "value":
        (pickled,) = where
        assert isinstance(pickled, bytes)
        return pickle.loads(pickled)
    module, name = where
    found: Any = importlib.import_module(str(module))
    for part in str(name).split("."):
        found = getattr(found, part)
    return found


def compute(task: Callable, label: Label) -> tuple[str, Any]:
    """The outcome of one point: ("encoded", …) or ("values", …) with its result, or
    ("failed", (reason, traceback))."""
    point = label["point"]
    try:
        result = task(dict(point))
    except BaseException as error:  # sys.exit in a task is a failure too
        # The traceback starts in the task, not in this function.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        lines = traceback.format_exception(type(error), error, trace)
        return "failed", (_reason(error), "".join(lines))
    try:
        # A task that returns a Flow has imported gradflow; other tasks need not.
        if hasattr(sys.modules.get("gradflow"), "sweeps"):
            # Absolute, because a worker runs this file as a script.
            from gradflow.sweeps._result import encode

            return "encoded", tuple(encode(result, label))
        return "values", plain_values(result, point)
    except Exception as error:
        return "failed", (_reason(error), f"{_reason(error)}\n")


def _reason(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def plain_values(result: object, point: Mapping[str, object]) -> dict[str, Any]:
    """A task's mapping of numbers and arrays, as Python numbers and NumPy arrays."""
    if not isinstance(result, Mapping):
        raise TypeError(
            "`task` must return a Flow, a Training or a mapping of numbers and arrays, "
            f"got {type(result).__name__}."
        )
    if not result:
        raise ValueError("`task` must return at least one number, got none.")
    for name in result:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(
                f"`task` must name its results by strings without '/', got {name!r}."
            )
        if name in point:
            raise ValueError(
                "`task` must not return a result with the name of a coordinate, got "
                f"{name!r}."
            )
    return {name: _plain(name, value) for name, value in result.items()}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        import numpy

        try:
            array = numpy.asarray(value)
        except ValueError as error:  # ragged rows
            raise ValueError(
                f"`task` must return arrays of numbers, got {name!r}: {error}"
            ) from error
        if array.dtype.kind not in "biuf":
            raise TypeError(
                "`task` must return real numbers and arrays of them, got entries of "
                f"type {array.dtype} for {name!r}."
            )
        value = array.item() if array.ndim == 0 else array
        if array.ndim:
            return array
    if not isinstance(value, bool | int | float):
        raise TypeError(
            "`task` must return real numbers and arrays of them, got "
            f"{type(value).__name__} for {name!r}."
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(
            f"`task` must return integers that fit into 64 bits, got {value} for "
            f"{name!r}."
        )
    return value


#
# The process
#


def send(pipe: IO[bytes], message: object) -> None:
    """Write one message to a pipe."""
    pickle.dump(message, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def main() -> None:
    """Answer the parent's messages until it closes the pipe."""
    # A task that prints must not write into the answers, nor read from the messages.
    messages = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:  # noqa: PTH123 (a worker starts without pathlib)
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    inbox: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(messages, inbox), daemon=True).start()
    task: Any = None
    while True:
        kind, content = inbox.get()
        if kind == "set up":
            sys.path[:], cpus = content
            if cpus and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, cpus)
        elif kind == "task":
            try:
                task = load(content)
                send(answers, ("ready", os.getpid()))
            except BaseException as error:
                send(answers, ("failed", (_reason(error), traceback.format_exc())))
        else:
            send(answers, compute(task, content))


def _listen(messages: IO[bytes], inbox: "queue.SimpleQueue") -> None:
    """Pass messages on. When the parent is gone, however it died, exit at once, even in
    the middle of a point."""
    while True:
        try:
            inbox.put(pickle.load(messages))
        except (EOFError, OSError, pickle.UnpicklingError):
            os._exit(0)


if __name__ == "__main__":
    main()
