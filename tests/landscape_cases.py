"""Losses and points that the tests of `gradflow.landscape` share."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracles

import gradflow

PI = oracles.REFERENCE_LAW
P = oracles.sticky(PI, oracles.REFERENCE_STICKINESS)
ZERO = [np.zeros(s) for s in ((4, 6), (6, 3), (6, 3), (6, 4))]
"""The weights of `small` at the origin."""


#
# Losses
#


def bowl(x):
    return jnp.sum(x**2)


class Quadratic(eqx.Module):
    """½(x - c)ᵀH(x - c) + gᵀ(x - c); compiled once per size."""

    H: jax.Array
    g: jax.Array
    c: jax.Array

    def __init__(self, H, g=0.0, c=0.0):
        n = len(H)
        self.H, self.g, self.c = (
            jnp.asarray(np.broadcast_to(x, s))
            for x, s in ((H, (n, n)), (g, (n,)), (c, (n,)))
        )

    def __call__(self, x):
        return 0.5 * (x - self.c) @ self.H @ (x - self.c) + self.g @ (x - self.c)


class Polynomial(eqx.Module):
    """Σ c[i, j] xⁱ yʲ up to the fourth power; compiled once for all coefficients."""

    coefficients: jax.Array

    def __init__(self, **terms):
        """`x2y1=3.0` is 3x²y."""
        c = np.zeros((5, 5))
        for powers, coefficient in terms.items():
            c[int(powers[1]), int(powers[3])] = coefficient
        self.coefficients = jnp.asarray(c)

    def __call__(self, xy):
        powers = [jnp.stack([jnp.ones(()), z, z**2, z**3, z**4]) for z in xy]
        return powers[0] @ self.coefficients @ powers[1]


class Factorisation(eqx.Module):
    """½‖UVᵀ - A‖²."""

    A: jax.Array

    def __call__(self, params):
        U, V = params
        return 0.5 * jnp.sum((U @ V.T - self.A) ** 2)


#
# Points of `small`
#


def parameters(weights):
    """Weights in the oracles' order as parameters."""
    return gradflow.OneLayerParameters(*map(jnp.asarray, weights))


def weights_of(params):
    """The inverse of `parameters`."""
    return [getattr(params, name) for name in oracles.SHAPES]


def perturbed(weights, scale, seed=0):
    """Parameters near `weights`, with Gaussian noise of this scale."""
    rng = np.random.default_rng(seed)
    return parameters([w + scale * rng.normal(size=w.shape) for w in weights])


def flat(params):
    """A pytree as one vector."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])
