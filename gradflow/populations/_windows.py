"""Contexts with positions: windows of tokens."""

from typing import Any, Literal

import equinox as eqx
import numpy as np
from equinox import AbstractVar
from jaxtyping import Float, Int

from .._core import checks, seeds
from .._core.checks import Checked
from .._core.file_format import storable
from .._core.types import Seed
from ..chains import HighOrderChain
from ._population import AbstractDensePopulation
from ._sampling import distinct, repetitions


class AbstractWindowPopulation(AbstractDensePopulation):
    """Contexts with positions: windows of tokens."""

    windows: AbstractVar[Int[np.ndarray, "contexts lags"]]
    """The token at each lag; column i is lag i+1."""
    one_hot: AbstractVar[Float[np.ndarray, "contexts lags_times_d"]]
    """The same in one-hot form: column i·d + j says whether the token at lag i+1 is j.
    A product with it is cheaper to differentiate than indexing."""

    @property
    def lags(self) -> int:
        """w, the number of tokens in a window."""
        return self.windows.shape[1]


class AbstractChainWindows(AbstractWindowPopulation):
    """Contexts of a chain of higher order, with the exact distribution of the next
    token."""

    chain: AbstractVar[HighOrderChain]
    teachers: AbstractVar[Float[np.ndarray, "blocks contexts d"]]
    """The distribution of the next token under the chain with only its 1, 2, …
    strongest blocks."""


@storable
class AllContexts(AbstractChainWindows):
    """All dʷ contexts of a chain of order w."""

    chain: HighOrderChain
    weights: Float[np.ndarray, " contexts"]
    windows: Int[np.ndarray, "contexts lags"]
    one_hot: Float[np.ndarray, "contexts lags_times_d"]
    targets: Float[np.ndarray, "contexts d"]
    teachers: Float[np.ndarray, "blocks contexts d"]
    law: Literal["stationary", "uniform"] = eqx.field(static=True)

    def __init__(
        self,
        chain: Checked[HighOrderChain],
        law: Checked[Literal["stationary", "uniform"]] = "stationary",
    ):
        """**Arguments:**

        - `chain`: a [`HighOrderChain`][].
        - `law`: the distribution of the contexts: the chain's stationary one, or the
            uniform one.
        """
        _check_chain(chain)
        if law not in ("stationary", "uniform"):
            raise ValueError(f"`law` must be 'stationary' or 'uniform', got {law!r}.")
        self.chain = chain
        self.windows = chain.contexts()
        count = chain.num_contexts
        uniform = law == "uniform"
        self.weights = np.full(count, 1 / count) if uniform else chain.stationary
        self.one_hot = _one_hot(self.windows, chain.size)
        self.targets = chain.next_law(self.windows)
        self.teachers = _teachers(chain, self.windows)
        self.law = law

    def stored_arguments(self) -> dict[str, Any]:
        return {"chain": self.chain, "law": self.law}


@storable
class DrawnContexts(AbstractChainWindows):
    """Contexts drawn from a chain that has too many to list, each with the exact
    distribution of the next token. The loss over them is an unbiased estimate of the
    loss over all contexts, with a standard error that falls like 1/√count."""

    chain: HighOrderChain
    weights: Float[np.ndarray, " contexts"]
    windows: Int[np.ndarray, "contexts lags"]
    one_hot: Float[np.ndarray, "contexts lags_times_d"]
    targets: Float[np.ndarray, "contexts d"]
    teachers: Float[np.ndarray, "blocks contexts d"]
    seed: int | seeds.StoredKey = eqx.field(static=True)

    def __init__(
        self,
        chain: Checked[HighOrderChain],
        count: Checked[int],
        *,
        seed: Checked[Seed] = 0,
    ):
        """**Arguments:**

        - `chain`: a [`HighOrderChain`][].
        - `count`: the number of contexts to draw, each from its own sequence.
        - `seed`: an integer or a `jax.random.key` for that draw.
        """
        _check_chain(chain)
        count = checks.whole_number("count", count)
        seed = seeds.check("seed", seed)
        self.chain = chain
        self.windows = chain.sample(chain.lags, seed=seed, sequences=count)[:, ::-1]
        self.weights = np.full(count, 1 / count)
        self.one_hot = _one_hot(self.windows, chain.size)
        self.targets = chain.next_law(self.windows)
        self.teachers = _teachers(chain, self.windows)
        self.seed = seeds.storable(seed)

    def stored_arguments(self) -> dict[str, Any]:
        return {"chain": self.chain, "count": self.size, "seed": self.seed}


