"""The interface through which models and losses read every population."""

import math
from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar
from jaxtyping import Float

from .._core.types import AnyArray


class AbstractPopulation(eqx.Module):
    """A weighted list of contexts c, each with the distribution T[c, ·] of the token
    after it."""

    weights: AbstractVar[Float[np.ndarray, " contexts"]]
    """w_c, the probability of each context; they sum to one."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """The number of tokens, d."""

    @property
    @abstractmethod
    def unigram(self) -> Float[np.ndarray, " d"]:
        """Σ_c w_c T[c, ·], the distribution of the next token over all contexts."""

    @abstractmethod
    def cross_entropy(
        self, log_probabilities: Float[AnyArray, "contexts d"]
    ) -> Float[AnyArray, ""]:
        """- Σ_c w_c Σ_y T[c, y] log_probabilities[c, y]."""

    @property
    @abstractmethod
    def entropy(self) -> Float[AnyArray, ""]:
        """Σ_c w_c H(T_c), a lower bound of every loss over these contexts."""

    @property
    def size(self) -> int:
        """The number of contexts."""
        return self.weights.shape[0]

    @property
    def sampled_from(self) -> "AbstractPopulation | None":
        """The population that this one is a sample of, if it is known."""
        return None

    @property
    def token_labels(self) -> tuple[str, ...] | None:
        """The labels of the tokens, if they have any."""
        return None

    @property
    def token_frequencies(self) -> Float[np.ndarray, " d"] | None:
        """The stationary probability of each token, if a chain defines it."""
        return None

    @property
    def baselines(self) -> dict[str, float]:
        """The exact losses of simple predictors, by name: the uniform one, and the best
        one that ignores the context."""
        unigram = self.unigram
        seen = unigram[unigram > 0]
        return {
            "uniform": math.log(self.vocabulary),
            "best unigram": float(-seen @ np.log(seen)),
        }


class AbstractDensePopulation(AbstractPopulation):
    """A population whose targets are stored as one table over all tokens."""

    targets: AbstractVar[Float[np.ndarray, "contexts d"]]
    """T[c, ·], the distribution of the next token."""

    @property
    def vocabulary(self) -> int:
        return self.targets.shape[1]

    @property
    def unigram(self) -> Float[np.ndarray, " d"]:
        return np.asarray(self.weights) @ np.asarray(self.targets)

    def cross_entropy(
        self, log_probabilities: Float[AnyArray, "contexts d"]
    ) -> Float[AnyArray, ""]:
        return self.weights @ -jnp.sum(self.targets * log_probabilities, axis=1)

    @property
    def entropy(self) -> Float[AnyArray, ""]:
        T = jnp.asarray(self.targets)
        return -jnp.sum(self.weights * jnp.sum(jax.scipy.special.xlogy(T, T), axis=1))
