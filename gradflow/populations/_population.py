"""What all populations have in common."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar
from jaxtyping import Float

from .._types import AnyArray


class AbstractPopulation(eqx.Module):
    """A weighted list of contexts, each with the law of the token after it."""

    weights: AbstractVar[Float[np.ndarray, " contexts"]]
    """w_c, the probability of each context; they sum to one."""
    targets: AbstractVar[Float[np.ndarray, "contexts d"]]
    """T[c, ·], the law of the next token."""

    # A sample has a field of this name; to other populations it is no field at all.
    source: ClassVar[Any] = None
    """Of a sample, the population that it was drawn from, where that is known."""

    @property
    def size(self) -> int:
        """The number of contexts."""
        return self.weights.shape[0]

    @property
    def vocabulary(self) -> int:
        """The number of tokens, d."""
        return self.targets.shape[1]

    @property
    def entropy(self) -> Float[AnyArray, ""]:
        """Σ_c w_c H(T_c), below which no loss over these contexts can fall."""
        T = jnp.asarray(self.targets)
        return -jnp.sum(self.weights * jnp.sum(jax.scipy.special.xlogy(T, T), axis=1))
