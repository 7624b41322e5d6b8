"""Tasks that workers import. This module imports little, so that workers start at
once."""

import os
import signal
import time

GRID = {"a": [1, 2, 3], "b": [1, 2]}


def contents(store):
    """The bytes of all results in a store, by file name."""
    return {path.name: path.read_bytes() for path in (store / "results").iterdir()}


def note(log, *words):
    """Append a line to a file that several processes write to."""
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (" ".join(map(str, words)) + "\n").encode())
    os.close(handle)


def nothing(point):
    return {"x": 0.0}


def product(point):
    a, b = point["a"], point["b"]
    return {"area": a * b, "row": [float(a)] * b, "square": a == b}


def slow(point):
    """Twenty milliseconds; the log tells who computed what."""
    note(os.environ["SWEEP_LOG"], os.getpid(), point["a"], point["b"])
    time.sleep(0.02)
    return {
        "area": point["a"] * point["b"],
        "powers": [point["a"] ** k for k in (1, 2)],
    }


def cursed(point):
    """Its worker dies at one point, and another raises."""
    note(os.environ["SWEEP_LOG"], point["a"])
    if point["a"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if point["a"] == 4:
        raise RuntimeError("four is too many")
    return {"x": point["a"]}


RESULTS = {
    "text": "word",
    "none": None,
    "complex": 1j,
    "huge": 2**70,
    "objects": [object()],
    "ragged": [[1.0], [1.0, 2.0]],
}


def unstorable(point):
    kind = point["kind"]
    if kind in RESULTS:
        return {"x": RESULTS[kind]}
    return {"list": [1.0], "empty": {}, "coordinate": {"kind": 1.0}, "key": {3: 1.0}}[
        kind
    ]


def surroundings(point):
    """The cores, threads and modules of a worker."""
    import sys

    return {
        "cpus": sorted(os.sched_getaffinity(0)),
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "eigen": "--xla_cpu_multi_thread_eigen=false" in os.environ["XLA_FLAGS"],
        "jax": "jax" in sys.modules,
        "pid": os.getpid(),
    }


def flow(point):
    """The flow of a bowl, w(t) = w(0) exp(-2t)."""
    import numpy as np

    import gradflow

    start = np.full(2, float(point["a"]))
    return gradflow.integrate(bowl, start, 1.0, ts=[0.0, 0.5, 1.0], solver="tsit5")


def bowl(w):
    return (w**2).sum()


def forked_sweep(grid, store, log):
    """A sweep in a process of its own, made from one that has gradflow loaded."""
    import gradflow

    os.environ["SWEEP_LOG"] = log
    # Ignored by what a script starts in the background, such as all of these tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gradflow.sweep(slow, grid, store=store, workers=2, retries=20)
