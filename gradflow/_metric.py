"""The velocity of a flow: against the gradient, in the loss's own metric if it has one.

A loss may bring `steepest_descent(params, gradient)`, the velocity θ̇ = -G(θ)⁻¹∇L of a
Riemannian gradient flow. Then dL/dt = ⟨∇L, θ̇⟩ = -∇LᵀG⁻¹∇L: the power that the energy
balance integrates, whose square root is the speed of the flow in its metric.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ._products import with_plain_products


def descent(
    loss: Callable[[PyTree], Any], params: PyTree
) -> tuple[Float[Array, ""], PyTree, Float[Array, ""]]:
    """L, θ̇ and the power -dL/dt."""

    def scalar(params: PyTree) -> Float[Array, ""]:
        return jnp.asarray(loss(params), dtype=jnp.float64)

    value, gradient = with_plain_products(jax.value_and_grad(scalar))(params)
    velocity = velocity_of(loss, params, gradient)
    products = [
        jnp.sum(g * v)
        for g, v in zip(
            jax.tree.leaves(gradient), jax.tree.leaves(velocity), strict=True
        )
    ]
    return value, velocity, -jnp.sum(jnp.stack(products))


def velocity_of(loss: Any, params: PyTree, gradient: PyTree) -> PyTree:
    own = getattr(loss, "steepest_descent", None)
    if own is None:
        return jax.tree.map(jnp.negative, gradient)
    return own(params, gradient)


def is_euclidean(loss: Any) -> bool:
    """Whether a loss's flow is a gradient flow in the plain sense, so that its Jacobian
    is symmetric."""
    return bool(getattr(loss, "is_euclidean", not hasattr(loss, "steepest_descent")))
