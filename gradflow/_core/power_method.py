"""The power method: the largest eigenvalue of a symmetric linear map in absolute value,
from products with vectors."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Vector = Float[Array, " n"]
_Iterate = tuple[Int[Array, ""], Vector, Float[Array, ""], Float[Array, ""]]


class Dominant(NamedTuple):
    """The dominant eigenpair of a map A, nearly."""

    size: Float[Array, ""]
    """|λ|, approached from below. It is zero if A maps the vector to zero, and not
    finite if the product is not."""
    vector: Vector
    """An eigenvector, of any length."""
    iterations: Int[Array, ""]
    """The number of products."""


def random_vector(like: Vector) -> Vector:
    """A start vector with a part along every eigenvector. It is always the same one."""
    return jax.random.normal(jax.random.key(0), like.shape, like.dtype)


def power_method(
    product: Callable[[Vector], Vector],
    start: Vector,
    max_iterations: int,
    *,
    length: Float[Array, ""] | None = None,
    tolerance: float | None = None,
    known_size: Float[Array, ""] | None = None,
    wanted: Bool[Array, ""] | None = None,
) -> Dominant:
    """The dominant eigenpair of the map A by the iteration v ← A v/‖v‖.

    **Arguments:**

    - `product`: v ↦ A v for a vector of length one, or of the given `length`.
    - `start`: the first vector, of any length but zero; see `random_vector`.
    - `max_iterations`: the number of products; the largest number with a `tolerance`.
    - `length`: the length of the vectors that are multiplied, if it is not one: a short
        one for products that are finite differences of a nonlinear map.
    - `tolerance`: stop, after two products at least, once |λ| changes by at most this
        fraction. By default all products are made.
    - `known_size`: |λ| as found before, returned if no product is made.
    - `wanted`: if false, no product is made, and `start` and `known_size` are returned.
    """

    def proceed(carry: _Iterate) -> Bool[Array, ""]:
        iteration, _, size, previous = carry
        going = iteration < max_iterations
        if tolerance is not None:
            settled = jnp.abs(size - previous) <= tolerance * size
            going = ((iteration < 2) | ~settled) & going
        return going if wanted is None else wanted & going

    def iterate(carry: _Iterate) -> _Iterate:
        iteration, v, previous, _ = carry
        norm = jnp.linalg.norm(v)
        image = product(v / norm if length is None else (length / norm) * v)
        size = jnp.linalg.norm(image)
        size = size if length is None else size / length
        usable = (size > 0) & jnp.isfinite(size)
        return iteration + 1, jnp.where(usable, image, v), size, previous

    size = jnp.zeros((), start.dtype) if known_size is None else known_size
    iterations, vector, size, _ = jax.lax.while_loop(
        proceed, iterate, (jnp.zeros((), jnp.int32), start, size, size)
    )
    return Dominant(size, vector, iterations)
