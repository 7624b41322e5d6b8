"""A diffrax term on states that are one flat vector."""

from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

Field = Callable[[Any, Float[Array, " n"]], Float[Array, " n"]]


def flat_field(
    terms: diffrax.AbstractTerm, t0: Any, t1: Any, y0: Any, args: Any
) -> tuple[Float[Array, " n"], Field]:
    """The state as one vector, and the vector field of (t, y) on such vectors."""
    y, unravel = ravel_pytree(y0)
    h = t1 - t0
    # Per unit of time, whatever the direction of time is.
    unit = jax.tree.map(lambda x: x / jnp.where(h == 0, 1.0, h), terms.contr(t0, t1))

    def field(t: Any, y: Float[Array, " n"]) -> Float[Array, " n"]:
        return ravel_pytree(terms.vf_prod(t, unravel(y), args, unit))[0]

    return y, field
