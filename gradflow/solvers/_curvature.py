"""The top of a Hessian's spectrum, followed along a flow on Hessian-vector products."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

BLOCK = 4
"""Eigenpairs are taken up and dropped in blocks of so many."""
STIFF, SLACK = 0.2, 0.02
"""An eigenvalue λ matters to a step of coefficient c where cλ exceeds `STIFF`; a block
below `SLACK` is dropped."""


class Curvature(eqx.Module):
    """H ≈ Vᵀ Λ V on the `active` leading eigenpairs, in decreasing order; further rows
    are zero, room to grow.

    V is in single precision: it is but a preconditioner, and the largest thing that a
    step moves through memory."""

    V: Float32[Array, "rank n"]
    eigenvalues: Float[Array, " rank"]
    active: Int[Array, ""]

    @staticmethod
    def unknown(size: int, rank: int) -> "Curvature":
        rank = min(rank, size)
        return Curvature(
            V=jnp.zeros((rank, size), jnp.float32),
            eigenvalues=jnp.zeros(rank),
            active=jnp.asarray(min(2 * BLOCK, rank), jnp.int32),
        )

    @property
    def _few(self) -> int:
        """Active pairs up to which only so many rows are looked at: those that are not
        active are zero, but take as long."""
        return max(2 * BLOCK, self.V.shape[0] // 3)

    @property
    def _unseen(self) -> Float[Array, ""]:
        """μ, half of a bound on the eigenvalues outside V."""
        if self.V.shape[0] == self.V.shape[1]:
            return jnp.where(self.active == self.V.shape[0], 0.0, self._least / 2)
        return self._least / 2

    @property
    def _least(self) -> Float[Array, ""]:
        return jnp.maximum(self.eigenvalues[self.active - 1], 0.0)

    def inverse(
        self, c: Float[Array, ""]
    ) -> Callable[[Float[Array, " n"]], Float[Array, " n"]]:
        """An approximate inverse of I + cH:

            (1 + cμ)⁻¹ (I - VᵀV) + Vᵀ (I + cΛ)⁻¹ V

        with eigenvalues outside V between -μ' and 2μ. The iteration x ← x + M⁻¹r then
        contracts by cμ/(1 + cμ) < 1, however stiff the rest is.
        """
        rest = 1 / (1 + c * self._unseen)
        # Where curvature is so negative that I + cH nears a singularity, the step is
        # too long to be accepted; the floor keeps all finite until it is shortened.
        top = 1 / jnp.maximum(1 + c * self.eigenvalues, 0.2) - rest

        def with_rows(count: int, r: Float[Array, " n"]) -> Float[Array, " n"]:
            V, factors = self.V[:count], top[:count].astype(jnp.float32)
            along = V @ r.astype(jnp.float32)
            return rest * r + ((factors * along) @ V).astype(r.dtype)

        rank, few = self.V.shape[0], self._few
        if rank <= few:
            return functools.partial(with_rows, rank)
        return lambda r: jax.lax.cond(
            self.active <= few,
            functools.partial(with_rows, few),
            functools.partial(with_rows, rank),
            r,
        )

    def fitted(self, c: Float[Array, ""]) -> "Curvature":
        """With more or fewer active pairs, as many as matter to a step."""
        rank = self.V.shape[0]
        more = c * self._least > STIFF
        before = self.eigenvalues[jnp.maximum(self.active - BLOCK - 1, 0)]
        fewer = (c * before < SLACK) & (self.active > BLOCK)
        change = BLOCK * (more.astype(jnp.int32) - fewer.astype(jnp.int32))
        active = jnp.clip(self.active + change, min(BLOCK, rank), rank)
        kept = jnp.arange(rank) < active
        return Curvature(
            jnp.where(kept[:, None], self.V, jnp.float32(0.0)),
            jnp.where(kept, self.eigenvalues, 0.0),
            active,
        )

    def followed(
        self,
        products: Callable[
            [Float[Array, "rank n"], Int[Array, ""]], Float[Array, "rank n"]
        ],
    ) -> "Curvature":
        """The eigenpairs at another point, where `products` multiplies the first so
        many vectors by the Hessian, by one product a pair.

        Nyström's approximation from the old eigenvectors, Wᵀ(VWᵀ)⁻¹W with W = VH, is
        as good as a Rayleigh–Ritz step after one more product. A shift makes it
        positive definite where it is not.
        """
        rank = self.V.shape[0]
        active = jnp.arange(rank) < self.active
        V = self.V.astype(self.eigenvalues.dtype)
        empty = active & (jnp.einsum("ij,ij->i", V, V) < 0.5)
        V = jax.lax.cond(jnp.any(empty), _filled, lambda V, _: V, V, empty)

        W = products(V, self.active)
        few = self._few
        if rank <= few:
            return self._nystrom(V, W)
        return jax.lax.cond(
            self.active <= few,
            lambda: self._leading(few)._nystrom(V[:few], W[:few])._padded(rank),
            lambda: self._nystrom(V, W),
        )

    def _nystrom(self, V: Float[Array, "rank n"], W: Float[Array, "rank n"]) -> Any:
        """The eigenpairs of Wᵀ(VWᵀ)⁻¹W."""
        active = jnp.arange(V.shape[0]) < self.active
        S = V @ W.T
        s, Q = jnp.linalg.eigh(0.5 * (S + S.T), symmetrize_input=False)
        scale = jnp.max(jnp.abs(s))
        shift = 2 * jnp.maximum(-jnp.min(s), 0.0) + 1e-15 * scale
        s = s + shift
        # B Bᵀ has the eigenvalues of Nyström's approximation BᵀB.
        root = jnp.where(s > 1e-14 * scale, 1 / jnp.sqrt(jnp.abs(s) + 1e-300), 0.0)
        B = (root[:, None] * Q.T) @ (W + shift * V)
        squares, U = jnp.linalg.eigh(B @ B.T, symmetrize_input=False)
        squares, U = squares[::-1], U[:, ::-1]
        sound = active & (squares > 1e-12 * squares[0])
        inverse = jnp.where(sound, 1 / jnp.sqrt(jnp.abs(squares) + 1e-300), 0.0)
        return Curvature(
            ((inverse[:, None] * U.T) @ B).astype(jnp.float32),
            jnp.where(sound, squares - shift, 0.0),
            self.active,
        )

    def _leading(self, rows: int) -> "Curvature":
        return Curvature(self.V[:rows], self.eigenvalues[:rows], self.active)

    def _padded(self, rank: int) -> "Curvature":
        more = rank - self.V.shape[0]
        return Curvature(
            jnp.pad(self.V, ((0, more), (0, 0))),
            jnp.pad(self.eigenvalues, (0, more)),
            self.active,
        )


def _filled(
    V: Float[Array, "rank n"], empty: Bool[Array, " rank"]
) -> Float[Array, "rank n"]:
    """With unit noise in the empty rows."""
    noise = jax.random.normal(jax.random.key(0), V.shape, V.dtype)
    return jnp.where(empty[:, None], noise / jnp.sqrt(V.shape[1]), V)
