"""Contexts without positions: their last token and how often each token occurs."""

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar
from jaxtyping import Array, Float, Int

from .._core import checks
from .._core.checks import Checked
from .._core.storage import storable
from .._core.types import AnyArray
from ..chains import MarkovChain
from ._lists import ShortLists
from ._population import AbstractPopulation
from ._windows import distinct, repetitions

LARGEST_MEMORY = 8 * 2**30
"""In bytes, what a sample may take while a gradient is computed."""


class Population(AbstractPopulation):
    """Contexts without positions: they matter through their last token and their counts
    only."""

    chain: AbstractVar[MarkovChain]
    """The chain the contexts are drawn from, or, for those of a text, compared with:
    its labels name the tokens and its stationary law says how frequent they are."""
    queries: AbstractVar[Int[np.ndarray, " contexts"]]
    """i_c, the last token of each context."""
    log_multiplicities: AbstractVar[Float[np.ndarray, "contexts d"]]
    """log n[c, j], how often token j occurs (up to a factor); -inf for never."""

    @property
    def token_labels(self) -> tuple[str, ...]:
        return self.chain.labels

    @property
    def token_frequencies(self) -> Float[np.ndarray, " d"]:
        return self.chain.stationary

    @abstractmethod
    def query_rows(
        self, table: Float[AnyArray, "d k"]
    ) -> Float[AnyArray, "contexts k"]:
        """`table[queries]`, in the way that is cheapest to differentiate."""

    def attention(
        self, scores: Float[AnyArray, "d d"]
    ) -> Float[AnyArray, "contexts d"]:
        """a[c, j] ∝ n[c, j] exp(scores[i_c, j]), which sums to one over j."""
        if self.lists is not None:
            return self.lists.attention(scores, self.queries)
        rows = self.query_rows(scores)
        return jax.nn.softmax(rows + self.log_multiplicities, axis=-1)

    def mean_by_query(
        self, values: Float[AnyArray, "contexts k"]
    ) -> Float[AnyArray, "d k"]:
        """The mean of `values` over the contexts that end in each token."""
        sums = self._sum_by_query(jnp.asarray(self.weights)[:, None] * values)
        # A token in which no context ends has no mean; zero rather than NaN.
        weights = self.query_weights[:, None]
        return jnp.where(weights > 0, sums / jnp.where(weights > 0, weights, 1.0), 0.0)

    @property
    def query_weights(self) -> Float[AnyArray, " d"]:
        """The probability that a context ends in each token."""
        return self._sum_by_query(jnp.asarray(self.weights)[:, None])[:, 0]

    def _sum_by_query(self, values: Float[Array, "contexts k"]) -> Float[Array, "d k"]:
        """Over the contexts that end in each token: the transpose of `query_rows`."""
        table = jax.ShapeDtypeStruct((self.vocabulary, values.shape[1]), values.dtype)
        (sums,) = jax.linear_transpose(self.query_rows, table)(values)
        return sums


@storable
class InfiniteContext(Population):
    """Contexts of infinite length: one for each last token i, with w_i = π_i,
    multiplicities n = π and target law P_i."""

    chain: MarkovChain
    weights: Float[np.ndarray, " d"]
    queries: Int[np.ndarray, " d"]
    log_multiplicities: Float[np.ndarray, "d d"]
    targets: Float[np.ndarray, "d d"]

    def __init__(self, chain: Checked[MarkovChain]):
        _check_chain(chain)
        d = chain.size
        self.chain = chain
        self.weights = chain.stationary
        self.queries = np.arange(d)
        self.log_multiplicities = np.tile(np.log(chain.stationary), (d, 1))
        self.targets = chain.transition

    def query_rows(
        self, table: Float[AnyArray, "d k"]
    ) -> Float[AnyArray, "contexts k"]:
        return table  # context c is the one that ends in token c

    def stored_arguments(self) -> dict[str, Any]:
        return {"chain": self.chain}


