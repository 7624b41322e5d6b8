"""From a solver's name to the solver."""

from typing import Any

import diffrax

from ._low_rank_ndf import LowRankNDF

_by_name = {
    "ndf": LowRankNDF,
    "tsit5": diffrax.Tsit5,
    "dopri5": diffrax.Dopri5,
    "dopri8": diffrax.Dopri8,
    "kvaerno3": diffrax.Kvaerno3,
    "kvaerno5": diffrax.Kvaerno5,
}
_auto = "tsit5"


def names() -> tuple[str, ...]:
    """The solvers that go by a name."""
    return ("auto", *_by_name)


def resolve(solver: Any) -> tuple[str, diffrax.AbstractAdaptiveSolver]:
    """A name or any adaptive diffrax solver → its name and the solver."""
    if isinstance(solver, str):
        name = _auto if solver == "auto" else solver
        if name not in _by_name:
            raise ValueError(
                f"`solver` must be one of {', '.join(names())} or a diffrax solver, "
                f"got {solver!r}."
            )
        return name, _by_name[name]()
    if isinstance(solver, diffrax.AbstractAdaptiveSolver):
        if solver.term_structure not in (diffrax.AbstractTerm, diffrax.ODETerm):
            raise ValueError(
                f"`solver` must take an ordinary differential equation as one term; "
                f"{type(solver).__name__} wants {solver.term_structure}."
            )
        return type(solver).__name__.lower(), solver
    if isinstance(solver, diffrax.AbstractSolver):
        raise ValueError(
            f"`solver` must estimate its own error; {type(solver).__name__} does not. "
            f"Known by name: {', '.join(names())}."
        )
    raise ValueError(
        f"`solver` must be one of {', '.join(names())} or a diffrax solver, got "
        f"{solver!r}."
    )


def count_evaluations(solver: diffrax.AbstractSolver, num_steps: int) -> int | None:
    """How often a solve of `num_steps` attempted steps evaluated the vector field, or
    None where only the solver could tell (implicit methods iterate).

    Should the very first step be rejected, each further try of it takes one evaluation
    more than is counted here."""
    if not isinstance(solver, diffrax.AbstractERK):
        return None
    tableau: Any = solver.tableau
    if not isinstance(tableau, diffrax.ButcherTableau):
        return None
    # A method whose last stage is the next step's first evaluates it once, at the
    # start; the choice of the first step size takes two evaluations.
    per_step = tableau.num_stages - (1 if tableau.fsal else 0)
    return per_step * num_steps + (1 if tableau.fsal else 0) + 2
