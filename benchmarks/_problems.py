"""The flows on which solvers are compared."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

import gradflow
from gradflow._core.ravel import Ravel

SAVED_TIMES = 200
FIRST_TIME = 1e-4
"""The first saved time, as a fraction of the horizon."""
LATE = 5e3
"""A time at which λ_max exceeds 100 on the Zipf chain of 300 tokens. It is 2.5 at
t = 3,000, 106 at 4,000, 168 at 5,000 and 702 at 7,000."""


class VectorField(eqx.Module):
    """f(y) = -∇L(y), or its counterpart in the loss's own metric, on the flat state.
    Every solver integrates this function."""

    loss: gradflow.AbstractLoss
    ravel: Ravel = eqx.field(static=True)

    def __call__(self, y: Float[Array, " n"]) -> Float[Array, " n"]:
        params = self.ravel.unravel(y)
        gradient = jax.grad(self.loss)(params)
        return self.ravel.ravel(self.loss.velocity(params, gradient))

    def product(
        self, y: Float[Array, " n"], v: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        return jax.jvp(self, (y,), (v,))[1]

    def jacobian_columns(self, y: Float[Array, " n"]) -> Float[Array, "n n"]:
        """The columns of the exact Jacobian, stacked as rows. Computed in batches, so
        that n products need not fit in memory at once."""
        _, product = jax.linearize(self, y)
        return jax.lax.map(product, jnp.eye(y.size), batch_size=512)


@dataclass(frozen=True)
class Flow:
    """A loss, the start of its flow for each seed, and the horizon."""

    name: str
    title: str
    loss: gradflow.AbstractLoss
    init: Callable[[int], PyTree]
    t1: float
    exact: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    """The closed form, if there is one: (ts, y0) → states at ts."""
    in_numpy: Callable[[float, np.ndarray], np.ndarray] | None = None
    """The right-hand side f(t, y) in NumPy, as a SciPy user would write it, if any."""

    @property
    def symmetric(self) -> bool:
        """Whether the Jacobian is symmetric."""
        return self.loss.is_euclidean

    @property
    def ts(self) -> Float[np.ndarray, " times"]:
        return self.t1 * np.geomspace(FIRST_TIME, 1.0, SAVED_TIMES)

    @property
    def field(self) -> VectorField:
        return VectorField(self.loss, Ravel.of(self.init(0)))

    @property
    def size(self) -> int:
        return Ravel.of(self.init(0)).size

    def start(self, seed: int) -> Float[np.ndarray, " n"]:
        return np.array(self.field.ravel.ravel(self.init(seed)))


class Quadratic(gradflow.AbstractLoss):
    """L(y) = ½ yᵀ Q diag(λ) Q y with the reflection Q = I - 2uuᵀ, so that no coordinate
    axis is an eigenvector. Its flow is y(t) = Q exp(-λt) Q y(0)."""

    spectrum: Float[Array, " n"]
    u: Float[Array, " n"]

    def __call__(self, y: Float[Array, " n"]) -> Float[Array, ""]:
        return 0.5 * jnp.sum(self.spectrum * self._reflected(y) ** 2)

    def _reflected(self, y: Any) -> Any:
        return y - 2 * (y @ self.u)[..., None] * self.u

    def exact(self, ts: np.ndarray, y0: np.ndarray) -> np.ndarray:
        decay = np.exp(-ts[:, None] * self.spectrum)
        return np.asarray(self._reflected(decay * self._reflected(y0)))


def quadratic(n: int = 300, t1: float = 1e3) -> Flow:
    u = np.random.default_rng(0).normal(size=n)
    spectrum = jnp.geomspace(1e-4, 1e2, n)
    loss = Quadratic(spectrum, jnp.asarray(u / np.linalg.norm(u)))

    def init(seed: int) -> Array:
        return jnp.asarray(np.random.default_rng([1, seed]).normal(size=n))

    title = f"quadratic, n = {n}, eigenvalues 1e-4 … 1e2, t = {t1:,g}"
    return Flow("quadratic", title, loss, init, t1, loss.exact)


def transformer(
    name: str, title: str, chain: gradflow.MarkovChain, width: int, t1: float
) -> Flow:
    """The one-layer Transformer on infinite context, from entries of size 1e-3."""
    model = gradflow.OneLayerTransformer(vocabulary=chain.size, width=width)
    problem = gradflow.Problem(model, gradflow.InfiniteContext(chain))
    n = Ravel.of(problem.init()).size
    title = f"{title}, d = {chain.size}, m = {width}, n = {n:,}, t = {t1:,g}"
    return Flow(name, title, problem, lambda seed: problem.init(seed, 1e-3), t1)


def reference(t1: float = 1e4) -> Flow:
    chain = gradflow.MarkovChain.sticky([0.75, 0.19, 0.05, 0.01], stickiness=0.5)
    return transformer("reference", "reference chain", chain, 10, t1)


def zipf(name: str, d: int, width: int, t1: float) -> Flow:
    law = 1 / np.arange(1, d + 1)
    chain = gradflow.MarkovChain.sticky(law / law.sum(), stickiness=0.5)
    return transformer(name, "Zipf's law", chain, width, t1)


def from_matrix(path: Path, t1: float, width: int = 10) -> Flow:
    """The chain of a transition matrix in a file: `.npy`, or text, one row per line."""
    if path.suffix == ".npy":
        matrix = np.load(path)
    else:
        matrix = np.loadtxt(path, delimiter="," if path.suffix == ".csv" else None)
    chain = gradflow.MarkovChain(matrix)
    return transformer("matrix", f"chain of {path.name}", chain, width, t1)


def heads(geometry: str, t1: float = 1e4, h: int = 3, T: int = 40) -> Flow:
    """The tensor factorisation of theory.md, section 2: blocks of one lag each, whose
    importance falls geometrically with ratio 1.7, in d = 50 features."""
    d = 50
    G = np.zeros((d, T))
    columns = np.random.default_rng(0).normal(size=(d, h))
    G[:, :h] = columns / np.linalg.norm(columns, axis=0) * 1.7 ** -np.arange(h)
    loss = gradflow.TensorFactorisation(G, h, geometry)  # pyright: ignore

    def in_numpy(t: float, y: np.ndarray) -> np.ndarray:
        V, x = y[: h * d].reshape(h, d), y[h * d :].reshape(h, T)
        s = x
        if geometry == "scores":
            s = np.exp(x - x.max(axis=1, keepdims=True))
            s /= s.sum(axis=1, keepdims=True)
        R = G - V.T @ s
        g = V @ R
        moved = s * (g - np.sum(s * g, axis=1, keepdims=True))
        return np.concatenate([(s @ R.T).ravel(), moved.ravel()])

    name = "heads" if geometry == "scores" else geometry
    n = h * (d + T)
    title = f"tensor factorisation ({geometry}), h = {h}, T = {T}, n = {n}, t = {t1:,g}"
    return Flow(
        name, title, loss, lambda seed: loss.init(seed, 0.1), t1, None, in_numpy
    )


def late(name: str, flow: Flow, since: float, t1: float) -> Flow:
    """The same flow from time `since` on, where it is stiff."""

    @functools.cache
    def init(seed: int) -> PyTree:
        start = flow.init(seed)
        return gradflow.integrate(
            flow.loss, start, since, observables=(), save_params=False, dense_memory=0
        ).final

    title = f"{flow.title.rpartition(', t =')[0]}, t = {since:,g} … {since + t1:,g}"
    return Flow(name, title, flow.loss, init, t1)


def problem(name: str, t1: float | None, matrix: Path | None) -> Flow:
    """The problem of this name, up to `t1` or to its usual horizon."""
    if name == "matrix":
        assert matrix is not None
        return from_matrix(matrix, t1 or 1e4)
    if name == "zipf32":
        return zipf(name, 32, 32, t1 or 3e3)
    if name == "zipf300":
        return zipf(name, 300, 64, t1 or 1e3)
    if name == "zipf300late":
        return late(name, zipf(name, 300, 64, LATE), LATE, t1 or 20.0)
    if name in ("heads", "replicator"):
        return heads("scores" if name == "heads" else name, t1 or 1e4)
    return {"reference": reference, "quadratic": quadratic}[name](
        **({"t1": t1} if t1 else {})
    )


NAMES = (
    *("reference", "zipf32", "zipf300", "zipf300late", "heads", "replicator"),
    *("quadratic", "matrix"),
)
