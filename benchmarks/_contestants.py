"""What a work-precision benchmark asks of a solver, whoever wrote it."""

import abc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

RTOLS = tuple(10.0**-k for k in range(3, 14))
ATOL = 1e-3
"""atol = 1e-3·rtol, for every solver that has tolerances."""


class GaveUp(Exception):
    """A solver did not deliver; the message says why."""


def over(budget: float) -> GaveUp:
    return GaveUp(f"over the budget of {budget:g} s")


@dataclass(frozen=True)
class Work:
    """What a solve took; None where the solver does not tell."""

    steps: int | None = None
    evaluations: int | None = None
    products: int | None = None
    """Of the Hessian and a vector; a Hessian formed in full counts n of them."""
    factorisations: int | None = None
    """Of n×n matrices."""


@dataclass
class Deadline:
    """Stops a solve from within the functions that it calls."""

    at: float = float("inf")
    budget: float = float("inf")

    def set(self, budget: float) -> None:
        self.budget, self.at = budget, time.perf_counter() + budget

    def lift(self) -> None:
        self.at = self.budget = float("inf")

    def check(self) -> None:
        if time.perf_counter() > self.at:
            raise over(self.budget)


@dataclass
class Contestant(abc.ABC):
    """A solver on one problem, for any start and any value of its knob."""

    name: str
    knob: str = "rtol"
    settings: tuple[float, ...] = RTOLS
    ours: bool = False
    compile_seconds: float | None = None
    deadline: Deadline = field(default_factory=Deadline)

    @abc.abstractmethod
    def rehearse(
        self, y0: Float[np.ndarray, " n"], setting: float, budget: float
    ) -> Work:
        """Solve once, untimed, and count. Raises `GaveUp`, also when over budget."""

    @abc.abstractmethod
    def solve(
        self, y0: Float[np.ndarray, " n"], setting: float
    ) -> Float[np.ndarray, "times n"]:
        """The states at the saved times; this is what is timed."""

    def label(self, setting: float) -> str:
        return f"{self.knob} {setting:.0e}" if self.knob == "rtol" else f"α {setting:g}"


@dataclass(frozen=True)
class Absent:
    """A solver that does not take part, and why."""

    name: str
    reason: str


Factory = Callable[[], Contestant | Absent]


def each(factories: dict[str, Factory]) -> Iterator[Contestant | Absent]:
    for name, make in factories.items():
        try:
            yield make()
        except ImportError:
            yield Absent(name, "not installed: pip install gradflow[bench]")
