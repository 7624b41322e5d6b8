"""The patterns that several heads learn, and the share of each head in them."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._core.types import AnyArray

PARALLEL = 1e-9
"""Columns whose directions differ by less belong to one pattern."""


class Patterns(eqx.Module):
    """Patterns G_j = A_j ⊗ α_j, whose sum is the target."""

    features: Float[AnyArray, "patterns features"]
    """A_j."""
    positions: Float[AnyArray, "patterns positions"]
    """α_j."""

    @staticmethod
    def of_columns(G: Float[np.ndarray, "features positions"]) -> "Patterns":
        """The patterns of a matrix: columns in one direction form a pattern, and
        columns of zeros belong to none. The strongest pattern comes first."""
        size = np.linalg.norm(G, axis=0)
        left = [i for i in range(len(size)) if size[i] > PARALLEL * size.max()]
        found = []
        while left:
            lead = left[0]
            unit = G[:, lead] / size[lead]
            apart = [np.linalg.norm(G[:, i] / size[i] - unit) for i in left]
            alike = [i for i, d in zip(left, apart, strict=True) if d < PARALLEL]
            weights = np.zeros(len(size))
            weights[alike] = size[alike]
            found.append((unit, weights))
            left = [i for i in left if i not in alike]
        found.sort(key=lambda pattern: -np.linalg.norm(pattern[1]))
        return Patterns(
            np.array([unit for unit, _ in found]).reshape(-1, G.shape[0]),
            np.array([weights for _, weights in found]).reshape(-1, G.shape[1]),
        )

    def shares(
        self,
        V: Float[AnyArray, "heads features"],
        s: Float[AnyArray, "heads positions"],
    ) -> Float[AnyArray, "heads patterns"]:
        """The contribution of each head to the coefficients of Ĝ = Σ_k V_k ⊗ s_k in the
        patterns, by orthogonal projection."""
        A, alpha = jnp.asarray(self.features), jnp.asarray(self.positions)
        inner = (A @ A.T) * (alpha @ alpha.T)
        return (V @ A.T) * (s @ alpha.T) @ jnp.linalg.pinv(inner, hermitian=True)
