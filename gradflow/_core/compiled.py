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
"""The largest number of entries in a state for which a solve is compiled for one
thread."""

_own: list["Compiled"] = []
"""Every compiled function of the library, for `make_room_for_code`."""


class Compiled(Generic[_P, _T]):
    """A compiled function of the library; made by `jit` or `compiled`."""

    def __init__(self, function: Callable[_P, _T], options: dict[str, Any] | None):
        functools.update_wrapper(self, function)
        self._function, self._options = function, options
        _own.append(self)

    @functools.cached_property
    def _jit(self) -> Any:
        # Created on first use: the default options ask XLA what it knows, which would
        # start it at import.
        if self._options is None:
            return eqx.filter_jit(self._function)
        # `filter_jit` hands further arguments on to `jax.jit`, but does not declare so.
        jit: Any = eqx.filter_jit
        return jit(self._function, compiler_options=self._options | _cpu_options())

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._jit(*args, **kwargs)

    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        return self._jit.lower(*args, **kwargs)

    def forget(self) -> None:
        """Drop the compiled code. The next call compiles again."""
        if "_jit" in self.__dict__:
            # Equinox (0.13) has no public way to the function that `jax.jit` made.
            self._jit._cached.clear_cache()


def jit(function: Callable[_P, _T]) -> Compiled[_P, _T]:
    """`eqx.filter_jit`, for code that runs rarely or outside a solve."""
    return Compiled(function, None)


def compiled(function: Callable[_P, _T], one_thread: bool = False) -> Compiled[_P, _T]:
    """`eqx.filter_jit` with options that suit the many tiny operations of a step on
    XLA's CPU backend. As measured with jaxlib 0.10.2:

    - By default XLA schedules for concurrency and hands operations from thread to
      thread: a step of Tsit5 with dense output at n = 280 takes 90 to 150 µs, against
      77 µs in sequence.
    - Products of small double-precision matrices are slower with YNNPACK, and at this
      size with more than one thread: a step of `ndf` takes 83 µs with both, 79 without
      the former, 72 without either.
    - LLVM's costlier passes take a tenth to a fifth of the time it takes to compile a
      solve by `ndf`, and make it no faster at n = 280 or n = 4,096.
    """
    options: dict[str, Any] = {
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    }
    if one_thread:
        options["xla_cpu_multi_thread_eigen"] = False
    return Compiled(function, options)


_WITHOUT_YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": ""}


@functools.cache
def _cpu_options() -> dict[str, Any]:
    options: dict[str, Any] = _WITHOUT_YNNPACK if _is_known(**_WITHOUT_YNNPACK) else {}
    if jax.default_backend() == "cpu":
        options = options | {"xla_backend_optimization_level": 1}
    return options


def _is_known(**options: str) -> bool:
    """Whether this version of XLA has these options; experimental ones come and go."""
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except jax.errors.JaxRuntimeError:
        return False
    return True


#
# The clock
#

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
    """The seconds spent tracing, lowering and compiling since the clock was made."""

    def __init__(self) -> None:
        self._start = len(_intervals)

    def seconds(self) -> float:
        # Stages nest (a jitted function is traced within another): the length of their
        # union counts, not the sum of their lengths.
        total, reached = 0.0, float("-inf")
        for start, end in sorted(_intervals[self._start :]):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total


class RunClock:
    """The seconds since the clock was made: those spent compiling, and the others."""

    def __init__(self) -> None:
        self._began, self._compiling = time.perf_counter(), CompileClock()
        self.earlier = 0.0
        """Seconds that an earlier process ran, as its checkpoint says."""

    @property
    def compile_seconds(self) -> float:
        return self._compiling.seconds()

    @property
    def run_seconds(self) -> float:
        return self.earlier + time.perf_counter() - self._began - self.compile_seconds


#
# Room for code
#

LARGEST_SHARE = 0.5
"""The share of a process's memory mappings that may be in use before the library drops
its compiled code."""
_LOOK_EVERY = 30
"""Compilation stages between two counts of the mappings, which take milliseconds."""
_looked_at = 0


def make_room_for_code() -> bool:
    """Drop the library's own compiled code if this process has used up half of its
    memory mappings; a user's jitted functions stay compiled.

    XLA's CPU backend maps the kernels of each compiled function separately: a flow of a
    new shape takes about 1,300 mappings, Linux allows a process 65,530
    (vm.max_map_count), and jaxlib (0.10.2) does not raise beyond that but crashes.
    Compiling a few functions again, in a process that has seen dozens of shapes, is the
    lesser evil.
    """
    global _looked_at
    if len(_intervals) < _looked_at + _LOOK_EVERY:
        return False
    _looked_at = len(_intervals)
    if _mappings() < LARGEST_SHARE * _most_mappings():
        return False
    for function in _own:
        function.forget()
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
