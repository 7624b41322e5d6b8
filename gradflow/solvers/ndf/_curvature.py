"""The top eigenpairs of a Hessian, followed along a flow by Hessian-vector products."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

BLOCK = 4
"""The number of eigenpairs that are added or dropped at a time."""
STIFF, SLACK = 0.2, 0.02
"""An eigenvalue λ matters to a step of coefficient c if cλ exceeds `STIFF`; a block
below `SLACK` is dropped."""
SMALL_PRODUCT = 2**14
"""The total size of two matrices up to which their product counts as small."""

HessianProducts = Callable[
    [Float[Array, "rank n"], Int[Array, ""]], Float[Array, "rank n"]
]
"""The products of a Hessian with the first rows of a matrix, given their number."""


class Curvature(eqx.Module):
    """H ≈ Vᵀ Λ V on the `active` leading eigenpairs, in decreasing order. The other
    rows of V are zero and leave room for more.

    V is in single precision, because it only serves as a preconditioner and is the
    largest array that a step reads. It is stored as two arrays: where no more than the
    `few` first rows are active a step reads only these, and a slice would be a copy."""

    few: Float32[Array, "few n"]
    further: Float32[Array, "further n"]
    eigenvalues: Float[Array, " rank"]
    active: Int[Array, ""]

    @classmethod
    def unknown(cls, size: int, rank: int) -> "Curvature":
        """No curvature, for the start of a flow."""
        rank = min(rank, size)
        return cls.of(
            jnp.zeros((rank, size)),
            jnp.zeros(rank),
            jnp.asarray(min(2 * BLOCK, rank), jnp.int32),
        )

    @classmethod
    def of(
        cls,
        V: Float[Array, "rank n"],
        eigenvalues: Float[Array, " rank"],
        active: Int[Array, ""],
    ) -> "Curvature":
        """The curvature with these eigenpairs."""
        few = max(2 * BLOCK, V.shape[0] // 3)
        V = V.astype(jnp.float32)
        return cls(V[:few], V[few:], eigenvalues, active)

    @property
    def V(self) -> Float32[Array, "rank n"]:
        return jnp.concatenate([self.few, self.further])

    @property
    def is_finite(self) -> Bool[Array, ""]:
        return jnp.all(jnp.isfinite(self.few)) & jnp.all(jnp.isfinite(self.further))

    @property
    def _unseen(self) -> Float[Array, ""]:
        """μ, half of a bound on the eigenvalues outside V."""
        rank, size = self.eigenvalues.size, self.few.shape[1]
        if rank == size:
            return jnp.where(self.active == rank, 0.0, self._least / 2)
        return self._least / 2

    @property
    def _least(self) -> Float[Array, ""]:
        return jnp.maximum(self.eigenvalues[self.active - 1], 0.0)

    def inverse(
        self, c: Float[Array, ""]
    ) -> Callable[[Float[Array, " n"]], Float[Array, " n"]]:
        """An approximate inverse of I + cH:

            (1 + cμ)⁻¹ (I - VᵀV) + Vᵀ (I + cΛ)⁻¹ V

        where the eigenvalues outside V lie between zero and 2μ. The iteration
        x ← x + M⁻¹r then contracts by cμ/(1 + cμ) < 1, however stiff the rest is.
        """
        rest = 1 / (1 + c * self._unseen)
        # Where curvature is so negative that I + cH is nearly singular, the step is too
        # long to be accepted; the floor keeps everything finite until it is shortened.
        top = 1 / jnp.maximum(1 + c * self.eigenvalues, 0.2) - rest
        top, few = top.astype(jnp.float32), self.few.shape[0]

        def along_few(r: Float32[Array, " n"]) -> Float32[Array, " n"]:
            return (top[:few] * (self.few @ r)) @ self.few

        def along_all(r: Float32[Array, " n"]) -> Float32[Array, " n"]:
            return along_few(r) + (top[few:] * (self.further @ r)) @ self.further

        def apply(r: Float[Array, " n"]) -> Float[Array, " n"]:
            single = r.astype(jnp.float32)
            if self.further.shape[0] == 0:
                part = along_few(single)
            else:
                part = jax.lax.cond(self.active <= few, along_few, along_all, single)
            return rest * r + part.astype(r.dtype)

        return apply

    def fitted(self, c: Float[Array, ""]) -> "Curvature":
        """This curvature with as many active pairs as matter to a step of coefficient
        `c`."""
        rank = self.eigenvalues.size
        more = c * self._least > STIFF
        before = self.eigenvalues[jnp.maximum(self.active - BLOCK - 1, 0)]
        fewer = (c * before < SLACK) & (self.active > BLOCK)
        change = BLOCK * (more.astype(jnp.int32) - fewer.astype(jnp.int32))
        active = jnp.clip(self.active + change, min(BLOCK, rank), rank)
        kept = jnp.arange(rank) < active
        return Curvature.of(
            jnp.where(kept[:, None], self.V, jnp.float32(0.0)),
            jnp.where(kept, self.eigenvalues, 0.0),
            active,
        )

    def followed(self, products: HessianProducts) -> "Curvature":
        """The eigenpairs at another point, whose Hessian is given by its `products`.
        This takes one product per pair."""
        rank, few = self.eigenvalues.size, self.few.shape[0]
        active = jnp.arange(rank) < self.active
        V = self.V.astype(self.eigenvalues.dtype)
        empty = active & (jnp.einsum("ij,ij->i", V, V) < 0.5)
        V = jax.lax.cond(jnp.any(empty), _filled, lambda V, _: V, V, empty)
        W = products(V, self.active)

        def with_rows(
            count: int,
        ) -> tuple[Float32[Array, "rank n"], Float[Array, " rank"]]:
            V_new, eigenvalues = _nystrom(V[:count], W[:count], active[:count])
            more = rank - count
            return jnp.pad(V_new, ((0, more), (0, 0))), jnp.pad(eigenvalues, (0, more))

        if rank <= few:
            V_new, eigenvalues = with_rows(rank)
        else:
            V_new, eigenvalues = jax.lax.cond(
                self.active <= few, lambda: with_rows(few), lambda: with_rows(rank)
            )
        return Curvature.of(V_new, eigenvalues, self.active)


def _nystrom(
    V: Float[Array, "rank n"], W: Float[Array, "rank n"], active: Bool[Array, " rank"]
) -> tuple[Float32[Array, "rank n"], Float[Array, " rank"]]:
    """The eigenvectors and eigenvalues of Nyström's approximation to H from some
    vectors V, Wᵀ(VWᵀ)⁻¹W with W = VH. With old eigenvectors for V it is as accurate as
    a Rayleigh–Ritz step after one more product. A shift makes it positive definite if
    it is not."""
    S = _product(W, V.T)
    s, Q = jnp.linalg.eigh(0.5 * (S + S.T), symmetrize_input=False)
    scale = jnp.max(jnp.abs(s))
    shift = 2 * jnp.maximum(-jnp.min(s), 0.0) + 1e-15 * scale
    s = s + shift
    # B Bᵀ has the eigenvalues of Nyström's approximation BᵀB.
    root = jnp.where(s > 1e-14 * scale, 1 / jnp.sqrt(jnp.abs(s) + 1e-300), 0.0)
    B = _product(root[:, None] * Q.T, W + shift * V)
    squares, U = jnp.linalg.eigh(_product(B, B.T), symmetrize_input=False)
    squares, U = squares[::-1], U[:, ::-1]
    sound = active & (squares > 1e-12 * squares[0])
    inverse = jnp.where(sound, 1 / jnp.sqrt(jnp.abs(squares) + 1e-300), 0.0)
    vectors = _product(inverse[:, None] * U.T, B).astype(jnp.float32)
    return vectors, jnp.where(sound, squares - shift, 0.0)


def _product(A: Float[Array, "i j"], B: Float[Array, "j k"]) -> Float[Array, "i k"]:
    """A B. Small matrices are multiplied row by row, in a loop that XLA's CPU compiler
    turns into one function; for the whole product it would call a library."""
    if A.size + B.size > SMALL_PRODUCT:
        return A @ B
    return jax.lax.map(lambda row: row @ B, A)


def _filled(
    V: Float[Array, "rank n"], empty: Bool[Array, " rank"]
) -> Float[Array, "rank n"]:
    """V with random vectors of length about one in its empty rows."""
    noise = jax.random.normal(jax.random.key(0), V.shape, V.dtype)
    return jnp.where(empty[:, None], noise / jnp.sqrt(V.shape[1]), V)