@storable
class FiniteContext(Population):
    """Contexts of finite length, exactly: every (last token, counts) that the chain
    can produce, with its probability.

    The probabilities come from dynamic programming along the chain,

        p_{t+1}(j, n + e_j) = Σ_i p_t(i, n) P_ij,

    so their number is d·C(s+d-2, d-1) for length s instead of the dˢ sequences.
    """

    chain: MarkovChain
    weights: Float[np.ndarray, " contexts"]
    queries: Int[np.ndarray, " contexts"]
    log_multiplicities: Float[np.ndarray, "contexts d"]
    targets: Float[np.ndarray, "contexts d"]
    length: int = eqx.field(static=True)
    positions: Literal["last", "all"] = eqx.field(static=True)
    start: Float[np.ndarray, " d"]
    """The law of the first token."""
    max_contexts: int = eqx.field(static=True)

    def __init__(
        self,
        chain: Checked[MarkovChain],
        length: Checked[int],
        *,
        positions: Checked[Literal["last", "all"]] = "last",
        start: Any = "stationary",
        max_contexts: Checked[int] = 4_000_000,
    ):
        """**Arguments:**

        - `chain`: a [`MarkovChain`][].
        - `length`: the number s of tokens in a context.
        - `positions`: `"last"` predicts the token after s tokens; `"all"` averages
            over predictions after 1, 2, …, s tokens, as in language-model training.
        - `start`: the law of the first token: `"stationary"`, `"uniform"` or an array.
        - `max_contexts`: refuse to build a longer list of contexts than this.
        """
        _check_chain(chain)
        length = checks.whole_number("length", length)
        max_contexts = checks.whole_number("max_contexts", max_contexts)
        if positions not in ("last", "all"):
            raise ValueError(f"`positions` must be 'last' or 'all', got {positions!r}.")
        d = chain.size
        law = start_law(start, chain)
        lengths = range(1, length + 1) if positions == "all" else (length,)
        count = sum(d * math.comb(s + d - 2, d - 1) for s in lengths)
        if count > max_contexts:
            raise ValueError(
                f"`length` = {length} with {d} tokens makes {count:,} contexts, about "
                f"{count * _bytes_per_context(d) / 2**30:,.1f} GiB while a gradient is "
                f"computed; the limit is {max_contexts:,} contexts (raise it with "
                "`max_contexts`, or use InfiniteContext)."
            )
        tables = _context_tables(chain.transition, law, length)
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
        self.start = law
        self.max_contexts = max_contexts

    def query_rows(
        self, table: Float[AnyArray, "d k"]
    ) -> Float[AnyArray, "contexts k"]:
        # d is small where all contexts can be listed, and the transpose of a product
        # with one-hot rows is a product too, where that of indexing is a serial
        # scatter.
        return jax.nn.one_hot(self.queries, self.vocabulary, dtype=table.dtype) @ table

    def stored_arguments(self) -> dict[str, Any]:
        return {
            "chain": self.chain,
            "length": self.length,
            "positions": self.positions,
            "start": self.start,
            "max_contexts": self.max_contexts,
        }


@storable
class SampledContext(Population):
    """The contexts of a length that occur in sequences of tokens, with what really came
    next: no Markov assumption.

    Contexts with the same last token and the same counts are one: w_c is how often it
    occurs and T[c, ·] how often each token came next. So the loss is the mean over the
    examples, to the letter, and its flow that of training on them without noise.
    """

    chain: MarkovChain
    weights: Float[np.ndarray, " contexts"]
    queries: Int[np.ndarray, " contexts"]
    lists: ShortLists  # pyright: ignore[reportIncompatibleVariableOverride]
    length: int = eqx.field(static=True)
    examples: float
    """How many contexts with their next token were seen, equal ones too."""
    max_contexts: int | None = eqx.field(static=True)

    def __init__(
        self,
        chain: Checked[MarkovChain],
        sequences: Any,
        length: Checked[int],
        *,
        examples: Checked[int | None] = None,
        seed: Checked[int] = 0,
        counts: Any = None,
        max_contexts: Checked[int | None] = None,
    ):
        """**Arguments:**

        - `chain`: what the contexts are compared with, as `MarkovChain.from_tokens`
            makes it of the same tokens. The loss does not see it; it names the tokens,
            and observables such as `alignment` refer to its stationary law.
        - `sequences`: tokens, numbered as in `chain`: one sequence, or a list of
            several, or an array with one in each row. A context does not reach from one
            sequence into the next.
        - `length`: the number s of tokens in a context.
        - `examples`: draw so many places in the sequences, none twice; by default all.
        - `seed`: of that draw.
        - `counts`: how often each sequence is seen, by default once.
        - `max_contexts`: refuse to build a longer list of contexts than this; by
            default what takes 8 GiB while a gradient is computed.
        """
        _check_chain(chain)
        length = checks.whole_number("length", length)
        seed = checks.whole_number("seed", seed, least=0)
        if max_contexts is not None:
            max_contexts = checks.whole_number("max_contexts", max_contexts)
        d = chain.size
        windows, often = _windows(sequences, length, counts, examples, seed)
        if windows.max() >= d:
            raise ValueError(
                f"`sequences` must hold tokens of `chain`, which has {d}, got "
                f"{windows.max()}."
            )
        limit = _most_contexts(d, max_contexts)
        # Merging millions takes long: a part may tell that they are too many.
        if len(windows) > 2 * limit:
            _refuse_many(len(_merged(windows[: 2 * limit])[0]), d, limit)
        contexts, row = _merged(windows)
        _refuse_many(len(contexts), d, limit)
        totals = np.bincount(row, often)
        self.chain = chain
        self.weights = totals / totals.sum()
        self.queries = contexts[:, 0].astype(np.int64)
        self.lists = ShortLists.of(contexts, row, windows[:, -1], often, d)
        self.length = length
        self.examples = float(totals.sum())
        self.max_contexts = max_contexts

    def query_rows(
        self, table: Float[AnyArray, "d k"]
    ) -> Float[AnyArray, "contexts k"]:
        # Contexts are sorted by their last token.
        return (
            jnp.asarray(table)
            .at[self.queries]
            .get(indices_are_sorted=True, mode="promise_in_bounds")
        )

    @property
    def log_multiplicities(self) -> Float[np.ndarray, "contexts d"]:
        return self.lists.log_multiplicities

    @property
    def targets(self) -> Float[np.ndarray, "contexts d"]:
        return self.lists.targets(self.weights)

    def stored_arguments(self) -> dict[str, Any]:
        lists = self.lists
        counts = np.rint(np.exp(lists.log_counts)).astype(np.int64)
        counts -= lists.keys == self.queries[:, None]
        # Each context has s-1 tokens beside the query.
        before = lists.keys.ravel().repeat(np.maximum(counts, 0).ravel())
        before = before.reshape(self.size, self.length - 1)
        return {
            "chain": self.chain,
            "sequences": np.column_stack(
                [before[lists.rows], self.queries[lists.rows], lists.tokens]
            ),
            "length": self.length,
            "counts": self.examples * lists.shares,
            "max_contexts": self.max_contexts,
        }


