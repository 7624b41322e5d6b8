"""Lanczos methods: the ends of a Hessian's spectrum, and functions of the Hessian
applied to a vector, from Hessian-vector products."""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .._core.compiled import jit
from ._flat_loss import FlatLoss, Vector, refuse_not_finite

LEAST_BLOCKS = 4
"""The smallest number of blocks in a basis; a restart keeps half of the basis."""
LEAST_BASIS = 64
MOST_PASSES = 6


#
# Block Lanczos for the ends of the spectrum
#


class Plan(NamedTuple):
    """The numbers of eigenpairs wanted at each end, and the sizes of the search."""

    low: int
    high: int
    block: int
    """The number of rows of a block: all that are wanted and a few more. A block this
    large finds every copy of a multiple eigenvalue; a single vector would find one."""
    basis: int
    """The number of rows of the basis."""

    @staticmethod
    def of(low: int, high: int) -> "Plan":
        """The sizes of a search for `low` and `high` eigenpairs."""
        guarded = [k and k + max(2, k // 4) for k in (low, high)]
        block = sum(guarded)
        blocks = max(LEAST_BLOCKS, math.ceil(LEAST_BASIS / block))
        return Plan(low, high, block, (blocks + blocks % 2) * block)

    @property
    def kept(self) -> int:
        """The number of Ritz vectors that a restart keeps."""
        return self.basis // 2

    @property
    def rows(self) -> int:
        """The number of orthogonal vectors that the search needs, at most n."""
        return self.basis + self.block

    def outermost(self, rows: int) -> np.ndarray:
        """The indices of the `rows` outermost Ritz values at the wanted ends, among
        `basis` Ritz values in increasing order."""
        high = rows // 2 if self.low and self.high else rows if self.high else 0
        return np.r_[: rows - high, self.basis - high : self.basis]


class Search(eqx.Module):
    """The state of a thick-restart block Lanczos search."""

    V: Float[Array, "basis n"]
    """An orthonormal basis in the first `filled` rows; the others are zero."""
    W: Float[Array, "basis n"]
    """The product of the basis with the Hessian."""
    filled: Int[Array, ""]
    block: Float[Array, "block n"]
    """The next directions of the search: the residuals of the outermost Ritz
    vectors."""
    ritz: Float[Array, " block"]
    """The outermost Ritz values, in increasing order."""
    residuals: Float[Array, " block"]
    scale: Float[Array, ""]
    """max |λ|, as known so far."""
    loss: Float[Array, ""]

    @staticmethod
    def start(n: int, plan: Plan, key: PRNGKeyArray) -> "Search":
        """A search that starts from a random block."""
        noise = jax.random.normal(key, (plan.block, n), jnp.float64)
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


Rows = tuple[Float[Array, "block n"], Float[Array, ""], Int[Array, ""]]


def _orthonormal(
    rows: Float[Array, "block n"], V: Float[Array, "basis n"]
) -> Float[Array, "block n"]:
    """Orthonormal rows that span the part of `rows` orthogonal to V.

    There are two passes, and more where most of a row lies in the span of V, because
    the rest of it is inexact. A row in the span of the others is replaced by some
    direction: QR invents one, and the next pass removes its part along V."""

    def one_pass(carry: Rows) -> Rows:
        rows, _, i = carry
        size = jnp.linalg.norm(rows, axis=1, keepdims=True)
        rows = rows / jnp.where(size > 0, size, 1.0)
        rows = rows - (rows @ V.T) @ V
        left = jnp.min(jnp.linalg.norm(rows, axis=1))
        return jnp.linalg.qr(rows.T)[0].T, left, i + 1

    def is_rough(carry: Rows) -> Bool[Array, ""]:
        _, left, i = carry
        return (i < 2) | ((left < 0.5) & (i < MOST_PASSES))

    start = (rows, jnp.zeros(()), jnp.asarray(0))
    return jax.lax.while_loop(is_rough, one_pass, start)[0]


Expansion = tuple[
    Float[Array, "basis n"], Float[Array, "basis n"], Float[Array, "block n"]
]


@jit
def cycle(flat: FlatLoss, y: Vector, search: Search, plan: Plan) -> Search:
    """Fill the basis block by block, compute its Ritz pairs (Rayleigh–Ritz), and keep
    the outermost half of them.

    Wu and Simon, SIAM J. Matrix Anal. Appl. 22 (2000), with a block instead of a
    vector, full reorthogonalisation, and the products W stored with the basis: that
    doubles the memory, but makes the residuals exact and the projection simple.
    """
    products = flat.products_at(y)

    def expand(i: Int[Array, ""], carry: Expansion) -> Expansion:
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
    """The wanted eigenpairs, in increasing order, with eigenvectors as rows."""

    eigenvalues: np.ndarray
    eigenvectors: np.ndarray
    residuals: np.ndarray
    products: int
    converged: bool
    bound: float
    """The bound that the residuals had to meet."""


def ends(
    flat: FlatLoss,
    y: Vector,
    plan: Plan,
    tolerance: float,
    max_products: int,
    key: PRNGKeyArray,
    settled: float = np.inf,
) -> Ends:
    """Cycles until every wanted residual is below tolerance · max |λ|. An eigenvalue
    that is certain to exceed `settled` needs no more accuracy."""
    wanted = np.r_[: plan.low, plan.block - plan.high : plan.block]
    search, spent = Search.start(y.size, plan, key), 0
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
# Lanczos from one vector, for functions of the Hessian applied to it
#


class Lanczos(eqx.Module):
    """H V ≈ V T + β v eᵀ from the vector b = ‖b‖ V e₁, in the eigenvectors of T."""

    ritz: Float[Array, " size"]
    """The eigenvalues of T."""
    first: Float[Array, " size"]
    """The first components of the eigenvectors of T, which are the components of b/‖b‖
    along the Ritz vectors."""
    last: Float[Array, " size"]
    """The last components of the eigenvectors of T."""
    beta: Float[Array, ""]
    vectors: Float[Array, "size n"]
    """The Ritz vectors, as rows."""
    sound: Bool[Array, " size"]
    """Whether a Ritz vector is one, and not padding."""
    products: Int[Array, ""]


LanczosStep = tuple[
    Float[Array, "size n"],
    Float[Array, "size n"],
    Vector,
    Float[Array, ""],
    Int[Array, ""],
]


def lanczos(flat: FlatLoss, y: Vector, b: Vector, size: int) -> Lanczos:
    """At most `size` steps of Lanczos with full reorthogonalisation; fewer if the space
    becomes invariant."""
    product = flat.product_at(y)
    norm = jnp.linalg.norm(b)
    v = b / jnp.where(norm > 0, norm, 1.0)

    def body(carry: LanczosStep) -> LanczosStep:
        V, W, v, _, i = carry
        V = V.at[i].set(v)
        w = product(v)
        W = W.at[i].set(w)
        rest = w
        for _ in range(2):
            rest = rest - (V @ rest) @ V
        beta = jnp.linalg.norm(rest)
        return V, W, rest / jnp.where(beta > 0, beta, 1.0), beta, i + 1

    def goes_on(carry: LanczosStep) -> Bool[Array, ""]:
        _, W, _, beta, i = carry
        image = jnp.sqrt(jnp.max(jnp.sum(W**2, axis=1)))
        return (i < size) & ((i == 0) | (beta > 1e-14 * image))

    empty = jnp.zeros((size, y.size))
    start = (empty, empty, v, norm, jnp.asarray(0))
    V, W, _, beta, steps = jax.lax.while_loop(goes_on, body, start)
    T = V @ W.T
    # Padding is decoupled, with the eigenvalue zero.
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
