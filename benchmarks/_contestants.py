"""The interface between the work-precision benchmark and the solvers it compares."""

import abc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

RTOLS = tuple(10.0**-k for k in range(3, 14))
ATOL = 1e-3
"""atol = ATOL·rtol for every solver that has tolerances."""


class GaveUp(Exception):
    """A solver did not finish; the message says why."""


def over(budget: float) -> GaveUp:
    return GaveUp(f"over the budget of {budget:g} s")


@dataclass(frozen=True)
class Work:
    """The work that a solve took; None where the solver does not report it."""

    steps: int | None = None
    evaluations: int | None = None
    products: int | None = None
    """Products of the Hessian and a vector; a full Hessian counts as n of them."""
    factorisations: int | None = None
    """Factorisations of n×n matrices."""


@dataclass
class Deadline:
    """A time limit that is checked in the functions that a solver calls."""

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
    """A solver of one problem, for any start and any setting of its knob."""

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
        """Solve once, untimed, and count the work. Raises `GaveUp` if the solver fails
        or takes longer than the budget."""

    @abc.abstractmethod
    def solve(
        self, y0: Float[np.ndarray, " n"], setting: float
    ) -> Float[np.ndarray, "times n"]:
        """The states at the saved times. This call is timed."""

    def label(self, setting: float) -> str:
        return f"{self.knob} {setting:.0e}" if self.knob == "rtol" else f"α {setting:g}"


@dataclass(frozen=True)
class Absent:
    """A solver that does not take part, and the reason."""

    name: str
    reason: str


Factory = Callable[[], Contestant | Absent]


def each(factories: dict[str, Factory]) -> Iterator[Contestant | Absent]:
    for name, make in factories.items():
        try:
            yield make()
        except ImportError:
            yield Absent(name, "not installed: pip install gradflow[bench]")
