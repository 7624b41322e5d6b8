"""Markov chains of higher order, in which each block of lags has its own matrix."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from .._core import checks, seeds
from .._core.checks import Checked
from .._core.file_format import storable
from .._core.types import Seed

LARGEST_CONTEXTS = 4_000_000
"""The most contexts whose distribution is listed. With ten tokens, computing it takes
320 MB."""
SMALLEST_CHANGE = 1e-15
"""Iterations end where the distribution changes by less than this, for each lag."""
LARGEST_ROUNDING, PATIENCE = 1e-12, 100
"""They also end where the change is below the first number and has not fallen for the
second number of iterations."""
MAX_ITERATIONS = 100_000


@storable
class HighOrderChain(eqx.Module):
    """Tokens x_t ~ softmax( Σ_k A_k Σ_{i ∈ I(k)} α_i x_{t-i} ), x one-hot in R^d.

    The blocks of lags I(1), …, I(h) are the spans. The order w of the chain is its
    largest lag: it is a first-order chain on the dʷ contexts (x_{t-1}, …, x_{t-w}).
    """

    matrices: Float[np.ndarray, "h d d"]
    """A_k[y, x]: the contribution of token x in block k to the logit of y."""
    pattern: Float[np.ndarray, "h w"]
    """α[k, i]: the weight of lag i+1 in block k; rows sum to one."""
    spans: tuple[int, ...] = eqx.field(static=True)
    """The number of lags in each block."""
    stride: int | None = eqx.field(static=True)
    """The number of lags from the start of one block to the start of the next; None if
    each block begins where the previous one ends."""

    def __init__(
        self,
        matrices: Any,
        spans: Checked[Sequence[int]],
        *,
        weights: Any = None,
        stride: Checked[int | None] = None,
        lags: Checked[int | None] = None,
    ):
        """**Arguments:**

        - `matrices`: A_1, …, A_h, all of the same size.
        - `spans`: the number of lags in each block; the first block begins at lag one.
        - `weights`: α within a block, from its nearest lag on: one list for all blocks
            or one for each, scaled to a sum of one. By default uniform.
        - `stride`: the number of lags from the start of one block to the start of the
            next; blocks overlap if it is less than a span. By default they are
            adjacent.
        - `lags`: the order of the chain, if it exceeds the largest lag of the blocks.
        """
        A = _matrices(matrices)
        lengths = _spans(spans, len(A))
        if stride is not None:
            stride = checks.whole_number("stride", stride)
        starts = _starts(lengths, stride)
        reach = int(max(np.add(starts, lengths)))
        order = (
            reach if lags is None else checks.whole_number("lags", lags, least=reach)
        )
        pattern = np.zeros((len(A), order))
        for row, start, block in zip(
            pattern, starts, _weights(weights, lengths), strict=True
        ):
            row[start : start + len(block)] = block
        for array in (A, pattern):
            array.flags.writeable = False
        self.matrices, self.pattern = A, pattern
        self.spans, self.stride = lengths, stride

    @classmethod
    def random(
        cls,
        vocabulary: Checked[int],
        spans: Checked[Sequence[int]],
        ratio: Checked[float] = 1.7,
        seed: Checked[Seed] = 0,
        orthogonal: bool = False,
        reverse: bool = False,
        *,
        scale: Checked[float] = 1.0,
        weights: Any = None,
        stride: Checked[int | None] = None,
    ) -> "HighOrderChain":
        """Blocks of geometric importance: A_k = scale · ratio^{1-k} · B_k, where B_k is
        a random matrix with ‖B_k‖_F = d, so that its entries have size one.

        **Arguments:**

        - `vocabulary`: the number of tokens d.
        - `spans`, `weights`, `stride`: as for the chain itself.
        - `ratio`: how many times stronger each block is than the next.
        - `seed`: an integer or a `jax.random.key`.
        - `orthogonal`: if true, B_k is √d times an orthogonal matrix; if false, its
            entries are Gaussian.
        - `reverse`: if true, the farthest block is the strongest; if false, the
            nearest.
        - `scale`: the size of the strongest block.
        """
        d = checks.whole_number("vocabulary", vocabulary, least=2)
        lengths = _spans(spans, None)
        ratio = checks.positive_number("ratio", ratio)
        scale = checks.positive_number("scale", scale)
        rng = seeds.numpy_generator("seed", seed)
        B = rng.normal(size=(len(lengths), d, d))
        if orthogonal:
            B = np.stack([np.linalg.qr(b)[0] for b in B])
        B *= d / np.linalg.norm(B, axis=(1, 2), keepdims=True)
        sizes = scale * ratio ** -np.arange(len(lengths), dtype=float)
        sizes = sizes[::-1] if reverse else sizes
        matrices = sizes[:, None, None] * B
        return cls(matrices, lengths, weights=weights, stride=stride)

    @property
    def size(self) -> int:
        """The number of tokens, d."""
        return self.matrices.shape[1]

    @property
    def blocks(self) -> int:
        """The number of blocks, h."""
        return self.matrices.shape[0]

    @property
    def lags(self) -> int:
        """The order of the chain, w."""
        return self.pattern.shape[1]

    @property
    def importance(self) -> Int[np.ndarray, " h"]:
        """The blocks in decreasing order of ‖A_k‖."""
        return np.argsort(-np.linalg.norm(self.matrices, axis=(1, 2)), kind="stable")

    def restricted(self, k: Checked[int]) -> "HighOrderChain":
        """The chain with only its k strongest blocks, and with the same order."""
        k = checks.whole_number("k", k, most=self.blocks)
        kept = np.sort(self.importance[:k])
        matrices = np.zeros_like(self.matrices)
        matrices[kept] = self.matrices[kept]
        return _like(self, matrices)

    @property
    def num_contexts(self) -> int:
        """The number of contexts, dʷ."""
        return self.size**self.lags

    def contexts(self) -> Int[np.ndarray, "contexts w"]:
        """All contexts, in the order of `stationary`; column i is the token at lag
        i+1."""
        self._refuse_many()
        return np.stack(
            np.unravel_index(np.arange(self.num_contexts), (self.size,) * self.lags),
            axis=1,
        )

    def next_law(
        self, contexts: Int[np.ndarray, "contexts w"]
    ) -> Float[np.ndarray, "contexts d"]:
        """The distribution of the token after each context."""
        logits = np.zeros((len(contexts), self.size))
        for A, weights in zip(self.matrices, self.pattern, strict=True):
            for lag in np.flatnonzero(weights):
                logits += weights[lag] * A.T[contexts[:, lag]]
        logits -= logits.max(axis=1, keepdims=True)
        P = np.exp(logits)
        return P / P.sum(axis=1, keepdims=True)

    # Not cached: a cached value would become part of the module's pytree structure.
    @property
    def stationary(self) -> Float[np.ndarray, " contexts"]:
        """The stationary distribution of the contexts: the fixed point of

            p(y, x_1, …, x_{w-1}) ← Σ_{x_w} p(x_1, …, x_w) P(y | x_1, …, x_w),

        to which every start converges, as all transitions are possible. No dʷ×dʷ matrix
        is formed. It is computed on every access: keep the result, or make an
        `AllContexts`."""
        self._refuse_many()
        P = self.next_law(self.contexts())
        shape = (self.size,) * self.lags
        p = np.full(self.num_contexts, 1 / self.num_contexts)
        change, least, since = np.inf, np.inf, 0
        for _ in range(MAX_ITERATIONS):
            joint = (p[:, None] * P).reshape(*shape, self.size)
            after = np.moveaxis(joint.sum(axis=self.lags - 1), -1, 0).ravel()
            after /= after.sum()
            change = np.abs(after - p).sum()
            p = after
            # It has converged when it stops moving or only fluctuates by rounding. The
            # fluctuations are larger for probabilities near one than for even ones.
            least, since = (change, 0) if change < least else (least, since + 1)
            rounding = since >= PATIENCE and least < LARGEST_ROUNDING
            if change < SMALLEST_CHANGE * self.lags or rounding:
                break
        else:
            raise RuntimeError(
                f"The stationary distribution of {self.num_contexts:,} contexts did "
                f"not converge in {MAX_ITERATIONS:,} iterations: it still changes by "
                f"{change:.1e}."
            )
        p.flags.writeable = False
        return p

    @property
    def entropy_rate(self) -> float:
        """The entropy rate in nats: a lower bound of every predictor's loss."""
        P = self.next_law(self.contexts())
        return float(-self.stationary @ np.sum(P * np.log(P), axis=1))

    def sample(
        self,
        length: Checked[int],
        seed: Checked[Seed] = 0,
        sequences: Checked[int] = 1,
    ) -> Int[np.ndarray, "sequences length"]:
        """Random sequences of tokens from the stationary chain.

        **Arguments:**

        - `length`: the number of tokens in a sequence.
        - `seed`: an integer or a `jax.random.key`.
        - `sequences`: the number of sequences. Each starts from random tokens, and its
            first 50 steps for each lag are discarded.
        """
        length = checks.whole_number("length", length)
        count = checks.whole_number("sequences", sequences)
        rng = seeds.numpy_generator("seed", seed)
        discarded = 50 * self.lags
        tokens = np.zeros((count, self.lags + discarded + length), dtype=np.int64)
        tokens[:, : self.lags] = rng.integers(self.size, size=(count, self.lags))
        for t in range(self.lags, tokens.shape[1]):
            P = self.next_law(tokens[:, t - self.lags : t][:, ::-1])
            drawn = rng.random((count, 1)) > np.cumsum(P, axis=1)
            tokens[:, t] = np.minimum(drawn.sum(axis=1), self.size - 1)
        return tokens[:, -length:]

    def _refuse_many(self) -> None:
        if self.num_contexts > LARGEST_CONTEXTS:
            raise ValueError(
                f"{self.size} tokens and {self.lags} lags make "
                f"{self.size}**{self.lags} = {self.num_contexts:,} contexts; the limit "
                f"is {LARGEST_CONTEXTS:,}. Use fewer lags or tokens, or a sample such "
                "as `DrawnContexts`."
            )

    def stored_arguments(self) -> dict[str, Any]:
        starts = _starts(self.spans, self.stride)
        weights = [
            row[i : i + n].tolist()
            for row, i, n in zip(self.pattern, starts, self.spans, strict=True)
        ]
        return {
            "matrices": self.matrices,
            "spans": self.spans,
            "weights": weights,
            "stride": self.stride,
            "lags": self.lags,
        }


