"""How a solve ended, in a result code and in words."""

import diffrax
import jax

from ._segments import State

RESULTS = diffrax.RESULTS
"""How a solve can end, for rooms that do not import diffrax."""

_NAMES = ("successful", "event_occurred", "max_steps_reached", "dt_min_reached")


def ended_by(result: diffrax.RESULTS, *ways: diffrax.RESULTS) -> bool:
    """Whether a finished solve ended in one of these ways.

    On the host, as comparing results by `==` runs a JAX operation and there may be
    thousands of flows.
    """
    (code,) = jax.tree.leaves(result)
    return any(code == jax.tree.leaves(way)[0] for way in ways)


def ended_as_wanted(result: diffrax.RESULTS) -> bool:
    """Whether a solve reached its horizon or its event."""
    return ended_by(result, RESULTS.successful, RESULTS.event_occurred)


def result_name(result: diffrax.RESULTS) -> str:
    for name in _NAMES:
        if ended_by(result, getattr(RESULTS, name)):
            return name
    return "internal_error"


def result_of_name(name: str) -> diffrax.RESULTS:
    return getattr(RESULTS, name)


def how_it_ended(
    state: State,
    result: diffrax.RESULTS,
    t1: float,
    attempted: int,
    max_steps: int | None,
) -> tuple[diffrax.RESULTS, str] | None:
    """The result and, unless the solve reached its horizon, the reason; or None if the
    solve goes on. `result` is that of the last segment."""
    t = float(state.t)
    if ended_by(result, RESULTS.event_occurred):
        return RESULTS.event_occurred, f"stopped at t = {t:.10g} by its event"
    if t >= t1:
        return RESULTS.successful, ""
    if max_steps is not None and attempted >= max_steps:
        reason = f"gave up at t = {t:.10g} of {t1:g}, after `max_steps` = {max_steps:,}"
        return RESULTS.max_steps_reached, f"{reason} steps"
    if ended_by(result, RESULTS.dt_min_reached):
        reason = (
            f"could not continue from t = {t:.10g}: every step was rejected, down to a "
            f"length of {float(state.dt):.0e} (is the loss finite and smooth there? "
            f"its value is {float(state.loss):.6g})"
        )
        return RESULTS.dt_min_reached, reason
    if ended_by(result, RESULTS.internal_error):
        reason = (
            f"overflowed after t = {t:.10g}, where the loss was "
            f"{float(state.loss):.6g}: try a shorter `step`"
        )
        return RESULTS.internal_error, reason
    if not ended_by(result, RESULTS.max_steps_reached):
        why = diffrax.RESULTS[result]
        return RESULTS.internal_error, f"broke off at t = {t:.10g}: {why}"
    return None
