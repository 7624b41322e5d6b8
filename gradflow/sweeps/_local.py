"""Workers on this machine: processes that keep the modules and code they load."""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._core import checks
from .._core.checks import Checked
from .._core.machine import cores
from . import _worker
from ._grid import Point
from ._worker import Label, Shipped

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)

PATIENCE = 1.0
"""Seconds that a worker is given to exit by itself."""


class SweepError(RuntimeError):
    """A sweep could not continue. The results computed before that are in the store."""


class Outcome(NamedTuple):
    """The outcome of computing one point."""

    point: Point
    kind: str
    """`encoded`, `values` or `failed`: see `_worker.compute`."""
    content: Any


def single_threaded(flags: str) -> str:
    """XLA_FLAGS for a worker with one core: Eigen starts no further threads."""
    if "--xla_cpu_multi_thread_eigen" in flags:
        return flags
    return f"{flags} --xla_cpu_multi_thread_eigen=false".strip()


class LocalWorkers:
    """Worker processes on this machine, for one sweep or several.

    By default `sweep` starts workers and ends them. Workers that are passed to it as
    `engine` live as long as their `with` block and keep the code that JAX compiled:

        with gradflow.sweeps.LocalWorkers(2) as workers:
            gradflow.sweep(task, grid, store="first", engine=workers)
            gradflow.sweep(task, other, store="second", engine=workers)

    **Arguments:**

    - `workers`: the number of workers; by default as many as can have `cpus` cores
        each.
    - `cpus`: the number of cores, and of threads of XLA and linear algebra, for each
        worker.
    - `pin`: whether each worker is pinned to its own share of the cores that this
        process may use. The number of threads is limited in either case.
    """

    def __init__(
        self,
        workers: Checked[int | None] = None,
        *,
        cpus: Checked[int] = 1,
        pin: Checked[bool] = True,
    ):
        cpus = checks.whole_number("cpus", cpus)
        available = cores()
        if cpus > len(available):
            raise ValueError(
                f"`cpus` must be at most the {len(available)} cores that this process "
                f"may use, got {cpus}."
            )
        if workers is None:
            workers = max(1, len(available) // cpus)
        count = checks.whole_number("workers", workers)
        shares: Sequence[Sequence[int]] = [()] * count
        if pin and count <= len(available):
            # All cores are handed out: two sweeps with half as many workers as cores
            # do not share one half of the machine.
            shares = [available[i::count] for i in range(count)]
        self._cpus = cpus
        self._workers = [_Process(share, cpus) for share in shares]

    def __repr__(self) -> str:
        return f"LocalWorkers({len(self._workers)}, cpus={self._cpus})"

    def __enter__(self) -> "LocalWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def start(self, task: Shipped, points: int, retries: int) -> None:
        """Load `task` in every worker that `points` points can keep busy."""
        used = self._workers[:points]
        for worker in used:  # in parallel, because each takes a while
            worker.launch(task)
        for worker in used:
            worker.ready(task, retries)

    def run(
        self, task: Shipped, labels: Iterator[Label], retries: int
    ) -> Generator[Outcome, None, None]:
        """Yield the outcome of each of `labels` as it arrives. Workers that are still
        busy when the generator is closed are killed."""
        busy = [worker for worker in self._workers if worker.has_loaded(task)]
        feed = _Feed(labels)
        # Room for one: outcomes in the queue are lost if this process is killed.
        outcomes: queue.Queue[Outcome | BaseException | None] = queue.Queue(1)
        threads = [
            threading.Thread(
                target=worker.serve, args=(task, feed, outcomes, retries), daemon=True
            )
            for worker in busy
        ]
        done = False
        try:
            for thread in threads:
                thread.start()
            at_work = len(threads)
            while at_work:
                outcome = outcomes.get()
                if outcome is None:
                    at_work -= 1
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    yield outcome
            done = True
        finally:
            if not done:
                feed.stopped.set()
            for worker, thread in zip(busy, threads, strict=True):
                while thread.is_alive():
                    if not done:
                        worker.kill()
                    thread.join(0.01)


class _Feed:
    """An iterator over the remaining labels that several threads share."""

    def __init__(self, labels: Iterator[Label]):
        self._labels = labels
        self._lock = threading.Lock()
        self.stopped = threading.Event()

    def next(self) -> Label | None:
        with self._lock:
            return None if self.stopped.is_set() else next(self._labels, None)


class _Process:
    """One worker process, restarted when it dies."""

    def __init__(self, share: Sequence[int], cpus: int):
        self._share = list(share)
        self._cpus = cpus
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: Shipped | None = None
        """The task that the process was told to load."""
        self._loaded: Shipped | None = None
        """The task that the process has loaded."""

    def has_loaded(self, task: Shipped) -> bool:
        return self._process is not None and self._loaded == task

    def launch(self, task: Shipped) -> None:
        """Start the process if it is not running and tell it to load `task`. `ready`
        notices if it dies."""
        if self._process is None:
            self._process = subprocess.Popen(
                # By path: imported as a module it would import all of gradflow.
                [sys.executable, "-P", str(Path(_worker.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment(),
                start_new_session=True,  # only the parent handles Ctrl-C
            )
            self._send("set up", (sys.path, self._share))
        if self._asked != task:
            self._asked = task
            self._send("task", task)

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        for name in THREAD_VARIABLES:
            environment[name] = str(self._cpus)
        if self._cpus == 1:
            flags = environment.get("XLA_FLAGS", "")
            environment["XLA_FLAGS"] = single_threaded(flags)
        return environment

    def ready(self, task: Shipped, retries: int) -> None:
        """Wait until `task` is loaded."""
        ends: list[str] = []
        while not self.has_loaded(task):
            self.launch(task)
            answer = self._answer()
            if answer is None:
                ends.append(self.end())
                if len(ends) > retries:
                    raise SweepError(
                        f"a worker process died {_times(ends)} while it was loading "
                        "the task."
                    )
            elif answer[0] == "failed":
                self.end()
                reason, trace = answer[1]
                raise ValueError(
                    "`task` must be a function that a worker process can load, but "
                    f"loading it raised {reason}\n\n{trace}"
                )
            else:
                self._loaded = task

    def serve(
        self,
        task: Shipped,
        feed: _Feed,
        outcomes: "queue.Queue[Outcome | BaseException | None]",
        retries: int,
    ) -> None:
        """Put the outcome of each label of `feed` into `outcomes`, then None, or an
        exception for the thread that runs the sweep."""
        last: BaseException | None = None
        try:
            while (label := feed.next()) is not None:
                outcome = self._attempt(task, label, feed, retries)
                _put(outcomes, outcome, feed)
        except BaseException as error:  # raised again in the thread of the sweep
            last = error
        _put(outcomes, last, feed)

    def _attempt(
        self, task: Shipped, label: Label, feed: _Feed, retries: int
    ) -> Outcome:
        ends: list[str] = []
        while len(ends) <= retries and not feed.stopped.is_set():
            self.ready(task, retries)
            self._send("point", label)
            answer = self._answer()
            if answer is not None:
                return Outcome(label["point"], *answer)
            ends.append(self.end())
        reason = f"the worker process died {_times(ends)}"
        return Outcome(label["point"], "failed", (reason, f"{reason}\n"))

    def kill(self) -> None:
        """Kill the process, from any thread: a thread that waits for its answer then
        gets none."""
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> str:
        """End the process and return how it ended, in words."""
        process, self._process = self._process, None
        self._asked = self._loaded = None
        if process is None:
            return ""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # a live worker exits at the end of its input
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        process.stdout.close()
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    def _send(self, kind: str, content: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it died, as `_answer` will find
            _worker.send(self._process.stdin, (kind, content))

    def _answer(self) -> tuple[str, Any] | None:
        """The answer of the process, or None if it died."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            return None


def _times(ends: list[str]) -> str:
    count = "once" if len(ends) == 1 else f"{len(ends)} times, the last time"
    return f"{count} {ends[-1]}" if ends else count


def _put(
    outcomes: "queue.Queue[Outcome | BaseException | None]",
    outcome: Outcome | BaseException | None,
    feed: _Feed,
) -> None:
    """Put an outcome into the queue unless the sweep was stopped."""
    while not feed.stopped.is_set():
        try:
            return outcomes.put(outcome, timeout=0.1)
        except queue.Full:
            continue
