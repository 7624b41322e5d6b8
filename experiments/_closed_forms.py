"""The closed forms of *Focus and Dilution* for infinite context, and functions that
measure them along a flow."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import gradflow


def first_rate(law: Any) -> float:
    """μ = ‖π‖·‖π - 1/d‖, the rate at which the flow leaves θ = 0."""
    law = np.asarray(law)
    return float(np.linalg.norm(law) * np.linalg.norm(law - 1 / law.size))


class FirstSaddle(NamedTuple):
    """θ¹: W0 = γαᵀ, W1 = αβᵀ and no attention, with α any unit vector."""

    gamma: np.ndarray
    """γ = gπ/‖π‖, g² = ‖c‖/‖π‖, c = log π - mean(log π)."""
    beta: np.ndarray
    """β = c/(g‖π‖), of the same norm g."""
    kappa: float
    """κ = [Σ_i π_i γ_i ((P - 1πᵀ)β)_i]·Var_π(γ): the attention grows at rate |κ|."""
    loss: float
    """H(π)."""

    @staticmethod
    def of(chain: gradflow.MarkovChain) -> "FirstSaddle":
        law, P = chain.stationary, chain.transition
        size = np.linalg.norm(law)
        c = np.log(law) - np.mean(np.log(law))
        g = np.sqrt(np.linalg.norm(c) / size)
        gamma, beta = g * law / size, c / (g * size)
        variance = law @ gamma**2 - (law @ gamma) ** 2
        kappa = (law * gamma) @ (P @ beta - law @ beta) * variance
        return FirstSaddle(gamma, beta, float(kappa), float(-law @ np.log(law)))

    @property
    def g(self) -> float:
        return float(np.linalg.norm(self.gamma))

    def params(
        self, width: int = 10, head_width: int = 10, seed: int = 0
    ) -> gradflow.OneLayerParameters:
        """θ¹ with a random α."""
        alpha = np.random.default_rng(seed).normal(size=width)
        alpha /= np.linalg.norm(alpha)
        zero = jnp.zeros((width, head_width))
        return gradflow.OneLayerParameters(
            W0=jnp.asarray(np.outer(self.gamma, alpha)),
            WQ=zero,
            WK=zero,
            W1=jnp.asarray(np.outer(alpha, self.beta)),
        )


class DistanceToFirstSaddle(eqx.Module):
    """The distance from parameters to the nearest θ¹. The minimum over α of
    ‖W0 - γαᵀ‖² + ‖W1 - αβᵀ‖² + ‖WQ‖² + ‖WK‖² is at α ∝ W0ᵀγ + W1β."""

    gamma: Array
    beta: Array

    @staticmethod
    def to(saddle: FirstSaddle) -> "DistanceToFirstSaddle":
        return DistanceToFirstSaddle(
            jnp.asarray(saddle.gamma), jnp.asarray(saddle.beta)
        )

    def __call__(self, params: Any) -> Array:
        alpha = params.W0.T @ self.gamma + params.W1 @ self.beta
        alpha = alpha / jnp.linalg.norm(alpha)
        parts = (
            params.W0 - jnp.outer(self.gamma, alpha),
            params.W1 - jnp.outer(alpha, self.beta),
            params.WQ,
            params.WK,
        )
        return jnp.sqrt(sum(jnp.sum(x**2) for x in parts))


def velocity(problem: gradflow.Problem, params: Any) -> Any:
    """θ̇ = -∇L(θ)."""
    return jax.tree.map(jnp.negative, jax.grad(problem)(params))
