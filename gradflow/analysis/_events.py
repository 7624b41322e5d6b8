"""When something happens along a flow: located between steps, on its dense output."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from .._core.checks import Checked
from ..flows import AT_ONCE, Flow


class Event(eqx.Module):
    """A condition on the parameters: a real function that crosses zero, or a boolean
    one that changes. `find_events` says when; as `integrate(event=…)` it ends the flow
    where it happens first."""

    condition: Callable[[PyTree], Any]
    name: str = eqx.field(static=True)

    def __init__(self, condition: Checked[Callable], name: Checked[str | None] = None):
        if not callable(condition):
            raise ValueError(
                "`condition` must be a function of the parameters, got "
                f"{type(condition).__name__}."
            )
        self.condition = condition
        self.name = getattr(condition, "__name__", "event") if name is None else name

    def __call__(self, params: PyTree) -> Any:
        return self.condition(params)


class Occurrence(eqx.Module):
    """That an event happened."""

    name: str = eqx.field(static=True)
    t: float
    rising: bool
    """Whether the condition rose through zero, or became true."""


class Occurrences(eqx.Module):
    """What `find_events` found, in the order of time."""

    all: tuple[Occurrence, ...]

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: Any) -> Any:
        return self.all[index]

    def __iter__(self) -> Iterator[Occurrence]:
        return iter(self.all)

    def __str__(self) -> str:
        if not self.all:
            return "no event"
        width = max(len(occurrence.name) for occurrence in self.all)
        return "\n".join(
            f"{e.name:{width}}  t = {e.t:<12.8g} {'rising' if e.rising else 'falling'}"
            for e in self.all
        )


def find_events(flow: Checked[Flow], events: Any) -> Occurrences:
    """Every time at which one of `events` happens along the flow, which they do not
    stop.

    **Arguments:**

    - `flow`: a flow with dense output, or one that knows its loss.
    - `events`: an `Event` or a function of the parameters, or a list of them.

    A condition is looked at after every step of the solver: that it changes twice
    within one step goes unseen. Where it changed, the time is located on the dense
    output to rounding.
    """
    if not isinstance(flow, Flow):
        raise ValueError(f"`flow` must be a Flow, got {type(flow).__name__}.")
    several = events if isinstance(events, Sequence) else [events]
    found = []
    for condition in several:
        event = condition if isinstance(condition, Event) else Event(condition)
        found += _occurrences(flow, event)
    return Occurrences(tuple(sorted(found, key=lambda e: e.t)))


def _occurrences(flow: Flow, event: Event) -> Iterator[Occurrence]:
    timed = _Condition(event.condition)
    times = np.unique(np.append(0.0, flow.mesh))
    values = flow.along(timed, times)
    if values.ndim != 1 or np.any(np.isnan(values)):
        raise ValueError(
            f"`events` must be real or boolean conditions; {event.name!r} is not a "
            "number, or more than one, somewhere along the flow."
        )
    for i in np.flatnonzero(np.sign(values[:-1]) * np.sign(values[1:]) < 0):
        t = crossing(flow, timed, times[i], times[i + 1])
        yield Occurrence(event.name, t, bool(values[i] < 0))
    for i in np.flatnonzero(values == 0):  # just at a step
        before, after = values[max(i - 1, 0)], values[min(i + 1, len(values) - 1)]
        if before * after < 0:
            yield Occurrence(event.name, float(times[i]), bool(before < 0))


class _Condition(eqx.Module):
    condition: Callable

    def __call__(self, t: Any, params: PyTree) -> Any:
        value = jnp.asarray(self.condition(params))
        if value.dtype == bool:
            return jnp.where(value, 1.0, -1.0)
        return value.astype(jnp.float64)


def crossing(
    flow: Flow,
    function: Callable,
    start: float,
    end: float,
    value: Callable[[Any], Float[np.ndarray, " times"]] = lambda seen: seen,
) -> float:
    """The time between `start` and `end` at which `value` of `function(t, params)`, of
    different signs there, crosses zero, to rounding.

    The interval is cut into as many parts as are looked at in one call, again and
    again: by a factor of 31 each time, and no other function is compiled than the one
    that found the crossing. Of a large flow whose dense output was not kept there, it
    is that of the two times which is nearer to the crossing: they are saved ones, and
    to look in between is to integrate again.
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
