"""Markov chains on tokens, with their stationary distributions."""

from collections.abc import Iterable, Sequence
from typing import Any, SupportsFloat

import equinox as eqx
import numpy as np
from jaxtyping import Float

from .._core import checks, seeds
from .._core.checks import Checked
from .._core.file_format import storable
from .._core.types import Seed
from ._bigrams import bigrams
from ._vocabulary import Vocabulary

ROUNDED_SUMS = 1e-3
"""Rows whose sums miss one by less were probably rounded, in a file or a paper."""


@storable
class MarkovChain(eqx.Module):
    """An irreducible Markov chain on tokens 0..d-1.

    The chain moves from token `i` to token `j` with probability `transition[i, j]`.
    Its stationary distribution is the only `π` with `π P = π`.
    """

    transition: Float[np.ndarray, "d d"]
    """The transition matrix P; rows sum to one."""
    stationary: Float[np.ndarray, " d"]
    """The stationary distribution π."""
    labels: tuple[str, ...] = eqx.field(static=True)
    """The name of each token."""

    def __init__(self, transition: Any, labels: Checked[Sequence[str] | None] = None):
        """**Arguments:**

        - `transition`: the square stochastic matrix of an irreducible chain. Rows whose
            sums are within 1e-8 of one are rescaled; others are refused.
        - `labels`: a name for each token; by default `"0"`, `"1"`, …
        """
        P = _stochastic_matrix(transition)
        size = P.shape[0]
        names = _names(labels, size)
        _refuse_reducible(P, names)
        pi = _stationary_distribution(P)
        P.flags.writeable = False
        pi.flags.writeable = False
        self.transition = P
        self.stationary = pi
        self.labels = names

    @property
    def size(self) -> int:
        """The number of tokens, d."""
        return self.transition.shape[0]

    # Not cached: a cached value would become part of the module's pytree structure, and
    # a loss would be compiled again after its floor was read.
    @property
    def entropy_rate(self) -> float:
        """-Σ_i π_i Σ_j P_ij log P_ij, in nats: a lower bound of every
        predictor's loss."""
        return abs(float(self.stationary @ _xlogx(self.transition).sum(axis=1)))

    @property
    def unigram_entropy(self) -> float:
        """-Σ_i π_i log π_i, in nats: the best loss of a predictor without context."""
        return abs(float(_xlogx(self.stationary).sum()))

    @classmethod
    def sticky(
        cls,
        stationary: Any,
        stickiness: Checked[float],
        labels: Checked[Sequence[str] | None] = None,
    ) -> "MarkovChain":
        """P = λI + (1-λ)1πᵀ: repeat with probability λ, otherwise draw from π.

        **Arguments:**

        - `stationary`: the distribution π, with positive entries.
        - `stickiness`: λ < 1. It may be negative as long as no entry of P is.
        """
        pi = _positive_distribution(stationary)
        if np.ndim(stickiness) or not isinstance(stickiness, SupportsFloat):
            raise ValueError(f"`stickiness` must be a number, got {stickiness!r}.")
        stickiness = float(checks.real_array("stickiness", stickiness))
        P = stickiness * np.eye(pi.size) + (1 - stickiness) * pi
        if stickiness >= 1 or np.any(P < 0):
            lowest = -pi.min() / (1 - pi.min()) if pi.size > 1 else -np.inf
            raise ValueError(
                f"`stickiness` must lie in [{lowest:.6g}, 1) for this `stationary`, "
                f"got {stickiness}."
            )
        return cls(P, labels)

    @classmethod
    def metropolis(
        cls, stationary: Any, labels: Checked[Sequence[str] | None] = None
    ) -> "MarkovChain":
        """The Metropolis chain of the distribution π: propose another token uniformly
        and accept it with probability min(1, π_j/π_i). The chain is reversible:
        π_i P_ij = π_j P_ji."""
        pi = _positive_distribution(stationary)
        P = np.minimum(1.0, pi[None, :] / pi[:, None]) / max(pi.size - 1, 1)
        np.fill_diagonal(P, 0.0)
        np.fill_diagonal(P, np.maximum(1.0 - P.sum(axis=1), 0.0))
        return cls(P, labels)

    @classmethod
    def random(
        cls,
        stationary: Any,
        seed: Checked[Seed] = 0,
        labels: Checked[Sequence[str] | None] = None,
    ) -> "MarkovChain":
        """A random chain with stationary distribution π, not reversible (for d ≥ 3).

        Independent exponential weights are scaled by rows and columns (Sinkhorn) until
        both margins of the flow F_ij = π_i P_ij equal π.

        **Arguments:**

        - `stationary`: the distribution π, with positive entries.
        - `seed`: an integer or a `jax.random.key`.
        """
        pi = _positive_distribution(stationary)
        generator = seeds.numpy_generator("seed", seed)
        weights = generator.exponential(size=(pi.size, pi.size))
        rows, columns = pi, np.ones_like(pi)
        for _ in range(100_000):
            rows = pi / (weights @ columns)
            wanted = pi / (rows @ weights)
            change = np.max(np.abs(wanted / columns - 1))
            columns = wanted
            if change < 4 * np.finfo(float).eps:
                break
        F = rows[:, None] * weights * columns
        return cls(F / F.sum(axis=1, keepdims=True), labels)

    @classmethod
    def from_counts(
        cls,
        counts: Any,
        smoothing: Checked[float] = 0.0,
        labels: Checked[Sequence[str] | None] = None,
    ) -> "MarkovChain":
        """P_ij ∝ counts_ij + smoothing, from the number of times i was followed by j.

        **Arguments:**

        - `counts`: a square matrix of non-negative numbers.
        - `smoothing`: added to every count.
        """
        table = _square_matrix("counts", counts)
        smoothing = checks.positive_number("smoothing", smoothing, zero_allowed=True)
        table = table + smoothing
        totals = table.sum(axis=1)
        if np.any(totals == 0):
            token = _names(labels, len(table))[int(np.argmin(totals))]
            raise ValueError(
                "`counts` must have a positive entry in every row (or pass "
                f"`smoothing` > 0), but token {token!r} is never followed by any."
            )
        return cls(table / totals[:, None], labels)

    @classmethod
    def from_tokens(
        cls,
        tokens: Any,
        vocabulary: Checked[Vocabulary | int | None] = None,
        *,
        keep: Checked[Iterable[str]] = (),
        smoothing: Checked[float] = 0.0,
        labels: Checked[Sequence[str] | None] = None,
    ) -> "MarkovChain":
        """P_ij ∝ (the number of times that j comes right after i) + smoothing.

        **Arguments:**

        - `tokens`: strings, or integers from zero: one sequence or a list of several.
            Pairs do not extend from one sequence to the next.
        - `vocabulary`: a [`Vocabulary`][], or the number of tokens d. With a number,
            the d - 1 most frequent strings have a token each and one token stands for
            the rest. By default every string has a token of its own.
        - `keep`: strings that must have a token of their own if `vocabulary` is a
            number.
        - `smoothing`: added to every count. Without it, a token that nothing follows or
            that cannot be reached again is refused.
        - `labels`: a name for each integer; strings are their own names.
        """
        smoothing = checks.positive_number("smoothing", smoothing, zero_allowed=True)
        counts, labels = bigrams(tokens, vocabulary, keep, labels)
        names = _names(labels, len(counts))
        table = counts + smoothing
        totals = table.sum(axis=1)
        silent = totals == 0
        if np.any(silent):
            raise ValueError(
                "`tokens` must make an irreducible chain (or pass more `smoothing`), "
                f"but nothing ever follows {_listed(silent, names)}."
            )
        P = table / totals[:, None]
        _refuse_reducible(
            P,
            names,
            "`tokens` must make an irreducible chain (or pass more `smoothing`)",
        )
        return cls(P, names)

    def stored_arguments(self) -> dict[str, Any]:
        return {"transition": self.transition, "labels": self.labels}

    def __repr__(self) -> str:
        return (
            f"MarkovChain(size={self.size}, entropy_rate={self.entropy_rate:.6g}, "
            f"unigram_entropy={self.unigram_entropy:.6g})"
        )


