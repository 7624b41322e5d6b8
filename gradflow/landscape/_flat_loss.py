"""A loss as a function of one flat vector, its derivatives and their memory."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core.checks import Checked
from .._core.compiled import jit
from .._core.power_method import power_method, random_vector
from .._core.ravel import Ravel
from .._core.types import AnyArray
from ..problems import AbstractLoss, checked_loss

Vector = Float[Array, " n"]
Product = Callable[[Vector], Vector]

DENSE_COPIES = 5
"""The number of n×n arrays in memory while a Hessian is diagonalised: the matrix, its
eigenvectors and LAPACK's workspace."""
BATCH = 2**22
"""The total size of the vectors that are multiplied by the Hessian at once."""
NORM_ITERATIONS = 12


class FlatLoss(eqx.Module):
    """L(y), where y is the parameters as one flat vector."""

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
        """The same for the rows of a matrix, one batch of rows at a time."""
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
        """The spectral norm ‖∇³L(y)[s]‖, nearly: how fast the Hessian turns along s.
        The power method approaches it from below."""

        def along(y: Vector, v: Vector) -> Vector:
            return jax.jvp(self.gradient, (y,), (v,))[1]

        def product(v: Vector) -> Vector:
            return jax.jvp(lambda y: along(y, v), (y,), (s,))[1]

        return power_method(product, random_vector(y), NORM_ITERATIONS).size


def flat_loss(
    loss: Checked[Callable[[PyTree], AnyArray]], params: PyTree
) -> tuple[FlatLoss, Vector]:
    """A checked loss and point, in the form that the rest of this room uses."""
    loss = checked_loss(loss, params)
    ravel = Ravel.of(params)
    return FlatLoss(loss, ravel), ravel.ravel(params)


class Local(eqx.Module):
    """A loss at a point, up to second order."""

    loss: Float[Array, ""]
    gradient: Vector
    eigenvalues: Vector
    """The eigenvalues of the Hessian, in increasing order."""
    eigenvectors: Float[Array, "n n"]
    """Unit columns."""
    residuals: Vector
    """‖Hv - λv‖."""


def expansion(flat: FlatLoss, y: Vector) -> Local:
    """The loss to second order, from its dense Hessian."""
    loss, gradient = jax.value_and_grad(flat)(y)
    H = flat.hessian(y)
    eigenvalues, V = jnp.linalg.eigh(H, symmetrize_input=False)
    residuals = jnp.linalg.norm(H @ V - eigenvalues[None, :] * V, axis=0)
    return Local(loss, gradient, eigenvalues, V, residuals)


look = jit(expansion)


def refuse_not_finite(*derivatives: AnyArray | float) -> None:
    """Raise a `ValueError` if the loss or one of its derivatives is not finite at
    `params`."""
    if not all(np.all(np.isfinite(values)) for values in derivatives):
        raise ValueError(
            "`loss` must be finite at `params`, and so must its first and second "
            "derivatives: got NaN or infinity."
        )


def as_params(flat: FlatLoss, y: Vector) -> PyTree:
    """A flat vector as parameters, in NumPy arrays."""
    return jax.tree.map(np.asarray, flat.ravel.unravel(y))


def dense_bytes(n: int) -> int:
    """The memory that it takes to diagonalise a dense Hessian of n parameters."""
    return DENSE_COPIES * 8 * n**2
