"""Contexts of which each holds few of all tokens, as short lists."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from .._core.types import AnyArray


class ShortLists(eqx.Module):
    """The same contexts and targets as in tables over all tokens, of which almost all
    entries would be zero."""

    keys: Int[np.ndarray, "contexts s"]
    """The tokens of each context, each once; a short list is filled up with zeros."""
    log_counts: Float[np.ndarray, "contexts s"]
    """How often each occurs; -inf where the list is filled up."""
    rows: Int[np.ndarray, " seen"]
    """A context,"""
    tokens: Int[np.ndarray, " seen"]
    """a token that came next,"""
    shares: Float[np.ndarray, " seen"]
    """and the probability w_c T[c, y] of both."""
    vocabulary: int = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        contexts: Int[np.ndarray, "contexts length"],
        rows: Int[np.ndarray, " examples"],
        following: Int[np.ndarray, " examples"],
        often: Float[np.ndarray, " examples"],
        vocabulary: int,
    ) -> "ShortLists":
        """From the tokens of each context, in any order, and examples: which context,
        what followed, and how often that was seen."""
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
        """softmax over what occurs in each context, zero elsewhere."""
        contexts = np.arange(len(queries))[:, None]
        here = jnp.asarray(scores)[queries[:, None], self.keys] + self.log_counts
        table = jnp.zeros((len(queries), self.vocabulary), here.dtype)
        # What fills a list up adds zero to token 0.
        return table.at[contexts, self.keys].add(jax.nn.softmax(here, axis=-1))

    def mean(self, values: Float[AnyArray, "contexts d"]) -> Float[AnyArray, ""]:
        """Σ_c w_c Σ_y T[c, y] values[c, y]."""
        return jnp.asarray(self.shares) @ jnp.asarray(values)[self.rows, self.tokens]

    @property
    def log_multiplicities(self) -> Float[np.ndarray, "contexts d"]:
        table = np.full((len(self.keys), self.vocabulary), -np.inf)
        where = np.isfinite(self.log_counts)
        table[np.nonzero(where)[0], self.keys[where]] = self.log_counts[where]
        return table

    def targets(
        self, weights: Float[np.ndarray, " contexts"]
    ) -> Float[np.ndarray, "contexts d"]:
        table = np.zeros((len(self.keys), self.vocabulary))
        table[self.rows, self.tokens] = self.shares / weights[self.rows]
        return table