def _names(labels: object, size: int) -> tuple[str, ...]:
    if labels is None:
        return tuple(str(i) for i in range(size))
    if not isinstance(labels, Iterable) or isinstance(labels, str):
        raise ValueError(f"`labels` must be a list of strings, got {labels!r}.")
    names = tuple(labels)
    if len(names) != size:
        raise ValueError(
            f"`labels` must have one name for each of the {size} tokens, got "
            f"{len(names)}."
        )
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"`labels` must be strings, got {names!r}.")
    return names


def _square_matrix(name: str, value: object) -> np.ndarray:
    matrix = checks.real_array(name, value)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0:
        raise ValueError(f"`{name}` must be a square matrix, got shape {matrix.shape}.")
    if np.any(matrix < 0):
        where = tuple(int(i) for i in np.argwhere(matrix < 0)[0])
        raise ValueError(
            f"`{name}` must not be negative, got {matrix[where]} at index {where}."
        )
    return matrix


def _stochastic_matrix(value: object) -> np.ndarray:
    P = _square_matrix("transition", value)
    sums = P.sum(axis=1)
    misses = np.abs(sums - 1)
    if misses.max() > checks.SUM_TOLERANCE:
        row = int(misses.argmax())
        close = misses.max() < ROUNDED_SUMS
        remedy = ": renormalise it with `P / P.sum(axis=1, keepdims=True)`"
        raise ValueError(
            f"`transition` must have rows that sum to one, but row {row} sums to "
            f"{float(sums[row])!r}{remedy if close else ''}."
        )
    # Rows that are exact up to rounding keep their digits.
    if misses.max() > 4 * P.shape[0] * np.finfo(float).eps:
        P = P / sums[:, None]
    return P


