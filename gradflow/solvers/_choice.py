"""From a solver's name to the solver."""

from typing import Any, NamedTuple

import diffrax

from .._core.machine import available_memory, readable
from ._fixed import RK4
from ._kvaerno5 import Kvaerno3, Kvaerno5
from ._low_rank_ndf import LowRankNDF
from ._stabilised import ROCK4

_by_name = {
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
"""Those that take steps of one length."""
SHARE_OF_MEMORY = 0.5
"""Of what is free, how much `auto` lets a solver take."""


class Choice(NamedTuple):
    """A solver, its name, and why it is this one."""

    name: str
    solver: diffrax.AbstractSolver
    reason: str

    @property
    def takes_fixed_steps(self) -> bool:
        return isinstance(self.solver, RK4 | diffrax.Euler)


def names() -> tuple[str, ...]:
    """The solvers that go by a name."""
    return ("auto", *_by_name)


def resolve(solver: Any, size: int = 1, symmetric: bool = True) -> Choice:
    """A name or any adaptive diffrax solver → the solver, for states of `size` numbers.

    `auto` is `ndf`, the fastest on flows that turn stiff, unless its eigenvectors do
    not fit in memory or the Jacobian is not `symmetric`, as in a metric other than
    Euclid's: then `rock4`, which has none and needs no more than real eigenvalues.
    """
    if isinstance(solver, str):
        if solver == "auto" and not symmetric:
            reason = "in the loss's own metric the Jacobian is not symmetric"
            return Choice("rock4", _by_name["rock4"](), reason)
        if solver == "auto":
            return _automatic(size)
        if solver not in _by_name:
            raise ValueError(
                f"`solver` must be one of {', '.join(names())} or a diffrax solver, "
                f"got {solver!r}."
            )
        return Choice(solver, _by_name[solver](), "asked for by name")
    if isinstance(solver, diffrax.AbstractAdaptiveSolver):
        if solver.term_structure not in (diffrax.AbstractTerm, diffrax.ODETerm):
            raise ValueError(
                f"`solver` must take an ordinary differential equation as one term; "
                f"{type(solver).__name__} wants {solver.term_structure}."
            )
        return Choice(type(solver).__name__.lower(), solver, "given as an object")
    if isinstance(solver, diffrax.AbstractSolver):
        raise ValueError(
            f"`solver` must estimate its own error; {type(solver).__name__} does not. "
            f"Known by name: {', '.join(names())}."
        )
    raise ValueError(
        f"`solver` must be one of {', '.join(names())} or a diffrax solver, got "
        f"{solver!r}."
    )


def _automatic(size: int) -> Choice:
    needed, free = LowRankNDF().memory(size), available_memory()
    takes = f"ndf takes {readable(needed)} at n = {size:,}"
    if needed > SHARE_OF_MEMORY * free:
        reason = f"{takes}, of {readable(free)} that are free: rock4 has no matrices"
        return Choice("rock4", _by_name["rock4"](), reason)
    reason = f"the fastest where flows turn stiff; {takes}"
    return Choice("ndf", _by_name["ndf"](), reason)


def memory(solver: Any, size: int) -> int:
    """Bytes that a solve of `size` numbers takes, about, but for its dense output."""
    if hasattr(solver, "memory"):
        return solver.memory(size)
    if isinstance(solver, diffrax.AbstractImplicitSolver):
        return 8 * size * (3 * size + 30)  # the Jacobian, its factors and a copy
    return 8 * size * 30


def count_evaluations(solver: diffrax.AbstractSolver, num_steps: int) -> int | None:
    """How often a solve of `num_steps` attempted steps evaluated the vector field, or
    None where only the solver could tell (implicit methods iterate).

    Should the very first step be rejected, each further try of it takes one evaluation
    more than is counted here."""
    if isinstance(solver, diffrax.Euler):
        return num_steps
    if not isinstance(solver, diffrax.AbstractERK):
        return None
    tableau: Any = solver.tableau
    if not isinstance(tableau, diffrax.ButcherTableau):
        return None
    if isinstance(solver, RK4):
        return tableau.num_stages * num_steps
    # A method whose last stage is the next step's first evaluates it once, at the
    # start; the choice of the first step size takes two evaluations.
    per_step = tableau.num_stages - (1 if tableau.fsal else 0)
    return per_step * num_steps + (1 if tableau.fsal else 0) + 2
