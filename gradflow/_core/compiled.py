"""Compilation: jit with options that suit a solve, its clock, and room for its code."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.monitoring

_P = ParamSpec("_P")
_T = TypeVar("_T")

ONE_THREAD = 2**12
"""Numbers in a state, up to which a solve is compiled for one thread."""

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


class _Compiled(Generic[_P, _T]):
    """A compiled function; see `compiled`."""

    def __init__(self, function: Callable[_P, _T], options: dict[str, Any]):
        self._function, self._options = function, options

    @functools.cached_property
    def _jit(self) -> Any:
        # Not when defined: that would start XLA at import.
        known = _WITHOUT_YNNPACK if _is_known(**_WITHOUT_YNNPACK) else {}
        if jax.default_backend() == "cpu":
            known = known | {"xla_backend_optimization_level": 1}
        # Its further arguments, for jax.jit, are not in its type.
        jit: Any = eqx.filter_jit
        return jit(self._function, compiler_options=self._options | known)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._jit(*args, **kwargs)

    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        return self._jit.lower(*args, **kwargs)


def compiled(function: Callable[_P, _T], one_thread: bool = False) -> _Compiled[_P, _T]:
    """`eqx.filter_jit`, with XLA's CPU backend set to the many tiny operations of a
    step. As measured with jaxlib 0.10.2:

    - By default it schedules for concurrency and hands them from thread to thread: a
      step of Tsit5 with dense output at n = 280 takes 77 µs in turn, 90 to 150 µs so.
    - Products of small matrices in double precision are slower by YNNPACK, and at this
      size by more than one thread: a step of `ndf` takes 83 µs with both, 79 without
      the former, 72 without either.
    - LLVM's costlier passes take a tenth to a fifth of the time to compile a solve by
      `ndf`, which is no faster for them at n = 280 nor at n = 4,096.
    """
    options: dict[str, Any] = {
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    }
    if one_thread:
        options["xla_cpu_multi_thread_eigen"] = False
    return _Compiled(function, options)


_WITHOUT_YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": ""}


@functools.cache
def _is_known(**options: str) -> bool:
    """Whether this version of XLA has such options: experimental ones come and go."""
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except jax.errors.JaxRuntimeError:
        return False
    return True