def _positive_distribution(stationary: object) -> np.ndarray:
    pi = checks.law("stationary", stationary)
    if np.any(pi == 0):
        raise ValueError(
            "`stationary` must be positive everywhere (a token with probability zero "
            f"makes the chain reducible), got zero at index {int(pi.argmin())}."
        )
    return pi


def _listed(states: np.ndarray, labels: tuple[str, ...]) -> str:
    listed = [repr(labels[i]) for i in np.flatnonzero(states)]
    return ", ".join(listed[:8]) + (", …" if len(listed) > 8 else "")


def _refuse_reducible(
    P: np.ndarray,
    labels: tuple[str, ...],
    wanted: str = "`transition` must be irreducible",
) -> None:
    def reached(moves: np.ndarray) -> np.ndarray:
        seen = np.zeros(len(labels), dtype=bool)
        frontier = seen.copy()
        frontier[0] = True
        while frontier.any():
            seen |= frontier
            frontier = moves[frontier].any(axis=0) & ~seen
        return seen

    for moves, forward in ((P > 0, True), ((P > 0).T, False)):
        seen = reached(moves)
        if not seen.all():
            source, target = (seen, ~seen) if forward else (~seen, seen)
            raise ValueError(
                f"{wanted}, but from the states {_listed(source, labels)} the states "
                f"{_listed(target, labels)} cannot be reached."
            )


def _stationary_distribution(P: np.ndarray, block: int = 64) -> np.ndarray:
    """The stationary distribution, by the elimination of Grassmann, Taksar and
    Heyman (1985).

    States are censored one by one, from the last to the first, and the exits of a
    censored state are distributed over the remaining states. No two numbers are ever
    subtracted, so each component keeps its relative accuracy, however small it is and
    however close the chain is to being reducible or periodic. The diagonal is never
    read: it is determined by the exits of a state, and would only add rounding errors.

    States are eliminated in blocks, so that most of the d³/3 operations are matrix
    products.
    """
    A = P.copy()
    stop = A.shape[0]
    while stop > 1:
        start = max(stop - block, 1)
        for k in range(stop - 1, start - 1, -1):
            A[:k, k] /= A[k, :k].sum()
            # Only the entries that later states of this block read; the others wait.
            A[start:k, :k] += np.outer(A[start:k, k], A[k, :k])
            A[:start, start:k] += np.outer(A[:start, k], A[k, start:k])
        A[:start, :start] += A[:start, start:stop] @ A[start:stop, :start]
        stop = start
    pi = np.zeros(A.shape[0])
    pi[0] = 1.0
    for k in range(1, pi.size):
        pi[k] = pi[:k] @ A[:k, k]
    return pi / pi.sum()


def _xlogx(p: np.ndarray) -> np.ndarray:
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0)
