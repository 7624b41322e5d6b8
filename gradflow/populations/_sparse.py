"""Contexts and targets in sparse form, for contexts with few of all tokens."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from .._core.types import AnyArray


class SparseContexts(eqx.Module):
    """The nonzero entries of two tables: how often each token occurs in each context,
    and how often each token follows it."""

    keys: Int[np.ndarray, "contexts s"]
    """The distinct tokens of each context; short rows are padded with token 0."""
    log_counts: Float[np.ndarray, "contexts s"]
    """How often each of them occurs, as a logarithm; -inf in the padding."""
    rows: Int[np.ndarray, " pairs"]
    """The context of each pair of a context c and a next token y that was seen."""
    tokens: Int[np.ndarray, " pairs"]
    """The next token of each pair."""
    shares: Float[np.ndarray, " pairs"]
    """The probability w_c T[c, y] of each pair."""
    vocabulary: int = eqx.field(static=True)
    """The number of tokens, d."""

    @classmethod
    def from_examples(
        cls,
        contexts: Int[np.ndarray, "contexts length"],
        rows: Int[np.ndarray, " examples"],
        following: Int[np.ndarray, " examples"],
        often: Float[np.ndarray, " examples"],
        vocabulary: int,
    ) -> "SparseContexts":
        """From the tokens of each context, in any order, and examples: the context of
        each, the token that followed, and how often this was seen."""
        tokens = np.sort(contexts, axis=1)
        size, length = tokens.shape
        new = np.ones(tokens.shape, bool)
        new[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
        place = np.cumsum(new, axis=1) - 1
        row = np.arange(size).repeat(length)
        width = int(place.max()) + 1
        counts = np.zeros((size, width))
        np.add.at(counts, (row, place.ravel()), 1.0)
        keys = np.zeros((size, width), np.int64)
        keys[row, place.ravel()] = tokens.ravel()
        with np.errstate(divide="ignore"):
            log_counts = np.log(counts)
        pairs, which = np.unique(rows * vocabulary + following, return_inverse=True)
        shares = np.bincount(which, often) / often.sum()
        return cls(
            keys,
            log_counts,
            pairs // vocabulary,
            pairs % vocabulary,
            shares,
            vocabulary,
        )

    def attention(
        self, scores: Float[AnyArray, "d d"], queries: Int[AnyArray, " contexts"]
    ) -> Float[AnyArray, "contexts d"]:
        """The softmax over the tokens of each context; zero for all other tokens."""
        contexts = np.arange(len(queries))[:, None]
        here = jnp.asarray(scores)[queries[:, None], self.keys] + self.log_counts
        table = jnp.zeros((len(queries), self.vocabulary), here.dtype)
        # The padding adds zero to token 0.
        return table.at[contexts, self.keys].add(jax.nn.softmax(here, axis=-1))

    def mean(self, values: Float[AnyArray, "contexts d"]) -> Float[AnyArray, ""]:
        """Σ_c w_c Σ_y T[c, y] values[c, y]."""
        return jnp.asarray(self.shares) @ jnp.asarray(values)[self.rows, self.tokens]

    @property
    def log_multiplicities(self) -> Float[np.ndarray, "contexts d"]:
        """The logarithms of the counts as a table over all tokens."""
        table = np.full((len(self.keys), self.vocabulary), -np.inf)
        where = np.isfinite(self.log_counts)
        table[np.nonzero(where)[0], self.keys[where]] = self.log_counts[where]
        return table

    def targets(
        self, weights: Float[np.ndarray, " contexts"]
    ) -> Float[np.ndarray, "contexts d"]:
        """T[c, y] as a table over all tokens."""
        table = np.zeros((len(self.keys), self.vocabulary))
        table[self.rows, self.tokens] = self.shares / weights[self.rows]
        return table
