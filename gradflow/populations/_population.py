"""What all populations have in common."""

import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar
from jaxtyping import Float

from .._core.types import AnyArray


class AbstractPopulation(eqx.Module):
    """A weighted list of contexts, each with the law of the token after it."""

    weights: AbstractVar[Float[np.ndarray, " contexts"]]
    """w_c, the probability of each context; they sum to one."""
    targets: AbstractVar[Float[np.ndarray, "contexts d"]]
    """T[c, ·], the law of the next token."""

    # A sample has a field of this name; to other populations it is no field at all.
    source: ClassVar[Any] = None
    """Of a sample, the population that it was drawn from, where that is known."""

    # So has one of contexts that hold few of all tokens.
    lists: ClassVar[Any] = None
    """Of some samples, contexts and targets as `ShortLists`, by which they are read."""

    @property
    def token_labels(self) -> tuple[str, ...] | None:
        """The labels of the tokens, if they have any."""
        return None

    @property
    def token_frequencies(self) -> Float[np.ndarray, " d"] | None:
        """The stationary probability of each token, where a chain defines it."""
        return None

    @property
    def baselines(self) -> dict[str, float]:
        """The exact losses of simple predictors, by name: the uniform one, and the best
        one that ignores the context."""
        unigram = np.asarray(self.weights) @ np.asarray(self.targets)
        seen = unigram[unigram > 0]
        return {
            "uniform": math.log(self.vocabulary),
            "best unigram": float(-seen @ np.log(seen)),
        }

    @property
    def size(self) -> int:
        """The number of contexts."""
        return self.weights.shape[0]

    @property
    def vocabulary(self) -> int:
        """The number of tokens, d."""
        if self.lists is not None:
            return self.lists.vocabulary
        return self.targets.shape[1]

    def cross_entropy(
        self, log_law: Float[AnyArray, "contexts d"]
    ) -> Float[AnyArray, ""]:
        """- Σ_c w_c Σ_y T[c, y] log_law[c, y]."""
        if self.lists is not None:
            return -self.lists.mean(log_law)
        return self.weights @ -jnp.sum(self.targets * log_law, axis=1)

    @property
    def entropy(self) -> Float[AnyArray, ""]:
        """Σ_c w_c H(T_c), below which no loss over these contexts can fall."""
        if self.lists is not None:
            shares = jnp.asarray(self.lists.shares)
            return -shares @ jnp.log(shares / self.weights[self.lists.rows])
        T = jnp.asarray(self.targets)
        return -jnp.sum(self.weights * jnp.sum(jax.scipy.special.xlogy(T, T), axis=1))
