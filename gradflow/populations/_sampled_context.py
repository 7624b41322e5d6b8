"""Contexts without positions that occur in sequences of tokens."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from .._core import checks, machine, seeds
from .._core.checks import Checked
from .._core.file_format import storable
from .._core.types import AnyArray, Seed
from ..chains import MarkovChain
from ._sampling import distinct, repetitions
from ._sparse import SparseContexts
from ._unordered import AbstractUnorderedPopulation, bytes_per_context, check_chain


@storable
class SampledContext(AbstractUnorderedPopulation):
    """The contexts of a given length in sequences of tokens, with the tokens that
    really came next: no Markov assumption is made.

    Contexts with the same last token and the same counts are merged: w_c is the share
    of the examples with this context, and T[c, ·] the frequencies of the next token
    after it. The loss is therefore exactly the mean over the examples, and its flow is
    that of full-batch training on them.
    """

    chain: MarkovChain
    weights: Float[np.ndarray, " contexts"]
    queries: Int[np.ndarray, " contexts"]
    contexts: SparseContexts
    """The counts and the targets. A context has few of all tokens, so that most entries
    of tables over all tokens would be zero."""
    length: int = eqx.field(static=True)
    examples: float
    """The number of contexts with their next token that were seen, with repetitions."""
    max_contexts: int | None = eqx.field(static=True)

    def __init__(
        self,
        chain: Checked[MarkovChain],
        sequences: Any,
        length: Checked[int],
        *,
        examples: Checked[int | None] = None,
        seed: Checked[Seed] = 0,
        counts: Any = None,
        max_contexts: Checked[int | None] = None,
    ):
        """**Arguments:**

        - `chain`: the chain to compare the contexts with, usually made from the same
            tokens by `MarkovChain.from_tokens`. The loss does not depend on it; it
            names the tokens, and observables such as `alignment` refer to its
            stationary distribution.
        - `sequences`: tokens, numbered as in `chain`: one sequence, a list of several,
            or an array with one in each row. Contexts do not extend from one sequence
            to the next.
        - `length`: the number s of tokens in a context.
        - `examples`: the number of places in the sequences to draw, without
            repetition; by default all places are used.
        - `seed`: an integer or a `jax.random.key` for that draw.
        - `counts`: how often each sequence is seen, by default once.
        - `max_contexts`: the largest number of distinct contexts; more are refused. By
            default, the number for which a gradient fits into the available memory.
        """
        check_chain(chain)
        length = checks.whole_number("length", length)
        generator = seeds.numpy_generator("seed", seed)
        if max_contexts is not None:
            max_contexts = checks.whole_number("max_contexts", max_contexts)
        d = chain.size
        windows, often = _windows(sequences, length, counts, examples, generator)
        if windows.max() >= d:
            raise ValueError(
                f"`sequences` must consist of tokens of `chain`, which has {d}, got "
                f"{windows.max()}."
            )
        # Merging millions of windows takes long, and a part of them may already be
        # too many.
        part = 2 * _most_contexts(d, max_contexts)
        if len(windows) > part:
            _refuse_many(len(_merged(windows[:part])[0]), d, max_contexts)
        contexts, row = _merged(windows)
        _refuse_many(len(contexts), d, max_contexts)
        totals = np.bincount(row, often)
        self.chain = chain
        self.weights = totals / totals.sum()
        self.queries = contexts[:, 0].astype(np.int64)
        self.contexts = SparseContexts.from_examples(
            contexts, row, windows[:, -1], often, d
        )
        self.length = length
        self.examples = float(totals.sum())
        self.max_contexts = max_contexts

    @property
    def vocabulary(self) -> int:
        return self.contexts.vocabulary

    @property
    def unigram(self) -> Float[np.ndarray, " d"]:
        seen = self.contexts
        return np.bincount(seen.tokens, seen.shares, minlength=seen.vocabulary)

    def cross_entropy(
        self, log_probabilities: Float[AnyArray, "contexts d"]
    ) -> Float[AnyArray, ""]:
        return -self.contexts.mean(log_probabilities)

    @property
    def entropy(self) -> Float[AnyArray, ""]:
        shares = jnp.asarray(self.contexts.shares)
        return -shares @ jnp.log(shares / self.weights[self.contexts.rows])

    def query_rows(
        self, table: Float[AnyArray, "d k"]
    ) -> Float[AnyArray, "contexts k"]:
        # Contexts are sorted by their last token.
        return (
            jnp.asarray(table)
            .at[self.queries]
            .get(indices_are_sorted=True, mode="promise_in_bounds")
        )

    def attention(
        self, scores: Float[AnyArray, "d d"]
    ) -> Float[AnyArray, "contexts d"]:
        return self.contexts.attention(scores, self.queries)

    def _pairs(
        self,
    ) -> tuple[
        Int[np.ndarray, " pairs"],
        Int[np.ndarray, " pairs"],
        Float[np.ndarray, " pairs"],
    ]:
        seen, d = self.contexts, self.vocabulary
        codes, which = np.unique(
            self.queries[seen.rows] * d + seen.tokens, return_inverse=True
        )
        return codes // d, codes % d, np.bincount(which, seen.shares)

    @property
    def log_multiplicities(self) -> Float[np.ndarray, "contexts d"]:
        """log n[c, j], the number of times that token j occurs; -inf for never. The
        table is built on every access."""
        return self.contexts.log_multiplicities

    @property
    def targets(self) -> Float[np.ndarray, "contexts d"]:
        """T[c, ·], the distribution of the next token. The table is built on every
        access."""
        return self.contexts.targets(self.weights)

    def stored_arguments(self) -> dict[str, Any]:
        seen = self.contexts
        counts = np.rint(np.exp(seen.log_counts)).astype(np.int64)
        counts -= seen.keys == self.queries[:, None]
        # Each context has s-1 tokens besides the query.
        before = seen.keys.ravel().repeat(np.maximum(counts, 0).ravel())
        before = before.reshape(self.size, self.length - 1)
        return {
            "chain": self.chain,
            "sequences": np.column_stack(
                [before[seen.rows], self.queries[seen.rows], seen.tokens]
            ),
            "length": self.length,
            "counts": self.examples * seen.shares,
            "max_contexts": self.max_contexts,
        }


def _merged(
    windows: Int[np.ndarray, "examples tokens"],
) -> tuple[Int[np.ndarray, "contexts length"], Int[np.ndarray, " examples"]]:
    """The distinct contexts, each with its last token first, and the context of each
    window. The last token of a window is the next token, the one before it the query;
    the order of all others does not matter."""
    key = np.column_stack([windows[:, -2], np.sort(windows[:, :-2], axis=1)])
    return distinct(key)


def _windows(
    sequences: object,
    length: int,
    counts: object,
    examples: object,
    generator: np.random.Generator,
) -> tuple[Int[np.ndarray, "examples tokens"], Float[np.ndarray, " examples"]]:
    """Each place of `length` tokens and one after them, and how often it is seen."""
    pieces = checks.token_sequences("sequences", sequences)
    often = repetitions(counts, len(pieces))
    sizes = np.array([max(len(piece) - length, 0) for piece in pieces])
    if not sizes.any():
        longest = max(len(piece) for piece in pieces)
        raise ValueError(
            f"`sequences` must have {length} tokens and one after them for `length` = "
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
        count = checks.whole_number("examples", examples, most=len(starts))
        chosen = np.sort(generator.choice(len(starts), count, replace=False))
        starts, often = starts[chosen], often[chosen]
    tokens = np.concatenate(pieces)
    whole = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
    return whole[starts], often


def _most_contexts(d: int, max_contexts: int | None) -> int:
    if max_contexts is not None:
        return max_contexts
    return max(machine.available_memory() // bytes_per_context(d), 1)


def _refuse_many(size: int, d: int, max_contexts: int | None) -> None:
    needed = size * bytes_per_context(d)
    if max_contexts is None:
        machine.refuse_beyond(
            f"A gradient over the {size:,} or more distinct contexts of `sequences`",
            needed,
            "draw fewer `examples`, or set `max_contexts` to go on all the same",
        )
    elif size > max_contexts:
        raise ValueError(
            f"`sequences` contain at least {size:,} distinct contexts, about "
            f"{machine.readable(needed)} while a gradient is computed; the limit is "
            f"{max_contexts:,} contexts (draw fewer `examples`, or raise "
            "`max_contexts`)."
        )
