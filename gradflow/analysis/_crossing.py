"""Locating the time at which a function of a flow crosses zero."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Array, Float, PyTree

from ..flows import AT_ONCE, AbstractTrajectory


def crossing(
    flow: AbstractTrajectory,
    function: Callable[[Array, PyTree], PyTree],
    start: float,
    end: float,
    value: Callable[[Any], Float[np.ndarray, " times"]] = lambda seen: seen,
) -> float:
    """The time between `start` and `end` at which `value(function(t, params))` crosses
    zero, up to rounding. Its signs at both ends differ.

    Each call evaluates as many times as are batched together and so narrows the
    interval by a factor of 31. No other function is compiled than the one that found
    the change of sign. For a large flow without dense output there, the result is
    whichever end is nearer to the crossing: both are saved times, and looking between
    them would mean integrating again.
    """
    low, high = float(start), float(end)
    if flow.is_costly_between(low, high):
        at_low, at_high = np.abs(value(flow.along(function, np.array([low, high]))))
        return low if at_low < at_high else high
    while True:
        times = np.linspace(low, high, AT_ONCE)
        if np.any(np.diff(times) <= 0):
            return high
        above = value(flow.along(function, times)) > 0
        change = np.flatnonzero(above[:-1] != above[1:])
        if not change.size:
            return high
        low, high = float(times[change[0]]), float(times[change[0] + 1])
