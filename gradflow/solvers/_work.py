"""What a step cost, counted by the solver itself.

diffrax throws the solver's state away with a rejected step, so that a count kept there
would miss the work of rejected steps. The error estimate does reach the controller
after every attempt: a solver that is asked to count sends its count along with it.

Counts and verdicts are floating point numbers, as diffrax makes of every error.
"""

from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

PAUSED: Any = diffrax.RESULTS.nonlinear_divergence
"""How a solve ends that is to be gone on with after `LowRankNDF.renewed`."""


class Work(eqx.Module):
    """Counts of one attempted step, or of all attempts so far."""

    evaluations: Float[Array, ""]
    """Of the vector field."""
    hessian_products: Float[Array, ""]
    """Products of the vector field's Jacobian and a vector; by differences, also the
    value that they are differences to."""
    factorisations: Float[Array, ""]
    """Of matrices as large as the state."""
    newton_failures: Float[Array, ""]
    """Attempts lost because the implicit equation was not solved."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.evaluations + other.evaluations,
            self.hessian_products + other.hessian_products,
            self.factorisations + other.factorisations,
            self.newton_failures + other.newton_failures,
        )


def work(
    evaluations: Any = 0,
    hessian_products: Any = 0,
    factorisations: Any = 0,
    newton_failures: Any = 0,
) -> Work:
    counts = (evaluations, hessian_products, factorisations, newton_failures)
    return Work(*(jnp.asarray(count, jnp.float64) for count in counts))


class CountedError(eqx.Module):
    """In place of `y_error`, from a solver whose `counts_work` is true."""

    error: Any
    work: Work


class Verdict(eqx.Module):
    """In place of an error estimate, from a solver that chooses its steps itself."""

    accepted: Float[Array, ""]
    """One or zero."""
    factor: Float[Array, ""]
    """The next step's length by this one's."""
    paused: Float[Array, ""]
    """One where the solver is to be `renewed` before its next step, else zero."""
    retried: Float[Array, ""]
    """One where the next step is this one again."""