def _check_chain(chain: object) -> None:
    if not isinstance(chain, HighOrderChain):
        raise ValueError(
            f"`chain` must be a gradflow.HighOrderChain, got {type(chain).__name__}."
        )


def _teachers(
    chain: HighOrderChain, windows: Int[np.ndarray, "contexts lags"]
) -> Float[np.ndarray, "blocks contexts d"]:
    return np.stack(
        [chain.restricted(k).next_law(windows) for k in range(1, chain.blocks + 1)]
    )


def _one_hot(
    windows: Int[np.ndarray, "contexts lags"], d: int
) -> Float[np.ndarray, "contexts lags_times_d"]:
    return (windows[:, :, None] == np.arange(d)).reshape(len(windows), -1).astype(float)


@storable
class Sample(AbstractWindowPopulation):
    """The distinct contexts of a sample: w_c is the frequency of a context, and T[c, ·]
    the frequencies of the next token after it.

    The loss is therefore exactly the empirical one, and its flow is that of full-batch
    training on the sample.
    """

    weights: Float[np.ndarray, " contexts"]
    windows: Int[np.ndarray, "contexts lags"]
    one_hot: Float[np.ndarray, "contexts lags_times_d"]
    targets: Float[np.ndarray, "contexts d"]
    examples: float
    """The number of contexts with their next token that were seen, with repetitions."""
    source: AllContexts | None
    """The population that the sample was drawn from, if it is known. The loss over it
    is the observable `population_loss`."""

    def __init__(
        self,
        sequences: Any,
        lags: Checked[int],
        *,
        vocabulary: Checked[int | None] = None,
        counts: Any = None,
        source: Checked[AllContexts | None] = None,
    ):
        """**Arguments:**

        - `sequences`: tokens, numbered from zero: one sequence, a list of several, or
            an array with one in each row. Contexts do not extend from one sequence to
            the next.
        - `lags`: the number of tokens in a context.
        - `vocabulary`: the number of tokens d; by default that of `source`, or the
            smallest that the tokens allow.
        - `counts`: how often each sequence is seen, by default once.
        - `source`: the population that was sampled, to compare the sample with.
        """
        lags = checks.whole_number("lags", lags)
        pieces = checks.token_sequences("sequences", sequences)
        often = repetitions(counts, len(pieces))
        if source is not None and not isinstance(source, AllContexts):
            raise ValueError(
                "`source` must be a gradflow.AllContexts or None, got "
                f"{type(source).__name__}."
            )
        if source is not None and source.lags != lags:
            raise ValueError(
                f"`lags` must equal that of `source`, {source.lags}, got {lags}."
            )
        longest = max(len(piece) for piece in pieces)
        if longest <= lags:
            raise ValueError(
                f"`sequences` must have {lags} tokens and one after them for "
                f"`lags` = {lags}, got at most {longest}."
            )
        seen = 1 + max(int(piece.max()) for piece in pieces if len(piece))
        least = 2 if source is None else source.vocabulary
        d = max(seen, least) if vocabulary is None else vocabulary
        d = checks.whole_number("vocabulary", d, least=max(seen, 2))
        if source is not None and d != source.vocabulary:
            raise ValueError(
                f"`vocabulary` must equal that of `source`, {source.vocabulary}, got "
                f"{d}."
            )
        usable = [
            (piece, n)
            for piece, n in zip(pieces, often, strict=True)
            if len(piece) > lags
        ]
        windows = np.concatenate(
            [np.lib.stride_tricks.sliding_window_view(p, lags + 1) for p, _ in usable]
        )
        weights = np.repeat([n for _, n in usable], [len(p) - lags for p, _ in usable])
        # Column i is lag i+1; the last token of a window is the next token.
        contexts, row = distinct(windows[:, -2::-1])
        table = np.zeros((len(contexts), d))
        np.add.at(table, (row, windows[:, -1]), weights)
        totals = table.sum(axis=1)
        self.windows = contexts
        self.targets = table / totals[:, None]
        self.weights = totals / totals.sum()
        self.one_hot = _one_hot(contexts, d)
        self.examples = float(totals.sum())
        self.source = source

    @property
    def sampled_from(self) -> AllContexts | None:
        return self.source

    def stored_arguments(self) -> dict[str, Any]:
        context, token = np.nonzero(self.targets)
        counts = self.examples * self.weights[context] * self.targets[context, token]
        return {
            "sequences": np.column_stack([self.windows[context, ::-1], token]),
            "lags": self.lags,
            "vocabulary": self.vocabulary,
            "counts": counts,
            "source": self.source,
        }
