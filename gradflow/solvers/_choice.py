"""The solvers by name, and the automatic choice of one."""

from collections.abc import Callable
from typing import NamedTuple

import diffrax

from .._core.checks import Checked
from .._core.machine import available_memory, readable
from ._kvaerno import Kvaerno3, Kvaerno5
from ._rk4 import RK4
from ._rock4 import ROCK4
from ._side_channel import AbstractCountingSolver
from .ndf import LowRankNDF

_by_name: dict[str, Callable[[], diffrax.AbstractSolver]] = {
    "ndf": lambda: LowRankNDF(counts_work=True),
    "rock4": lambda: ROCK4(counts_work=True),
    "tsit5": diffrax.Tsit5,
    "dopri5": diffrax.Dopri5,
    "dopri8": diffrax.Dopri8,
    "kvaerno3": Kvaerno3,
    "kvaerno5": Kvaerno5,
    "rk4": RK4,
    "euler": diffrax.Euler,
}
FIXED_STEP = ("rk4", "euler")
"""The solvers with steps of constant length."""
SHARE_OF_MEMORY = 0.5
"""The largest fraction of the available memory that `auto` lets a solver use."""


class Choice(NamedTuple):
    """A solver, its name, and the reason for choosing it."""

    name: str
    solver: diffrax.AbstractSolver
    reason: str

    @property
    def takes_fixed_steps(self) -> bool:
        return isinstance(self.solver, RK4 | diffrax.Euler)


def names() -> tuple[str, ...]:
    """The names that `gradflow.integrate` takes as its `solver`."""
    return ("auto", *_by_name)


def resolve(
    solver: Checked[str | diffrax.AbstractSolver],
    size: int = 1,
    symmetric: bool = True,
) -> Choice:
    """The solver for a name or any adaptive diffrax solver, for states of `size`
    numbers.

    `auto` is `ndf`, the fastest solver for flows that become stiff, unless its
    eigenvectors do not fit in memory or the Jacobian is not `symmetric`, as in a
    non-Euclidean metric. Then it is `rock4`, which stores no eigenvectors and requires
    only real eigenvalues.
    """
    if isinstance(solver, str):
        if solver == "auto" and not symmetric:
            reason = "the Jacobian is not symmetric in the metric of this loss"
            return Choice("rock4", _by_name["rock4"](), reason)
        if solver == "auto":
            return _automatic(size)
        if solver not in _by_name:
            raise ValueError(
                f"`solver` must be one of {', '.join(names())} or a diffrax solver, "
                f"got {solver!r}."
            )
        return Choice(solver, _by_name[solver](), "requested by name")
    if isinstance(solver, diffrax.AbstractAdaptiveSolver):
        if solver.term_structure not in (diffrax.AbstractTerm, diffrax.ODETerm):
            raise ValueError(
                "`solver` must solve an ordinary differential equation with one term; "
                f"{type(solver).__name__} expects {solver.term_structure}."
            )
        return Choice(type(solver).__name__.lower(), solver, "passed as an object")
    if isinstance(solver, diffrax.AbstractSolver):
        raise ValueError(
            f"`solver` must estimate its own error; {type(solver).__name__} does not. "
            f"Pass another solver, or one of the names {', '.join(names())}."
        )
    raise ValueError(
        f"`solver` must be one of {', '.join(names())} or a diffrax solver, got "
        f"{solver!r}."
    )


def _automatic(size: int) -> Choice:
    needed, free = LowRankNDF().memory(size), available_memory()
    takes = f"ndf takes {readable(needed)} at n = {size:,}"
    if needed > SHARE_OF_MEMORY * free:
        reason = f"{takes} and {readable(free)} are available: rock4 has no matrices"
        return Choice("rock4", _by_name["rock4"](), reason)
    reason = f"the fastest for flows that become stiff; {takes}"
    return Choice("ndf", _by_name["ndf"](), reason)


def memory(solver: diffrax.AbstractSolver, size: int) -> int:
    """The approximate memory in bytes of a solve with a state of `size` numbers,
    without its dense output."""
    if isinstance(solver, AbstractCountingSolver):
        return solver.memory(size)
    if isinstance(solver, diffrax.AbstractImplicitSolver):
        return 8 * size * (3 * size + 30)  # the Jacobian, its factors and a copy
    return 8 * size * 30


def count_evaluations(solver: diffrax.AbstractSolver, num_steps: int) -> int | None:
    """The number of evaluations of the vector field in `num_steps` attempted steps, or
    None if only the solver knows it (implicit methods iterate).

    If the very first step is rejected, each further attempt at it takes one more
    evaluation than is counted here."""
    if isinstance(solver, diffrax.Euler):
        return num_steps
    if not isinstance(solver, diffrax.AbstractERK):
        return None
    tableau = solver.tableau
    if not isinstance(tableau, diffrax.ButcherTableau):
        return None
    if isinstance(solver, RK4):
        return tableau.num_stages * num_steps
    # Where the last stage is the next step's first (FSAL), the first stage is evaluated
    # only once, at the start. The choice of the first step size takes two evaluations.
    per_step = tableau.num_stages - (1 if tableau.fsal else 0)
    return per_step * num_steps + (1 if tableau.fsal else 0) + 2
