"""The side channel from a solver to its step size controller: counts and verdicts.

**Counting.** After every attempted step diffrax hands three things on. The solver's
state and the new `y` survive only if the step is accepted, so a count kept in the
solver's state would miss the work of rejected steps. The error estimate reaches the
step size controller in both cases, and the controller's state is always kept. So a
solver with `counts_work=True` returns a `CountedError`, its error estimate together
with the `Work` of the attempt, and `ResumableController` adds the work up.

**Deciding.** `LowRankNDF` chooses order and step size together, which an error estimate
cannot express: its error estimate is a `Verdict`, which says whether the step is
accepted and how long the next one is. `ResumableController` does as it says. (Without
`counts_work`, for use with `diffrax.PIDController`, the solver returns an array for
which that controller makes the same decision.)

**Pausing.** Every thirty steps or so `LowRankNDF` needs new eigenpairs of the Hessian.
That is rare and large: within the loop over steps it keeps XLA's CPU compiler from
turning the loop into a single function, and every step then takes twice the time
(jaxlib 0.10.2). So a solver with `pauses=True` sets `Verdict.paused`; the controller
ends the solve with the result `PAUSED`; the caller (`_stepping`) computes the
eigenpairs with `renewed` and continues from the saved states of solver and controller.

Counts and verdicts are floating-point numbers, because diffrax converts every error
estimate to an inexact array.
"""

import abc
from typing import ClassVar, cast

import diffrax
import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ._types import BoolScalar, RealScalar

# pyright takes a member of diffrax's enumerations for a literal, not for a result.
PAUSED = cast(diffrax.RESULTS, diffrax.RESULTS.nonlinear_divergence)
"""The result of a solve that continues after `LowRankNDF.renewed`. diffrax's
enumeration cannot be extended; no solver of ours reports this member otherwise."""


class AbstractCountingSolver(diffrax.AbstractAdaptiveSolver):
    """A solver that can count its own work and knows how much memory it takes."""

    counts_work: eqx.AbstractVar[bool]
    """Whether `step` returns a `CountedError`, which only `ResumableController` reads,
    in place of an error estimate."""
    starting_evaluations: ClassVar[int]
    """The number of evaluations of the vector field in `init`."""

    @abc.abstractmethod
    def memory(self, size: int) -> int:
        """The approximate memory in bytes of a solve with a state of `size` numbers,
        without its dense output."""


class Work(eqx.Module):
    """Counts of the work in one attempted step, or in all attempts so far."""

    evaluations: Float[Array, ""]
    """Evaluations of the vector field."""
    hessian_products: Float[Array, ""]
    """Products of the vector field's Jacobian with a vector. Where these are computed
    by finite differences, the evaluation at the base point is included."""
    factorisations: Float[Array, ""]
    """Factorisations of matrices of the size of the state."""
    newton_failures: Float[Array, ""]
    """Attempts that failed because the implicit equation was not solved."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.evaluations + other.evaluations,
            self.hessian_products + other.hessian_products,
            self.factorisations + other.factorisations,
            self.newton_failures + other.newton_failures,
        )


def work(
    evaluations: RealScalar = 0,
    hessian_products: RealScalar = 0,
    factorisations: RealScalar = 0,
    newton_failures: RealScalar | BoolScalar = 0,
) -> Work:
    """A `Work` from numbers of any type."""
    counts = (evaluations, hessian_products, factorisations, newton_failures)
    return Work(*(jnp.asarray(count, jnp.float64) for count in counts))


class Verdict(eqx.Module):
    """A decision on a step, from a solver that chooses its step sizes itself."""

    accepted: Float[Array, ""]
    """One if the step is accepted, zero if not."""
    factor: Float[Array, ""]
    """The length of the next step divided by the length of this one."""
    paused: Float[Array, ""]
    """One if the solver must be `renewed` before its next step, zero if not."""
    retried: Float[Array, ""]
    """One if the next step repeats this one, which then does not count as an attempt;
    zero if not."""


class CountedError(eqx.Module):
    """The error estimate of a solver with `counts_work=True`, with its work."""

    error: PyTree
    """An error estimate, with the structure of the state, or a `Verdict`."""
    work: Work
