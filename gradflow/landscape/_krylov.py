"""Lanczos: both ends of a Hessian's spectrum, and functions of it on one vector, from
products with vectors alone."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ._flat import FlatLoss, Vector, refuse_not_finite

LEAST_BLOCKS = 4
"""How many blocks a basis holds at least; of half of them a restart keeps."""
LEAST_BASIS = 64
MOST_PASSES = 6


#
# A block for the ends of the spectrum
#


class Plan(NamedTuple):
    """How many eigenpairs are wanted at each end, and the sizes of the search."""

    low: int
    high: int
    block: int
    """Rows of a block: all that is wanted and a few more. In a block as large as the
    number of wanted eigenpairs every copy of a multiple eigenvalue comes out; a single
    vector would see one of them."""
    basis: int

    @staticmethod
    def of(low: int, high: int) -> "Plan":
        guarded = [k and k + max(2, k // 4) for k in (low, high)]
        block = sum(guarded)
        blocks = max(LEAST_BLOCKS, math.ceil(LEAST_BASIS / block))
        return Plan(low, high, block, (blocks + blocks % 2) * block)

    @property
    def kept(self) -> int:
        return self.basis // 2

    @property
    def rows(self) -> int:
        """Orthogonal vectors that there must be for the search to make sense."""
        return self.basis + self.block

    def outermost(self, rows: int) -> np.ndarray:
        """Which of `basis` Ritz values in increasing order lie farthest out at the ends
        that are wanted."""
        high = rows // 2 if self.low and self.high else rows if self.high else 0
        return np.r_[: rows - high, self.basis - high : self.basis]


class Search(eqx.Module):
    """A thick-restart block Lanczos search after some cycles."""

    V: Float[Array, "basis n"]
    """An orthonormal basis in its first rows; the rest is zero."""
    W: Float[Array, "basis n"]
    """Its product with the Hessian."""
    filled: Int[Array, ""]
    block: Float[Array, "block n"]
    """Where to search next: the residuals of the outermost Ritz vectors."""
    ritz: Float[Array, " block"]
    """The outermost Ritz values, in increasing order."""
    residuals: Float[Array, " block"]
    scale: Float[Array, ""]
    """max |λ|, as far as it is known."""
    loss: Float[Array, ""]

    @staticmethod
    def start(n: int, plan: Plan, seed: int) -> "Search":
        noise = jax.random.normal(jax.random.key(seed), (plan.block, n), jnp.float64)
        return Search(
            jnp.zeros((plan.basis, n)),
            jnp.zeros((plan.basis, n)),
            jnp.zeros((), jnp.int64),
            noise,
            jnp.zeros(plan.block),
            jnp.full(plan.block, jnp.inf, jnp.float64),
            jnp.zeros(()),
            jnp.zeros(()),
        )


def _orthonormal(
    rows: Float[Array, "block n"], V: Float[Array, "basis n"]
) -> Float[Array, "block n"]:
    """Rows that span what `rows` span beyond V.

    Two passes, and more where a row lost most of itself to V: its rest is inexact. A
    row that lies in the span of the others is replaced by some direction; QR makes one
    up, and the next pass rids it of what it has of V."""

    def one_pass(carry: Any) -> Any:
        rows, _, i = carry
        size = jnp.linalg.norm(rows, axis=1, keepdims=True)
        rows = rows / jnp.where(size > 0, size, 1.0)
        rows = rows - (rows @ V.T) @ V
        left = jnp.min(jnp.linalg.norm(rows, axis=1))
        return jnp.linalg.qr(rows.T)[0].T, left, i + 1

    def is_rough(carry: Any) -> Any:
        _, left, i = carry
        return (i < 2) | ((left < 0.5) & (i < MOST_PASSES))

    return jax.lax.while_loop(is_rough, one_pass, (rows, jnp.zeros(()), 0))[0]


@eqx.filter_jit
def cycle(flat: FlatLoss, y: Vector, search: Search, plan: Plan) -> Search:
    """Fill the basis block by block, take the Ritz pairs in it (Rayleigh–Ritz), and
    keep the outermost half of them.

    Wu and Simon, SIAM J. Matrix Anal. Appl. 22 (2000), with a block in place of a
    vector, full reorthogonalisation, and the products W kept beside the basis: twice
    the memory, but the residuals are true ones and there is no band to account for.
    """
    products = flat.products_at(y)

    def expand(i: Array, carry: Any) -> Any:
        V, W, block = carry
        new = _orthonormal(block, V)
        image = products(new)
        at = search.filled + i * plan.block
        V = jax.lax.dynamic_update_slice_in_dim(V, new, at, 0)
        W = jax.lax.dynamic_update_slice_in_dim(W, image, at, 0)
        return V, W, image

    blocks = (plan.basis - search.filled) // plan.block
    carry = (search.V, search.W, search.block)
    V, W, _ = jax.lax.fori_loop(0, blocks, expand, carry)

    S = V @ W.T
    ritz, U = jnp.linalg.eigh(0.5 * (S + S.T), symmetrize_input=False)
    keep, aim = plan.outermost(plan.kept), plan.outermost(plan.block)
    X, HX = U[:, aim].T @ V, U[:, aim].T @ W
    block = HX - ritz[aim][:, None] * X
    rest = jnp.zeros((plan.basis - plan.kept, y.size))
    return Search(
        jnp.concatenate([U[:, keep].T @ V, rest]),
        jnp.concatenate([U[:, keep].T @ W, rest]),
        jnp.full((), plan.kept, jnp.int64),
        block,
        ritz[aim],
        jnp.linalg.norm(block, axis=1),
        jnp.max(jnp.abs(ritz)),
        flat(y),
    )


class Ends(NamedTuple):
    """The wanted eigenpairs, in increasing order, eigenvectors as rows."""

    eigenvalues: np.ndarray
    eigenvectors: np.ndarray
    residuals: np.ndarray
    products: int
    converged: bool
    bound: float
    """What the residuals had to be below."""


def ends(
    flat: FlatLoss,
    y: Vector,
    plan: Plan,
    tolerance: float,
    max_products: int,
    seed: int = 0,
    settled: float = np.inf,
) -> Ends:
    """Cycles until every wanted residual is below tolerance · max |λ|. Of eigenvalues
    above `settled` it is enough to be certain of that."""
    wanted = np.r_[: plan.low, plan.block - plan.high : plan.block]
    search, spent = Search.start(y.size, plan, seed), 0
    while True:
        spent += plan.basis - int(search.filled)
        search = cycle(flat, y, search, plan)
        bound = tolerance * float(search.scale)
        ritz, residuals = (
            np.asarray(x)[wanted] for x in (search.ritz, search.residuals)
        )
        done = (residuals <= bound) | (ritz - 2 * residuals > settled)
        refuse_not_finite(search.loss, ritz)
        if np.all(done) or spent >= max_products:
            break
    rows = np.r_[: plan.low, plan.kept - plan.high : plan.kept]
    return Ends(
        ritz,
        np.asarray(search.V[rows]),
        residuals,
        spent,
        bool(np.all(done)),
        bound,
    )


#
# One vector, for functions of the Hessian applied to it
#


class Lanczos(eqx.Module):
    """H V ≈ V T + β v eᵀ from the vector b = ‖b‖ V e₁, as the eigenpairs of T."""

    ritz: Float[Array, " size"]
    first: Float[Array, " size"]
    """The first components of the eigenvectors of T: those of b/‖b‖ along the Ritz
    vectors."""
    last: Float[Array, " size"]
    beta: Float[Array, ""]
    vectors: Float[Array, "size n"]
    """The Ritz vectors, as rows."""
    sound: Bool[Array, " size"]
    """Which of them are not mere padding."""
    products: Int[Array, ""]


def lanczos(flat: FlatLoss, y: Vector, b: Vector, size: int) -> Lanczos:
    """At most `size` steps of Lanczos, fully reorthogonalised; fewer where the space
    is invariant."""
    product = flat.product_at(y)
    norm = jnp.linalg.norm(b)
    v = b / jnp.where(norm > 0, norm, 1.0)

    def body(carry: Any) -> Any:
        V, W, v, _, i = carry
        V = V.at[i].set(v)
        w = product(v)
        W = W.at[i].set(w)
        rest = w
        for _ in range(2):
            rest = rest - (V @ rest) @ V
        beta = jnp.linalg.norm(rest)
        return V, W, rest / jnp.where(beta > 0, beta, 1.0), beta, i + 1

    def goes_on(carry: Any) -> Any:
        _, W, _, beta, i = carry
        image = jnp.sqrt(jnp.max(jnp.sum(W**2, axis=1)))
        return (i < size) & ((i == 0) | (beta > 1e-14 * image))

    empty = jnp.zeros((size, y.size))
    start = (empty, empty, v, norm, jnp.asarray(0))
    V, W, _, beta, steps = jax.lax.while_loop(goes_on, body, start)
    T = V @ W.T
    # Padding is decoupled, at the value zero.
    ritz, Q = jnp.linalg.eigh(0.5 * (T + T.T), symmetrize_input=False)
    vectors = Q.T @ V
    return Lanczos(
        ritz,
        Q[0],
        Q[steps - 1],
        beta,
        vectors,
        jnp.sum(vectors**2, axis=1) > 0.5,
        steps,
    )
