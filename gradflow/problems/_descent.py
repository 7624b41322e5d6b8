"""The velocity of a gradient flow and the rate at which the loss falls along it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ._loss import AbstractLoss


def descent(
    loss: AbstractLoss, params: PyTree
) -> tuple[Float[Array, ""], PyTree, Float[Array, ""]]:
    """L, the velocity θ̇ = -G⁻¹∇L in the loss's metric G, and the power

        -dL/dt = -⟨∇L, θ̇⟩ = ∇LᵀG⁻¹∇L,

    which the energy balance integrates and whose square root is the flow's speed.
    """
    value, gradient = loss.value_and_grad(params)
    velocity = loss.velocity(params, gradient)
    products = [
        jnp.sum(g * v)
        for g, v in zip(
            jax.tree.leaves(gradient), jax.tree.leaves(velocity), strict=True
        )
    ]
    return value, velocity, -jnp.sum(jnp.stack(products))
