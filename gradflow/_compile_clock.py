"""How long JAX has spent compiling."""

import time

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
