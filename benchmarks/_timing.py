"""Timing on a machine that is shared and noisy, and what to say about it."""

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
    """Seconds of every piece of every contestant's run (rounds × pieces).

    Each contestant runs once untimed and then returns the seconds of its pieces,
    the same number every time. They take turns, so that a slow spell of the machine
    hits all of them. Pieces matter because such spells are shorter than a long run:
    the sum of each piece's least time is what the run costs when nothing disturbs it.
    """
    for run in contestants.values():
        run()
    seconds = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            seconds[name].append(run())
    return {name: np.array(pieces) for name, pieces in seconds.items()}


def undisturbed(seconds: np.ndarray) -> float:
    """The sum of the pieces' least times (rounds × pieces)."""
    return float(seconds.min(axis=0).sum())


def stopwatch(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - began
    del result  # not before: to free it is no part of the run
    return seconds


def verdict(value: float, wanted: float) -> str:
    return f"wanted ≤ {wanted:g}: {'met' if value <= wanted else 'not met'}"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns aligned, the first to the left and the others to the right."""
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
    """The machine and the versions."""
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
