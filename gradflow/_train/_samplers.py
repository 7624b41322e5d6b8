"""Samplers: batches of token sequences, drawn afresh for each training step.

A sampler draws batches inside compiled code, and its loss comes from a Transformer's
forward pass on the drawn tokens. It shares no code with the populations, which list
contexts with their probabilities, and therefore checks them.
"""

from abc import abstractmethod
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from .._core import checks
from .._core.checks import Checked
from .._core.compiled import jit
from ..chains import HighOrderChain, MarkovChain
from ..populations import start_law

LISTED = 2**16
"""The largest number of contexts for which sequences start from the exact stationary
distribution over their list."""
BANK_SEQUENCES, BANK_WINDOWS = 256, 64
"""For a chain with more contexts: the number of sequences, and of windows from each,
that the first window is drawn from."""
FORGOTTEN = 50
"""The number of steps, in units of its order, after which such a chain has forgotten
its start."""

Positions = Literal["last", "all"]


class AbstractSampler(eqx.Module):
    """Batches of token sequences."""

    vocabulary: AbstractVar[int]
    """d, the number of tokens."""
    length: AbstractVar[int]
    """s, the number of tokens in a context."""
    batch: AbstractVar[int]
    """How many sequences are drawn at once."""
    positions: AbstractVar[Positions]
    """Whether only the token after all s tokens is predicted, or the one after each
    position that the model can predict from."""

    @abstractmethod
    def draw(self, key: PRNGKeyArray) -> Int[Array, "batch tokens"]:
        """Draw sequences of s tokens and the one that follows."""

    def loss(self, model: Any, params: PyTree, key: PRNGKeyArray) -> Float[Array, ""]:
        """The mean of -log softmax(logits)_y over the predictions of one batch, where y
        is the token that followed."""
        tokens = self.draw(key)
        logits = jax.vmap(lambda s: model.sequence_logits(params, s, self.positions))(
            tokens[:, :-1]
        )
        _, predictions, d = logits.shape
        came = jax.nn.one_hot(tokens[:, -predictions:], d, dtype=logits.dtype)
        # A product, because the transpose of indexing is a serial scatter.
        return -jnp.mean(jnp.sum(came * jax.nn.log_softmax(logits), axis=-1))


class SequenceSampler(AbstractSampler):
    """Sequences of a chain, by default from its stationary distribution."""

    chain: MarkovChain | HighOrderChain
    starts: Int[np.ndarray, "starts order"]
    """The tokens that a sequence may start with, the latest first."""
    start_cumulative: Float[np.ndarray, " starts"]
    step_table: Float[np.ndarray, "order d d"]
    """For a Markov chain, the cumulative sums of each row of P; for one of high order,
    the contribution of the token at each lag to the logits of the next."""
    vocabulary: int = eqx.field(static=True)
    length: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)
    positions: Positions = eqx.field(static=True)

    def __init__(
        self,
        chain: Checked[MarkovChain | HighOrderChain],
        length: Checked[int],
        batch: Checked[int],
        *,
        positions: Checked[Positions] = "last",
        start: Any = "stationary",
    ):
        """**Arguments:**

        - `chain`: a [`MarkovChain`][] or a [`HighOrderChain`][].
        - `length`: the number s of tokens in a context, at least the chain's order.
        - `batch`: the number of sequences in one gradient.
        - `positions`: `"last"` predicts the token after s tokens; `"all"` averages over
            the predictions at all positions, causally, as in language-model training.
        - `start`: the distribution of a Markov chain's first token: `"stationary"`,
            `"uniform"` or an array. A chain of high order is stationary: its first
            window is drawn from the stationary distribution over all contexts or, if
            there are more than 65,536, from 16,384 windows of sequences that have
            forgotten their start.
        """
        self.length = checks.whole_number("length", length)
        self.batch = checks.whole_number("batch", batch)
        self.positions = _checked_positions(positions)
        self.chain = chain
        if isinstance(chain, MarkovChain):
            self.step_table = _cumulative(chain.transition)[None]
            self.starts = np.arange(chain.size)[:, None]
            self.start_cumulative = _cumulative(start_law(start, chain))
        elif isinstance(chain, HighOrderChain):
            if self.length < chain.lags:
                raise ValueError(
                    f"`length` must be at least the order of `chain`, {chain.lags}, "
                    f"got {self.length}."
                )
            if not (isinstance(start, str) and start == "stationary"):
                raise ValueError(
                    f"`start` must be 'stationary' for a HighOrderChain, got {start!r}."
                )
            self.step_table = np.einsum("ji,jyx->ixy", chain.pattern, chain.matrices)
            self.starts, law = _stationary_windows(chain, self.step_table)
            self.start_cumulative = _cumulative(law)
        else:
            raise ValueError(
                "`chain` must be a gradflow.MarkovChain or a gradflow.HighOrderChain, "
                f"got {type(chain).__name__}."
            )
        self.vocabulary = chain.size

    def draw(self, key: PRNGKeyArray) -> Int[Array, "batch tokens"]:
        start, walk = jax.random.split(key)
        chosen = _inverse(
            self.start_cumulative, jax.random.uniform(start, (self.batch,))
        )
        windows = jnp.asarray(self.starts)[chosen]
        steps = self.length + 1 - windows.shape[1]
        drawn = _walk(self.step_table, self.is_markov, windows, walk, steps)
        return jnp.concatenate([windows[:, ::-1], drawn], axis=1)

    @property
    def is_markov(self) -> bool:
        return isinstance(self.chain, MarkovChain)

    def __repr__(self) -> str:
        return (
            f"SequenceSampler({type(self.chain).__name__} of {self.vocabulary} tokens, "
            f"length={self.length}, batch={self.batch}, positions={self.positions!r})"
        )


