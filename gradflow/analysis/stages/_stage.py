"""What `find_stages` finds."""

from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Float


class Stage(eqx.Module):
    """A stretch of a flow with a name."""

    name: str = eqx.field(static=True)
    start: float
    end: float
    cycle: int
    """How many focus stages, or patterns acquired, there were so far; zero where
    nothing is named after them."""
    evidence: dict[str, Any]
    """The numbers that it rests on."""


class Plateau(eqx.Module):
    """A stretch where a flow is slow."""

    start: float
    end: float
    slowest: float
    """The time at which it is slowest."""
    speed: float
    """‖∇L‖ then."""
    loss: float
    ranks: dict[str, int]
    """How many directions of each weight matrix are open then."""


class Acquisition(eqx.Module):
    """That heads learn a pattern."""

    pattern: int
    """Which, counted from zero: a block of the chain, or a column of the target."""
    heads: tuple[int, ...] = eqx.field(static=True)
    """Which heads hold it then, the one with the largest share first."""
    t: float
    """When half of it is learned."""
    overlap: float
    """The least cosine between two heads then."""


class Stages(Sequence):
    """The stages of a flow, in order. `print` shows them as a table."""

    def __init__(
        self,
        stages: Sequence[Stage],
        plateaus: Sequence[Plateau],
        reason: str = "",
        acquisitions: Sequence[Acquisition] = (),
    ):
        self._stages = tuple(stages)
        self.plateaus = tuple(plateaus)
        """Where the flow rests, at its start and at its end too."""
        self.reason = reason
        """Why there are no stages, if there are none."""
        self.acquisitions = tuple(acquisitions)
        """What heads learned, in the order of time."""

    def __len__(self) -> int:
        return len(self._stages)

    def __getitem__(self, index: Any) -> Any:
        return self._stages[index]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self._stages)

    @property
    def boundaries(self) -> Float[np.ndarray, " boundaries"]:
        """The times at which one stage passes into the next."""
        return np.array([stage.end for stage in self._stages[:-1]])

    def __repr__(self) -> str:
        return f"Stages({', '.join(self.names)})"

    def __str__(self) -> str:
        if not self._stages:
            return f"no stage found: {self.reason}"
        lines = [f"{'stage':<14} {'cycle':>5} {'start':>10} {'end':>10}  evidence"]
        for s in self._stages:
            facts = ", ".join(f"{k} {_readable(v)}" for k, v in s.evidence.items())
            lines.append(
                f"{s.name:<14} {s.cycle or '':>5} {s.start:>10.5g} {s.end:>10.5g}  "
                f"{facts}"
            )
        return "\n".join(lines)


def _readable(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
