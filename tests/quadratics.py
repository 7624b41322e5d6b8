"""A quadratic loss on a pytree, whose flow is a matrix exponential."""

import jax.numpy as jnp
import numpy as np
import scipy.linalg


def quadratic(params):
    """½ xᵀHx on a pytree: H has eigenvalues from -1 (a saddle) to 20."""
    x = jnp.concatenate([params["a"], jnp.ravel(params["b"][0])])
    return 0.5 * x @ jnp.asarray(HESSIAN) @ x


def _hessian():
    rng = np.random.default_rng(0)
    Q, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    return Q @ np.diag([-1.0, 0.0, 0.3, 1.0, 5.0, 20.0]) @ Q.T


HESSIAN = _hessian()
START = {"a": np.array([1.0, -0.5]), "b": (np.array([[0.3, 2.0], [-1.0, 0.7]]),)}


def flat(params):
    a, b = np.asarray(params["a"]), np.asarray(params["b"][0])
    return np.concatenate([a, b.reshape(*b.shape[:-2], 4)], axis=-1)


def exact_quadratic(t):
    return scipy.linalg.expm(-HESSIAN * t) @ flat(START)