class TextSampler(AbstractSampler):
    """Random windows of real text, each place equally likely."""

    tokens: Int[np.ndarray, " tokens"]
    """All sequences, one after the other."""
    places: Int[np.ndarray, " places"]
    """Where a window may begin: windows do not cross from one sequence to the next."""
    vocabulary: int = eqx.field(static=True)
    length: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)
    positions: Positions = eqx.field(static=True)

    def __init__(
        self,
        sequences: Any,
        length: Checked[int],
        batch: Checked[int],
        *,
        vocabulary: Checked[int | None] = None,
        positions: Checked[Positions] = "last",
    ):
        """**Arguments:**

        - `sequences`: tokens, numbered from zero, as `corpora.Vocabulary.encode` makes
            them: one sequence, a list of several, or an array with one in each row.
        - `length`: the number s of tokens in a context.
        - `batch`: the number of windows in one gradient.
        - `vocabulary`: the number of tokens d; by default the smallest possible.
        - `positions`: as for a [`SequenceSampler`][].
        """
        self.length = checks.whole_number("length", length)
        self.batch = checks.whole_number("batch", batch)
        self.positions = _checked_positions(positions)
        pieces = checks.token_sequences("sequences", sequences)
        sizes = np.array([len(piece) for piece in pieces])
        if sizes.max() <= self.length:
            raise ValueError(
                f"`sequences` must contain {self.length} tokens and a following one "
                f"for `length` = {self.length}, got at most {sizes.max()} tokens."
            )
        seen = 1 + max(int(piece.max()) for piece in pieces if len(piece))
        d = max(seen, 2) if vocabulary is None else vocabulary
        self.vocabulary = checks.whole_number("vocabulary", d, least=max(seen, 2))
        self.tokens = np.concatenate(pieces).astype(np.int32)
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.places = np.concatenate(
            [
                begin + np.arange(max(size - self.length, 0))
                for begin, size in zip(begins, sizes, strict=True)
            ]
        )

    def draw(self, key: PRNGKeyArray) -> Int[Array, "batch tokens"]:
        chosen = jax.random.randint(key, (self.batch,), 0, len(self.places))
        places = jnp.asarray(self.places)[chosen]
        within = places[:, None] + jnp.arange(self.length + 1)[None, :]
        return jnp.asarray(self.tokens)[within].astype(int)

    def __repr__(self) -> str:
        return (
            f"TextSampler({len(self.tokens):,} tokens, length={self.length}, "
            f"batch={self.batch}, positions={self.positions!r})"
        )


def _checked_positions(value: Any) -> Positions:
    if value not in ("last", "all"):
        raise ValueError(f"`positions` must be 'last' or 'all', got {value!r}.")
    return value


def _cumulative(law: Float[np.ndarray, "*rows d"]) -> Float[np.ndarray, "*rows d"]:
    sums = np.cumsum(law, axis=-1)
    # The last must be one in spite of rounding, so that no draw lies beyond it.
    return sums / sums[..., -1:]


def _inverse(cumulative: Any, uniform: Float[Array, "..."]) -> Int[Array, "..."]:
    """The index that a number in [0, 1) selects."""
    return jnp.searchsorted(jnp.asarray(cumulative), uniform, side="right")


def _walk(
    table: Any,
    is_markov: bool,
    windows: Int[Array, "batch order"],
    key: PRNGKeyArray,
    steps: int,
) -> Int[Array, "batch steps"]:
    """The next `steps` tokens after each window, whose latest token comes first."""
    table = jnp.asarray(table)
    order = table.shape[0]

    def step(
        windows: Int[Array, "batch order"], uniform: Float[Array, " batch"]
    ) -> tuple[Int[Array, "batch order"], Int[Array, " batch"]]:
        rows = table[jnp.arange(order)[None, :], windows]  # batch × order × d
        if is_markov:
            cumulative = rows[:, 0]
        else:
            sums = jnp.cumsum(jax.nn.softmax(jnp.sum(rows, axis=1)), axis=1)
            cumulative = sums / sums[:, -1:]
        token = jnp.sum(cumulative <= uniform[:, None], axis=1)
        return jnp.concatenate([token[:, None], windows[:, :-1]], axis=1), token

    uniform = jax.random.uniform(key, (steps, windows.shape[0]))
    return jax.lax.scan(step, windows, uniform)[1].T


_compiled_walk = jit(_walk)


def _stationary_windows(
    chain: HighOrderChain, table: Float[np.ndarray, "order d d"]
) -> tuple[Int[np.ndarray, "starts order"], Float[np.ndarray, " starts"]]:
    """Windows, the latest token first, and their probabilities."""
    if chain.num_contexts <= LISTED:
        return chain.contexts(), chain.stationary
    order = chain.lags
    start, walk = jax.random.split(jax.random.key(0))
    windows = jax.random.randint(start, (BANK_SEQUENCES, order), 0, chain.size)
    steps = (FORGOTTEN + BANK_WINDOWS) * order
    tokens = np.asarray(_compiled_walk(table, False, windows, walk, steps))
    kept = tokens[:, -BANK_WINDOWS * order :].reshape(-1, order)[:, ::-1]
    return kept, np.full(len(kept), 1 / len(kept))
