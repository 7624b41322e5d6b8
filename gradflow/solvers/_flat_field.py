"""A diffrax term as a vector field on flat vectors."""

from collections.abc import Callable

import diffrax
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from ._types import RealScalar

Field = Callable[[RealScalar, Float[Array, " n"]], Float[Array, " n"]]
"""A vector field of (t, y)."""


def flat_field(
    terms: diffrax.AbstractTerm,
    t0: RealScalar,
    t1: RealScalar,
    y0: PyTree,
    args: PyTree,
) -> tuple[Float[Array, " n"], Field]:
    """The state as one flat vector, and the vector field on flat vectors."""
    y, unravel = ravel_pytree(y0)
    h = t1 - t0
    # Per unit of time, in whichever direction time runs.
    unit = jax.tree.map(lambda x: x / jnp.where(h == 0, 1.0, h), terms.contr(t0, t1))

    def field(t: RealScalar, y: Float[Array, " n"]) -> Float[Array, " n"]:
        return ravel_pytree(terms.vf_prod(t, unravel(y), args, unit))[0]

    return y, field
