"""A loss on one flat vector: its derivatives, and how much memory they may take."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core.ravel import Ravel
from ..problems import AbstractLoss, checked_loss

Vector = Float[Array, " n"]
Product = Callable[[Vector], Vector]

DENSE_COPIES = 5
"""n×n arrays that are in memory at once while a Hessian is diagonalised: the matrix,
its eigenvectors, and what LAPACK works in."""
BATCH = 2**22
"""Numbers in the vectors that are multiplied by the Hessian at once."""
NORM_ITERATIONS = 12


class FlatLoss(eqx.Module):
    """L(y), with y the parameters as one flat vector."""

    loss: AbstractLoss
    ravel: Ravel = eqx.field(static=True)

    def __call__(self, y: Vector) -> Float[Array, ""]:
        return self.loss.in_double(self.ravel.unravel(y))

    def gradient(self, y: Vector) -> Vector:
        return jax.grad(self)(y)

    def product_at(self, y: Vector) -> Product:
        """v ↦ ∇²L(y) v."""
        return jax.linearize(self.gradient, y)[1]

    def products_at(
        self, y: Vector
    ) -> Callable[[Float[Array, "rows n"]], Float[Array, "rows n"]]:
        """The same for the rows of a matrix, a batch of them at a time."""
        product, batch = self.product_at(y), max(1, BATCH // y.size)

        def products(rows: Float[Array, "rows n"]) -> Float[Array, "rows n"]:
            if rows.shape[0] <= batch:
                return jax.vmap(product)(rows)
            return jax.lax.map(product, rows, batch_size=batch)

        return products

    def hessian(self, y: Vector) -> Float[Array, "n n"]:
        H = self.products_at(y)(jnp.eye(y.size, dtype=y.dtype))
        return 0.5 * (H + H.T)

    def turn(self, y: Vector, s: Vector) -> Float[Array, ""]:
        """‖∇³L(y)[s]‖ in the spectral norm, nearly: how fast the Hessian turns along
        s. By the power method, which errs on the low side."""

        def along(y: Vector, v: Vector) -> Vector:
            return jax.jvp(self.gradient, (y,), (v,))[1]

        def iterate(_: Any, carry: Any) -> Any:
            v, _ = carry
            w = jax.jvp(lambda y: along(y, v), (y,), (s,))[1]
            norm = jnp.linalg.norm(w)
            return jnp.where(norm > 0, w / jnp.where(norm > 0, norm, 1.0), v), norm

        noise = jax.random.normal(jax.random.key(0), y.shape, y.dtype)
        start = noise / jnp.linalg.norm(noise), jnp.zeros((), y.dtype)
        return jax.lax.fori_loop(0, NORM_ITERATIONS, iterate, start)[1]


def flat_loss(loss: Any, params: PyTree) -> tuple[FlatLoss, Vector]:
    """A loss and a point as the rest of this room takes them, checked."""
    loss = checked_loss(loss, params)
    ravel = Ravel.of(params)
    return FlatLoss(loss, ravel), ravel.ravel(params)


class Local(eqx.Module):
    """All of a loss at a point up to second order."""

    loss: Float[Array, ""]
    gradient: Vector
    eigenvalues: Vector
    """Of the Hessian, in increasing order."""
    eigenvectors: Float[Array, "n n"]
    """Unit columns."""
    residuals: Vector
    """‖Hv - λv‖."""


def expansion(flat: FlatLoss, y: Vector) -> Local:
    """By the Hessian, written out and diagonalised."""
    loss, gradient = jax.value_and_grad(flat)(y)
    H = flat.hessian(y)
    eigenvalues, V = jnp.linalg.eigh(H, symmetrize_input=False)
    residuals = jnp.linalg.norm(H @ V - eigenvalues[None, :] * V, axis=0)
    return Local(loss, gradient, eigenvalues, V, residuals)


look = eqx.filter_jit(expansion)


def refuse_not_finite(*derivatives: Any) -> None:
    """Refuse a loss by its value or derivatives at `params`."""
    if not all(np.all(np.isfinite(values)) for values in derivatives):
        raise ValueError(
            "`loss` must be finite at `params`, and its first and second derivatives "
            "too; they are not."
        )


def as_params(flat: FlatLoss, y: Vector) -> PyTree:
    return jax.tree.map(np.asarray, flat.ravel.unravel(y))


#
# Memory
#


def dense_bytes(n: int) -> int:
    return DENSE_COPIES * 8 * n**2
