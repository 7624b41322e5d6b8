"""Contexts without positions: their last token and how often each token occurs."""

from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar
from jaxtyping import Array, Float, Int

from .._core import checks
from .._core.checks import Checked
from .._core.file_format import storable
from .._core.types import AnyArray
from ..chains import MarkovChain
from ._population import AbstractDensePopulation, AbstractPopulation


class AbstractUnorderedPopulation(AbstractPopulation):
    """Contexts without positions: a model sees only the last token i_c of a context and
    the number n[c, j] of times that each token j occurs in it."""

    chain: AbstractVar[MarkovChain]
    """The chain that the contexts are drawn from or, for contexts of a text, compared
    with. It names the tokens, and its stationary distribution says how frequent they
    are."""
    queries: AbstractVar[Int[np.ndarray, " contexts"]]
    """i_c, the last token of each context."""

    @abstractmethod
    def query_rows(
        self, table: Float[AnyArray, "d k"]
    ) -> Float[AnyArray, "contexts k"]:
        """`table[queries]`, in the form that is cheapest to differentiate."""

    @abstractmethod
    def attention(
        self, scores: Float[AnyArray, "d d"]
    ) -> Float[AnyArray, "contexts d"]:
        """a[c, j] ∝ n[c, j] exp(scores[i_c, j]), which sums to one over j."""

    @abstractmethod
    def _pairs(
        self,
    ) -> tuple[
        Int[np.ndarray, " pairs"],
        Int[np.ndarray, " pairs"],
        Float[np.ndarray, " pairs"],
    ]:
        """The pairs of last token and next token that occur, and their probabilities
        Σ_{c: i_c = i} w_c T[c, y]."""

    @property
    def token_labels(self) -> tuple[str, ...]:
        return self.chain.labels

    @property
    def token_frequencies(self) -> Float[np.ndarray, " d"]:
        return self.chain.stationary

    @property
    def baselines(self) -> dict[str, float]:
        """The exact losses of simple predictors, by name: the uniform one, the best one
        that ignores the context, and the best one that sees only the last token."""
        queries, _, shares = self._pairs()
        totals = np.bincount(queries, shares)[queries]
        last = float(-shares @ np.log(shares / totals))
        return super().baselines | {"best from the last token": last}

    def mean_by_query(
        self, values: Float[AnyArray, "contexts k"]
    ) -> Float[AnyArray, "d k"]:
        """The mean of `values` over the contexts that end in each token."""
        sums = self._sum_by_query(jnp.asarray(self.weights)[:, None] * values)
        # The mean over no contexts is defined as zero rather than NaN.
        weights = self.query_weights[:, None]
        return jnp.where(weights > 0, sums / jnp.where(weights > 0, weights, 1.0), 0.0)

    @property
    def query_weights(self) -> Float[AnyArray, " d"]:
        """The probability that a context ends in each token."""
        return self._sum_by_query(jnp.asarray(self.weights)[:, None])[:, 0]

    def _sum_by_query(self, values: Float[Array, "contexts k"]) -> Float[Array, "d k"]:
        """The sum of `values` over the contexts that end in each token: the transpose
        of `query_rows`."""
        table = jax.ShapeDtypeStruct((self.vocabulary, values.shape[1]), values.dtype)
        (sums,) = jax.linear_transpose(self.query_rows, table)(values)
        return sums


class AbstractDenseUnorderedPopulation(
    AbstractUnorderedPopulation, AbstractDensePopulation
):
    """Contexts without positions whose counts and targets are tables over all tokens.

    A population of your own needs only fields for these arrays and `query_rows`.
    """

    log_multiplicities: AbstractVar[Float[np.ndarray, "contexts d"]]
    """log n[c, j], where n may have any factor; -inf for tokens that do not occur."""

    def attention(
        self, scores: Float[AnyArray, "d d"]
    ) -> Float[AnyArray, "contexts d"]:
        rows = self.query_rows(scores)
        return jax.nn.softmax(rows + self.log_multiplicities, axis=-1)

    def _pairs(
        self,
    ) -> tuple[
        Int[np.ndarray, " pairs"],
        Int[np.ndarray, " pairs"],
        Float[np.ndarray, " pairs"],
    ]:
        weights, d = np.asarray(self.weights), self.vocabulary
        # Column by column, so that no second array of the targets' size is needed.
        columns = [
            np.bincount(self.queries, weights * column, minlength=d)
            for column in np.asarray(self.targets).T
        ]
        joint = np.stack(columns, axis=1)
        queries, tokens = np.nonzero(joint)
        return queries, tokens, joint[queries, tokens]


@storable
class InfiniteContext(AbstractDenseUnorderedPopulation):
    """Contexts of infinite length: one for each last token i, with weight w_i = π_i,
    multiplicities n = π and target distribution P_i."""

    chain: MarkovChain
    weights: Float[np.ndarray, " d"]
    queries: Int[np.ndarray, " d"]
    log_multiplicities: Float[np.ndarray, "d d"]
    targets: Float[np.ndarray, "d d"]

    def __init__(self, chain: Checked[MarkovChain]):
        """**Arguments:**

        - `chain`: a [`MarkovChain`][].
        """
        check_chain(chain)
        d = chain.size
        self.chain = chain
        self.weights = chain.stationary
        self.queries = np.arange(d)
        self.log_multiplicities = np.tile(np.log(chain.stationary), (d, 1))
        self.targets = chain.transition

    def query_rows(
        self, table: Float[AnyArray, "d k"]
    ) -> Float[AnyArray, "contexts k"]:
        return table  # context c ends in token c

    def stored_arguments(self) -> dict[str, Any]:
        return {"chain": self.chain}


def check_chain(chain: object) -> None:
    """Raise a `ValueError` if `chain` is not a `MarkovChain`."""
    if not isinstance(chain, MarkovChain):
        raise ValueError(
            f"`chain` must be a gradflow.MarkovChain, got {type(chain).__name__}."
        )


def start_law(start: object, chain: MarkovChain) -> Float[np.ndarray, " d"]:
    """The distribution of the first token that `start` names or is."""
    if isinstance(start, str):
        if start == "stationary":
            return chain.stationary
        if start == "uniform":
            return np.full(chain.size, 1 / chain.size)
        raise ValueError(
            "`start` must be 'stationary', 'uniform' or a probability distribution, "
            f"got {start!r}."
        )
    return checks.law("start", start, size=chain.size)


def bytes_per_context(d: int) -> int:
    """The memory that one context takes while a gradient is computed: two stored rows
    of d numbers and about eight temporary ones."""
    return 8 * (10 * d + 2)
