"""The statistics of a solve: its solver, its work and its time."""

import dataclasses
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import equinox as eqx

from ..solvers._internals import AbstractCountingSolver, Choice, count_evaluations


class Statistics(eqx.Module):
    """The work that a flow or a training run took. Fields can be read by attribute or,
    like diffrax's statistics, by name: `stats["num_evaluations"]`."""

    solver: str = ""
    """The name of the solver or optimiser."""
    choice: str = ""
    """Why this solver was chosen."""
    num_accepted_steps: int = 0
    num_rejected_steps: int = 0
    num_evaluations: int | None = None
    """Evaluations of the vector field; None if the solver does not count them."""
    num_hessian_products: int | None = None
    num_newton_failures: int | None = None
    """Steps that were lost because the implicit equation was not solved."""
    num_certificate_evaluations: int = 0
    """Further evaluations of the vector field, for the energy balance."""
    compile_seconds: float = 0.0
    run_seconds: float = 0.0
    dense_until: float = 0.0
    """The time until which dense output was kept without a gap."""
    memory: dict[str, int] = eqx.field(default_factory=dict)
    """The estimated memory in bytes, by purpose and in `total`."""
    reason: str = ""
    """Why the solve stopped early; empty if it reached its horizon."""
    notes: tuple[str, ...] = ()
    """Remarks on the input, such as a promotion to double precision."""
    versions: dict[str, str] = eqx.field(default_factory=dict)
    """The versions of the packages that computed it."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(f"{name!r} is not one of {', '.join(self.keys())}")
        return getattr(self, name)

    def keys(self) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(self))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Statistics":
        """The statistics that a run file holds, whatever version wrote it."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: v for name, v in values.items() if name in known})

    def after(self, earlier: "Statistics") -> "Statistics":
        """The statistics of a resumed flow: its work added to that of the flow before.
        `num_accepted_steps`, `num_rejected_steps` and `num_certificate_evaluations`
        are running totals already."""
        added = ("num_evaluations", "num_hessian_products", "num_newton_failures")
        added += ("compile_seconds", "run_seconds")
        sums = {}
        for name in added:
            both = self[name], earlier[name]
            sums[name] = None if None in both else sum(both)
        return dataclasses.replace(self, **sums)


def counted_work(choice: Choice, work: Any, attempted: int) -> dict[str, Any]:
    """The counts of a solve by their names in `Statistics`, as far as its solver knows
    them."""
    solver = choice.solver
    if isinstance(solver, AbstractCountingSolver) and solver.counts_work:
        return {
            # The choice of the first step size takes two evaluations.
            "num_evaluations": int(work.evaluations) + 2 + solver.starting_evaluations,
            "num_hessian_products": int(work.hessian_products),
            "num_newton_failures": int(work.newton_failures),
        }
    return {"num_evaluations": count_evaluations(solver, attempted)}


def versions() -> dict[str, str]:
    """The versions of the packages that compute a flow."""
    parts = ("gradflow", "jax", "jaxlib", "diffrax", "equinox", "numpy")
    return {name: version(name) for name in parts}
