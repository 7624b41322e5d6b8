"""All contexts of finite length that a chain can produce."""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
from jaxtyping import ArrayLike, Float, Int

from .._core import checks, machine
from .._core.checks import Checked
from .._core.file_format import storable
from .._core.types import AnyArray
from ..chains import MarkovChain
from ._unordered import (
    AbstractDenseUnorderedPopulation,
    bytes_per_context,
    check_chain,
    start_law,
)


@storable
class FiniteContext(AbstractDenseUnorderedPopulation):
    """Contexts of finite length, exactly: every pair of a last token and counts that
    the chain can produce, with its probability.

    The probabilities come from dynamic programming along the chain,

        p_{t+1}(j, n + e_j) = Σ_i p_t(i, n) P_ij,

    so that there are d·C(s+d-2, d-1) contexts of length s instead of dˢ sequences.
    """

    chain: MarkovChain
    weights: Float[np.ndarray, " contexts"]
    queries: Int[np.ndarray, " contexts"]
    log_multiplicities: Float[np.ndarray, "contexts d"]
    targets: Float[np.ndarray, "contexts d"]
    length: int = eqx.field(static=True)
    positions: Literal["last", "all"] = eqx.field(static=True)
    start: Float[np.ndarray, " d"]
    """The distribution of the first token."""
    max_contexts: int = eqx.field(static=True)

    def __init__(
        self,
        chain: Checked[MarkovChain],
        length: Checked[int],
        *,
        positions: Checked[Literal["last", "all"]] = "last",
        start: Checked[Literal["stationary", "uniform"] | ArrayLike] = "stationary",
        max_contexts: Checked[int] = 4_000_000,
    ):
        """**Arguments:**

        - `chain`: a [`MarkovChain`][].
        - `length`: the number s of tokens in a context.
        - `positions`: `"last"` predicts the token after s tokens; `"all"` averages
            over predictions after 1, 2, …, s tokens, as in language-model training.
        - `start`: the distribution of the first token: `"stationary"`, `"uniform"` or
            an array.
        - `max_contexts`: the largest number of contexts to build; more are refused.
        """
        check_chain(chain)
        length = checks.whole_number("length", length)
        max_contexts = checks.whole_number("max_contexts", max_contexts)
        if positions not in ("last", "all"):
            raise ValueError(f"`positions` must be 'last' or 'all', got {positions!r}.")
        d = chain.size
        first = start_law(start, chain)
        lengths = range(1, length + 1) if positions == "all" else (length,)
        _refuse_many(lengths, d, max_contexts)
        tables = _context_tables(chain.transition, first, length)
        kept = list(tables) if positions == "all" else list(deque(tables, maxlen=1))
        counts = np.concatenate([np.repeat(n, d, axis=0) for n, _ in kept])
        weights = np.concatenate([p.ravel() for _, p in kept]) / len(kept)
        queries = np.tile(np.arange(d), len(weights) // d)
        possible = weights > 0
        self.chain = chain
        self.weights = weights[possible]
        self.queries = queries[possible]
        with np.errstate(divide="ignore"):
            self.log_multiplicities = np.log(counts[possible])
        self.targets = chain.transition[self.queries]
        self.length = length
        self.positions = positions
        self.start = first
        self.max_contexts = max_contexts

    def query_rows(
        self, table: Float[AnyArray, "d k"]
    ) -> Float[AnyArray, "contexts k"]:
        # d is small where all contexts can be listed. The transpose of a product with
        # one-hot rows is a product too, while that of indexing is a serial scatter.
        return jax.nn.one_hot(self.queries, self.vocabulary, dtype=table.dtype) @ table

    def stored_arguments(self) -> dict[str, Any]:
        return {
            "chain": self.chain,
            "length": self.length,
            "positions": self.positions,
            "start": self.start,
            "max_contexts": self.max_contexts,
        }


def _refuse_many(lengths: range | tuple[int], d: int, limit: int) -> None:
    count = sum(d * math.comb(s + d - 2, d - 1) for s in lengths)
    needed = count * bytes_per_context(d)
    if count > limit:
        raise ValueError(
            f"`length` = {lengths[-1]} with {d} tokens makes {count:,} contexts, about "
            f"{machine.readable(needed)} while a gradient is computed; the limit is "
            f"{limit:,} contexts (raise it with `max_contexts`, or use "
            "InfiniteContext)."
        )
    machine.refuse_beyond(
        f"A gradient over the {count:,} contexts of `length` = {lengths[-1]}",
        needed,
        "choose a smaller `length`, or use InfiniteContext",
    )


def _context_tables(
    P: Float[np.ndarray, "d d"], start: Float[np.ndarray, " d"], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For s = 1, …, length: the count vectors n (rows) that sum to s, and the
    probabilities p[n, i] that a context of s tokens has these counts and ends in i."""
    d = P.shape[0]
    radix = length + 1
    if radix**d >= 2**63:
        raise ValueError(
            f"`length` = {length} with {d} tokens is too large: the counts do not fit "
            "into one 64-bit key."
        )
    # The integer Σ_j n_j radix^j stands for the count vector n.
    units = radix ** np.arange(d, dtype=np.int64)
    keys, probabilities = units, np.diag(start)
    for s in range(1, length + 1):
        yield keys[:, None] // units % radix, probabilities
        if s == length:
            return
        moved = probabilities @ P
        successors = (keys[:, None] + units).ravel()
        keys, place = np.unique(successors, return_inverse=True)
        probabilities = np.zeros((len(keys), d))
        # For a fixed last token j the successors n + e_j are distinct.
        probabilities[place.reshape(-1, d), np.arange(d)] = moved
