"""How long JAX has spent compiling, and room for what it compiled."""

import functools
import time
from pathlib import Path

import jax.monitoring

_STAGES = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_intervals: list[tuple[float, float]] = []


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event in _STAGES:
        now = time.perf_counter()
        _intervals.append((now - duration_secs, now))


jax.monitoring.register_event_duration_secs_listener(_listen)


class CompileClock:
    """Seconds spent in tracing, lowering and compiling since it was made."""

    def __init__(self) -> None:
        self._start = len(_intervals)

    def seconds(self) -> float:
        # Stages nest (a jitted function traced within another), so that the length of
        # their union counts, not their sum.
        total, reached = 0.0, float("-inf")
        for start, end in sorted(_intervals[self._start :]):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total


LARGEST_SHARE = 0.5
"""Of a process's memory mappings, before compiled code is forgotten."""
_LOOK_EVERY = 30
"""Stages of compilation, between two looks at the mappings, which take milliseconds."""
_looked_at = 0


def make_room_for_code() -> bool:
    """Forget all compiled code if it fills half of this process's memory mappings.

    XLA's CPU backend maps the kernels of each compiled function by themselves: a flow
    of a new shape takes some 1,300 mappings, Linux allows a process 65,530
    (vm.max_map_count), and beyond jaxlib (0.10.2) does not raise but crashes. So it is
    that or compiling a few functions anew, in a process that has seen dozens of shapes.
    """
    global _looked_at
    if len(_intervals) < _looked_at + _LOOK_EVERY:
        return False
    _looked_at = len(_intervals)
    if _mappings() < LARGEST_SHARE * _most_mappings():
        return False
    jax.clear_caches()
    return True


def _mappings() -> int:
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


@functools.cache
def _most_mappings() -> float:
    try:
        return float(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return float("inf")