def _like(chain: HighOrderChain, matrices: np.ndarray) -> HighOrderChain:
    return HighOrderChain(**{**chain.stored_arguments(), "matrices": matrices})


def _matrices(value: object) -> np.ndarray:
    A = checks.real_array("matrices", value)
    if A.ndim != 3 or A.shape[1] != A.shape[2] or A.shape[0] < 1 or A.shape[1] < 2:
        raise ValueError(
            "`matrices` must be a stack of square matrices, at least 2×2, got shape "
            f"{A.shape}."
        )
    return A.copy()


def _spans(value: object, blocks: int | None) -> tuple[int, ...]:
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        raise ValueError(
            f"`spans` must list the number of lags in each block, got {value!r}."
        )
    lengths = tuple(checks.whole_number("spans", n) for n in value)
    if not lengths:
        raise ValueError("`spans` must have at least one block, got none.")
    if blocks is not None and len(lengths) != blocks:
        raise ValueError(
            f"`spans` must have one entry for each of the {blocks} matrices, got "
            f"{len(lengths)}: {lengths}."
        )
    return lengths


def _starts(spans: tuple[int, ...], stride: int | None) -> np.ndarray:
    """The first lag of each block, counted from zero."""
    if stride is None:
        return np.concatenate([[0], np.cumsum(spans)[:-1]])
    return stride * np.arange(len(spans))


def _weights(value: Any, lengths: tuple[int, ...]) -> list[np.ndarray]:
    if value is None:
        return [np.full(n, 1 / n) for n in lengths]
    nested = any(np.ndim(block) for block in value)
    blocks = list(value) if nested else [value] * len(lengths)
    if len(blocks) != len(lengths):
        raise ValueError(
            f"`weights` must be one list, or one for each of the {len(lengths)} "
            f"blocks, got {len(blocks)}."
        )
    arrays = [checks.real_array("weights", block) for block in blocks]
    for array, n in zip(arrays, lengths, strict=True):
        if array.shape != (n,):
            raise ValueError(
                f"`weights` of a block of {n} lags must be {n} numbers, got shape "
                f"{array.shape}."
            )
        if np.any(array < 0) or not array.sum() > 0:
            raise ValueError(
                "`weights` must be zero or more with a positive sum, got "
                f"{array.tolist()}."
            )
    return [array / array.sum() for array in arrays]