def _merged(
    windows: Int[np.ndarray, "examples tokens"],
) -> tuple[Int[np.ndarray, "contexts length"], Int[np.ndarray, " examples"]]:
    """The contexts that differ, the last token of each first, and which of them each
    window has. What came next is the window's last token, the one before it the query;
    the order of all others is of no account."""
    key = np.column_stack([windows[:, -2], np.sort(windows[:, :-2], axis=1)])
    return distinct(key)


def _windows(
    sequences: Any, length: int, counts: Any, examples: Any, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Each place of `length` tokens and one after them, and how often it is seen."""
    pieces = checks.token_sequences("sequences", sequences)
    often = repetitions(counts, len(pieces))
    sizes = np.array([max(len(piece) - length, 0) for piece in pieces])
    if not sizes.any():
        longest = max(len(piece) for piece in pieces)
        raise ValueError(
            f"`sequences` must hold {length} tokens and one after them for `length` = "
            f"{length}, got at most {longest}."
        )
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = np.concatenate(
        [
            end - len(piece) + np.arange(n)
            for piece, end, n in zip(pieces, ends, sizes, strict=True)
        ]
    )
    often = np.repeat(often, sizes)
    if examples is not None:
        examples = checks.whole_number("examples", examples, most=len(starts))
        rng = np.random.default_rng(seed)
        chosen = np.sort(rng.choice(len(starts), examples, replace=False))
        starts, often = starts[chosen], often[chosen]
    tokens = np.concatenate(pieces)
    whole = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
    return whole[starts], often


def _most_contexts(d: int, most: int | None) -> int:
    return LARGEST_MEMORY // _bytes_per_context(d) if most is None else most


def _refuse_many(size: int, d: int, limit: int) -> None:
    if size > limit:
        raise ValueError(
            f"`sequences` hold at least {size:,} distinct contexts, about "
            f"{size * _bytes_per_context(d) / 2**30:,.1f} GiB while a gradient is "
            f"computed; the limit is {limit:,} contexts (draw fewer `examples`, or "
            "raise `max_contexts`)."
        )


def _check_chain(chain: Any) -> None:
    if not isinstance(chain, MarkovChain):
        raise ValueError(
            f"`chain` must be a gradflow.MarkovChain, got {type(chain).__name__}."
        )


def start_law(start: Any, chain: MarkovChain) -> np.ndarray:
    """The law of the first token that `start` names or is."""
    if isinstance(start, str):
        if start == "stationary":
            return chain.stationary
        if start == "uniform":
            return np.full(chain.size, 1 / chain.size)
        raise ValueError(
            f"`start` must be 'stationary', 'uniform' or a law, got {start!r}."
        )
    return checks.law("start", start, size=chain.size)


def _bytes_per_context(d: int) -> int:
    """Two stored arrays and about eight of the same shape in a gradient."""
    return 8 * (10 * d + 2)


def _context_tables(
    P: np.ndarray, start: np.ndarray, length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For s = 1..length, the count vectors n (rows) that sum to s and the
    probabilities p[n, i] that a context of s tokens has these counts and ends in i."""
    d = P.shape[0]
    radix = length + 1
    if radix**d >= 2**63:
        raise ValueError(
            f"`length` = {length} with {d} tokens is out of reach: counts no longer "
            "fit into one 64-bit key."
        )
    # One integer names a count vector: Σ_j n_j radix^j.
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
