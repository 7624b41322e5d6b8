"""find_events(): the times at which conditions on the parameters change."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core.checks import Checked
from .._core.result_tables import AbstractResults, Column, legend, listed, table
from ..flows import AbstractTrajectory, check_flow
from ._crossing import crossing

Condition = Callable[[PyTree], Any]
"""A real function of the parameters that crosses zero, or a boolean function."""


class Event(eqx.Module):
    """A condition on the parameters: a real function that crosses zero, or a boolean
    one that changes. `find_events` finds the times; `integrate(event=…)` ends the flow
    at the first of them."""

    condition: Condition
    name: str = eqx.field(static=True)

    def __init__(self, condition: Checked[Condition], name: Checked[str | None] = None):
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
    """One occurrence of an event along a flow."""

    name: str = eqx.field(static=True)
    t: float
    rising: bool
    """Whether the condition rose through zero, or became true."""


_COLUMNS = (
    Column("event", "the name of the event, or of its condition.", 0, "<"),
    Column("t", "the time at which it occurs, up to rounding.", 12, "<"),
    Column(
        "change", "rising if the condition rises through zero or becomes true.", 0, "<"
    ),
)


@dataclass(frozen=True, eq=False, repr=False)
class Occurrences(AbstractResults[Occurrence]):
    """The occurrences of events along a flow in order of time. `print` shows them as a
    table."""

    occurrences: tuple[Occurrence, ...]

    def __len__(self) -> int:
        return len(self.occurrences)

    def _result(self, index: int) -> Occurrence:
        return self.occurrences[index]

    def _summary(self) -> str:
        return listed([f"{e.name} at t = {e.t:.4g}" for e in self.occurrences])

    def _table(self) -> str:
        if not self.occurrences:
            return "no event found: no condition changes along the flow"
        rows = [
            (e.name, f"{e.t:.8g}", "rising" if e.rising else "falling")
            for e in self.occurrences
        ]
        meanings = [(c.title, c.meaning) for c in _COLUMNS]
        return f"{table(_COLUMNS, rows)}\n{legend(meanings)}"


def find_events(
    flow: Checked[AbstractTrajectory],
    events: Checked[Event | Condition | Sequence[Event | Condition]],
) -> Occurrences:
    """Find every time at which one of `events` occurs along a flow. They do not stop
    the flow.

    **Arguments:**

    - `flow`: a flow with dense output, or one that knows its loss.
    - `events`: an `Event` or a function of the parameters, or a list of them.

    Each condition is evaluated after every step of the solver, so that two changes
    within one step are missed. Where it changed, the time is located on the dense
    output up to rounding.
    """
    flow = check_flow(flow)
    several = events if isinstance(events, Sequence) else [events]
    found: list[Occurrence] = []
    for condition in several:
        event = condition if isinstance(condition, Event) else Event(condition)
        found += _occurrences(flow, event)
    return Occurrences(tuple(sorted(found, key=lambda e: e.t)))


def _occurrences(flow: AbstractTrajectory, event: Event) -> Iterator[Occurrence]:
    """The occurrences of one event, in no particular order."""
    timed = _Condition(event.condition)
    times = np.unique(np.append(0.0, flow.mesh))
    values = flow.along(timed, times)
    if values.ndim != 1 or np.any(np.isnan(values)):
        raise ValueError(
            f"`events` must be real or boolean conditions, but {event.name!r} is not a "
            "number, or more than one, somewhere along the flow."
        )
    for i in np.flatnonzero(np.sign(values[:-1]) * np.sign(values[1:]) < 0):
        t = crossing(flow, timed, times[i], times[i + 1])
        yield Occurrence(event.name, t, bool(values[i] < 0))
    for i in np.flatnonzero(values == 0):  # exactly at a step
        before, after = values[max(i - 1, 0)], values[min(i + 1, len(values) - 1)]
        if before * after < 0:
            yield Occurrence(event.name, float(times[i]), bool(before < 0))


class _Condition(eqx.Module):
    """A condition as a real function of time and parameters."""

    condition: Condition

    def __call__(self, t: Float[Array, ""], params: PyTree) -> Array:
        value = jnp.asarray(self.condition(params))
        if value.dtype == bool:
            return jnp.where(value, 1.0, -1.0)
        return value.astype(jnp.float64)
