"""Contexts with positions: windows of tokens."""

from typing import Any, Literal

import equinox as eqx
import numpy as np
from equinox import AbstractVar
from jaxtyping import Float, Int

from .._core import checks
from .._core.checks import Checked
from .._core.storage import storable
from ..chains import HighOrderChain
from ._population import AbstractPopulation
from ._windows import distinct, repetitions


class Positional(AbstractPopulation):
    """Contexts as windows of tokens."""

    windows: AbstractVar[Int[np.ndarray, "contexts lags"]]
    """The token at each lag; column i is lag i+1."""
    one_hot: AbstractVar[Float[np.ndarray, "contexts lags_times_d"]]
    """The same, one-hot at each lag: column i·d + j says whether lag i+1 is token j. A
    product with it is cheap to differentiate, where indexing is not."""

    @property
    def lags(self) -> int:
        """w, the number of tokens in a window."""
        return self.windows.shape[1]


class ContextsOfChain(Positional):
    """Contexts of a chain of high order, with the exact law of what comes next."""

    chain: AbstractVar[HighOrderChain]
    teachers: AbstractVar[Float[np.ndarray, "blocks contexts d"]]
    """The law of the next token by the chain restricted to its 1, 2, … strongest
    blocks."""


@storable
class AllContexts(ContextsOfChain):
    """All dʷ contexts of a chain of order w, exactly."""

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
        - `law`: of the contexts: the chain's own, or all equally likely.
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
class DrawnContexts(ContextsOfChain):
    """Contexts drawn from a chain that has too many to list, each with the exact law of
    the next token: the loss over them is an unbiased estimate of that over all, and its
    standard error falls like 1/√count."""

    chain: HighOrderChain
    weights: Float[np.ndarray, " contexts"]
    windows: Int[np.ndarray, "contexts lags"]
    one_hot: Float[np.ndarray, "contexts lags_times_d"]
    targets: Float[np.ndarray, "contexts d"]
    teachers: Float[np.ndarray, "blocks contexts d"]
    seed: int = eqx.field(static=True)

    def __init__(
        self,
        chain: Checked[HighOrderChain],
        count: Checked[int],
        *,
        seed: Checked[int] = 0,
    ):
        """**Arguments:**

        - `chain`: a [`HighOrderChain`][].
        - `count`: how many contexts to draw, each the end of a sequence of its own.
        - `seed`: of that draw.
        """
        _check_chain(chain)
        count = checks.whole_number("count", count)
        self.chain = chain
        self.windows = chain.sample(chain.lags, seed=seed, sequences=count)[:, ::-1]
        self.weights = np.full(count, 1 / count)
        self.one_hot = _one_hot(self.windows, chain.size)
        self.targets = chain.next_law(self.windows)
        self.teachers = _teachers(chain, self.windows)
        self.seed = int(seed)

    def stored_arguments(self) -> dict[str, Any]:
        return {"chain": self.chain, "count": self.size, "seed": self.seed}


def _check_chain(chain: Any) -> None:
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
class Sample(Positional):
    """The contexts that occur in a sample, each once: w_c is how often it does, and
    T[c, ·] how often each token came next.

    So the loss on it is the empirical one, to the letter, and its flow that of training
    on the sample without noise.
    """

    weights: Float[np.ndarray, " contexts"]
    windows: Int[np.ndarray, "contexts lags"]
    one_hot: Float[np.ndarray, "contexts lags_times_d"]
    targets: Float[np.ndarray, "contexts d"]
    examples: float
    """How many contexts with their next token were seen, equal ones too."""
    source: AllContexts | None
    """What the sample was drawn from, where that is known: the loss over it is observed
    as `population_loss`."""

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

        - `sequences`: tokens, numbered from zero: one sequence, or a list of several,
            or an array with one in each row. A context does not reach from one sequence
            into the next.
        - `lags`: the number of tokens in a context.
        - `vocabulary`: the number of tokens d; by default the source's, or else as many
            as there must be.
        - `counts`: how often each sequence is seen, by default once.
        - `source`: the population that was sampled, for comparison.
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
                f"`lags` must be those of `source`, {source.lags}, got {lags}."
            )
        longest = max(len(piece) for piece in pieces)
        if longest <= lags:
            raise ValueError(
                f"`sequences` must hold {lags} tokens and one after them for "
                f"`lags` = {lags}, got at most {longest}."
            )
        seen = 1 + max(int(piece.max()) for piece in pieces if len(piece))
        least = 2 if source is None else source.vocabulary
        d = max(seen, least) if vocabulary is None else vocabulary
        d = checks.whole_number("vocabulary", d, least=max(seen, 2))
        if source is not None and d != source.vocabulary:
            raise ValueError(
                f"`vocabulary` must be that of `source`, {source.vocabulary}, got {d}."
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
        # Column i is lag i+1; the last token of a window is what came next.
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
