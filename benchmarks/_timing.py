"""Timing on a noisy, shared machine, and tables of the results."""

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np


def interleaved(
    contestants: Mapping[str, Callable[[], list[float]]], rounds: int
) -> dict[str, np.ndarray]:
    """The seconds of every piece of every contestant's run (rounds × pieces).

    Each contestant runs once untimed. After that, every call returns the seconds of its
    pieces, always the same number of them. The contestants take turns, so that a slow
    spell of the machine hits all of them. Slow spells are shorter than a long run:
    the sum of each piece's shortest time is the cost of an undisturbed run.
    """
    for run in contestants.values():
        run()
    seconds = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            seconds[name].append(run())
    return {name: np.array(pieces) for name, pieces in seconds.items()}


def undisturbed(seconds: np.ndarray) -> float:
    """The sum of the pieces' shortest times (rounds × pieces)."""
    return float(seconds.min(axis=0).sum())


def stopwatch(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - began
    del result  # only now: freeing it is not part of the run
    return seconds


def verdict(value: float, target: float) -> str:
    return f"target ≤ {target:g}: {'met' if value <= target else 'not met'}"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table whose first column is aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1])] + [c.rjust(w) for c, w in others])

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *map(line, rows)])


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def footer(*packages: str) -> str:
    """The machine and the versions of the packages."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"\n{_processor()}, {os.cpu_count()} cores, load {load}; "
        f"{platform.system()} {platform.release()}\n"
        f"Python {platform.python_version()}, {versions}"
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if sys.platform == "linux" and cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
