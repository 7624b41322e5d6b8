"""Shared by the experiments on the rank-one manifold: its orbit from the first saddle,
and the Hessian across it.

On W0 = γαᵀ, W1 = αβᵀ, WQ = q αᾱᵀ, WK = k αᾱᵀ the Hessian of the full loss splits into
blocks. Let v be a unit vector orthogonal to α and move W0 by xvᵀ, W1 by vyᵀ, WQ by
a vᾱᵀ and WK by b vᾱᵀ. To first order neither M = W0 W1 nor Φ = W0 WQ WKᵀ W0ᵀ changes;
to second order

    δM = xyᵀ,   δΦ = k a xγᵀ + q b γxᵀ,

so that the loss changes by xᵀB(y, a, b) with the d × (d+2) matrix
B = [G_M, k G_Φγ, q G_Φᵀγ]. The Hessian across the manifold is thus [[0, B], [Bᵀ, 0]],
once for each of the m-1 directions v: its eigenvalues are ± the singular values of B,
and the flow leaves at rate σ₁(B). Where G_Φ vanishes, this is σ₁(G_M). Across ᾱ alone
the eigenvalues are ±γᵀG_Φγ, which is zero at a critical point. The remaining block is
the Hessian along the manifold: that of `RankOneProblem`, and rotations of α and ᾱ.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gradflow
from gradflow.landscape import CriticalPoint, find_critical_point

# The flow settles within 40 of its slowest time constants. This solver compiles fastest
# and is fast enough for ten numbers.
SOLVER = "tsit5"
SEED = 1e-8
"""q = k at the start of the orbit from θ¹. The error relative to the limit q → 0 is of
the order of its square."""


class Gradients(NamedTuple):
    G_M: np.ndarray
    G_Phi: np.ndarray
    across: np.ndarray
    """B."""


def first_saddle(pi: np.ndarray, attention: float) -> gradflow.RankOneParameters:
    """θ¹ of theory.md: γ = gπ/‖π‖ and β = c/(g‖π‖), with q = k = `attention`."""
    norm = np.linalg.norm(pi)
    c = np.log(pi) - np.mean(np.log(pi))
    g = np.sqrt(np.linalg.norm(c) / norm)
    small = np.asarray(attention)
    return gradflow.RankOneParameters(g * pi / norm, c / (g * norm), small, small)


def orbit(
    reduction: gradflow.RankOneProblem, t1: float
) -> tuple[gradflow.Flow, CriticalPoint]:
    """The rank-one flow that leaves θ¹ along the focus direction, and its end point,
    polished by Newton's method along the curved directions."""
    pi = np.asarray(reduction.population.chain.stationary)
    flow = gradflow.integrate(
        reduction,
        first_saddle(pi, SEED),
        t1,
        ts=[0.0, t1],
        solver=SOLVER,
        rtol=1e-11,
        atol=1e-16,
        observables=(),
    )
    end = find_critical_point(reduction, flow.final, tolerance=1e-14)
    return flow, end


@jax.jit
def of_M_and_Phi(pi: Any, P: Any, M: Any, Phi: Any) -> tuple[Any, Any]:
    """G_M and G_Φ of the infinite-context loss."""

    def loss(M: Any, Phi: Any) -> Any:
        attention = jax.nn.softmax(Phi + jnp.log(pi)[None], axis=1)
        return -jnp.sum(pi[:, None] * P * jax.nn.log_softmax(attention @ M))

    return jax.grad(loss, argnums=(0, 1))(M, Phi)


def gradients(
    reduction: gradflow.RankOneProblem, params: gradflow.RankOneParameters
) -> Gradients:
    """G_M, G_Φ and B at a point of the manifold, for infinite context."""
    chain = reduction.population.chain
    gamma, beta = np.asarray(params.gamma), np.asarray(params.beta)
    q, k = float(params.q), float(params.k)
    G_M, G_Phi = map(
        np.asarray,
        of_M_and_Phi(
            jnp.asarray(chain.stationary),
            jnp.asarray(chain.transition),
            np.outer(gamma, beta),
            q * k * np.outer(gamma, gamma),
        ),
    )
    across = np.column_stack([G_M, k * G_Phi @ gamma, q * G_Phi.T @ gamma])
    return Gradients(G_M, G_Phi, across)


def rate_across(
    reduction: gradflow.RankOneProblem, params: gradflow.RankOneParameters
) -> float:
    """σ₁(B)."""
    B = gradients(reduction, params).across
    return float(np.linalg.svd(B, compute_uv=False)[0])
