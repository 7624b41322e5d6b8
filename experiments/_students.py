"""Shared by the experiments on students of high-order chains: a student, measurements
along its flow, and the ladder that it climbs.

The teacher is x_t ~ softmax(Σ_j A_j Σ_{i∈I(j)} α_i x_{t-i}). The student's logits are
Σ_k V_k Σ_i s_k[i] x_{t-i} with s_k = softmax(a_k); V starts at zero, a at N(0, ε²).
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import gradflow

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The colours of blocks and of rungs: the third of either is green in every figure."""
STYLES = ("-", "--", ":", "-.")
"""The line styles of heads."""


def teacher(
    d: int,
    spans: tuple[int, ...],
    *,
    size: float,
    ratio: float = 1.7,
    seed: int = 0,
    reverse: bool = False,
    centred: bool = True,
    uncorrelated: bool = False,
    **options: Any,
) -> gradflow.HighOrderChain:
    """A chain with Gaussian A_k and ‖A_k‖_F = size · d · ratio^{1-k}, so that the
    entries of A_1 are of order `size`. If `centred`, rows and columns sum to zero. If
    `uncorrelated`, also ⟨A_j, A_k⟩ = 0 for j ≠ k, by Gram-Schmidt.

    A part of A_k that is the same in all rows does not change the next-token
    distribution; a part that is the same in all columns adds to the logits whatever
    token was read, and belongs to no block. For Gaussian matrices both are of order 1/d
    of ‖A_k‖², and cosines between two of them are of order 1/d: small at the paper's
    d = 50, but not for the few tokens of a chain whose contexts can be listed.
    """
    drawn = gradflow.HighOrderChain.random(
        d, spans, ratio, seed=seed, reverse=reverse, scale=size, **options
    )
    if not centred:
        return drawn
    A = _centred(drawn.matrices)
    if uncorrelated:
        Q, R = np.linalg.qr(A.reshape(len(spans), -1).T)
        A = (Q * np.sign(np.diag(R))).T.reshape(A.shape)
    norms = [np.linalg.norm(m, axis=(1, 2), keepdims=True) for m in (drawn.matrices, A)]
    return gradflow.HighOrderChain(A * norms[0] / norms[1], spans, **options)


def student_of(
    chain: gradflow.HighOrderChain, heads: int | None = None
) -> gradflow.Problem:
    """A student on all contexts of the chain, by default with one head per block."""
    model = gradflow.PositionalHeads(chain.size, chain.lags, heads or chain.blocks)
    return gradflow.Problem(model, gradflow.AllContexts(chain))


class StudentWatch(eqx.Module):
    """Measurements on a student: its loss, several of its observables, and

    - `values` (heads × blocks): ⟨V_k, A_j⟩/‖A_j‖² after both are centred, that is,
        without the parts that are the same for all next tokens or for all tokens read,
        which the loss does not depend on.
    """

    problem: gradflow.Problem

    def __call__(self, params: Any) -> dict[str, Any]:
        known = self.problem.observables
        A = jnp.asarray(self.problem.population.chain.matrices)
        A = _centred(A)
        inner = jnp.einsum("kyx,jyx->kj", _centred(params.V), A)
        names = (
            "attention",
            "attention_to_blocks",
            "pattern_shares",
            "block_loss",
            "ladder",
            "head_overlap",
        )
        return {
            "loss": self.problem(params),
            **{name: known[name](params) for name in names},
            "values": inner / jnp.sum(A**2, axis=(1, 2))[None, :],
        }


def _centred(matrices: Any) -> Any:
    matrices = matrices - matrices.mean(axis=1, keepdims=True)
    return matrices - matrices.mean(axis=2, keepdims=True)


class Followed(NamedTuple):
    """The flow of a student, its stages, and a `StudentWatch` at the times `ts`."""

    flow: gradflow.Flow
    stages: gradflow.Stages
    ts: Float[np.ndarray, " times"]
    seen: dict[str, Any]

    @property
    def order(self) -> list[int]:
        """The blocks in the order in which they are acquired, counted from one."""
        return [1 + a.pattern for a in self.stages.acquisitions]

    @property
    def acquisitions(self) -> list[dict[str, Any]]:
        """Rows for the file and the table; blocks and heads are counted from one."""
        return [
            {
                "block": 1 + a.pattern,
                "heads": [1 + k for k in a.heads],
                "t": a.t,
                "overlap": a.overlap,
            }
            for a in self.stages.acquisitions
        ]


def follow(
    problem: gradflow.Problem,
    *,
    scale: float,
    t1: float,
    seed: int = 0,
    times: int = 256,
    rtol: float = 1e-8,
) -> Followed:
    start = problem.init(seed=seed, scale=scale)
    flow = gradflow.integrate(problem, start, t1, observables=(), rtol=rtol)
    ts = np.geomspace(1e-1, t1, times)
    seen = flow.observe(StudentWatch(problem), ts)
    return Followed(flow, gradflow.find_stages(flow), ts, seen)


#
# The ladder
#


class Ladder(eqx.Module):
    """D_j = Σ_c w_c KL(T_j[c] ‖ student[c]) for the teachers T_1, …, T_h that know the
    1, …, h strongest blocks."""

    problem: gradflow.Problem

    def __call__(self, params: Any) -> Float[Array, " rungs"]:
        return jnp.asarray(self.problem.observables["ladder"](params))


class Climb(NamedTuple):
    """The passage of a flow up the ladder."""

    ts: Float[np.ndarray, " times"]
    ladder: Float[np.ndarray, "times rungs"]
    """D_j at `ts`, the solver's steps merged with a logarithmic grid."""
    left: list[float]
    """The time at which each rung is left for the last time: infinite for the rung on
    which the flow ends, NaN for a rung that it never visits."""
    path: list[int]
    """The rungs in the order in which the flow visits them, counted from one."""

    @property
    def rung(self) -> Int[np.ndarray, " times"]:
        """The nearest rung, counted from one."""
        return 1 + np.argmin(self.ladder, axis=1)

    @property
    def reaches_the_top(self) -> bool:
        return self.ladder.shape[1] in self.path

    @property
    def is_ordered(self) -> bool:
        """Whether the rungs that the flow visited were left for the last time in
        order."""
        left = [t for t in self.left if not np.isnan(t)]
        return all(a < b for a, b in itertools.pairwise(left))

    @property
    def is_monotone(self) -> bool:
        """Whether the flow visits each rung exactly once, in order."""
        return self.path == list(range(1, 1 + self.ladder.shape[1]))


GRID = 1000
"""The number of times on a logarithmic grid at which the rung is computed, in addition
to the solver's steps."""
REFINED, REFINEMENTS = 32, 4
"""An interval in which the rung changes is divided into `REFINED` points, `REFINEMENTS`
times, which locates the change to 1e-6 of the interval."""


def climb(flow: gradflow.Flow, problem: gradflow.Problem) -> Climb:
    """The ladder of `problem` along a flow.

    Changes of the nearest rung are detected on the solver's steps and a fine
    logarithmic grid, and located on the solver's dense output.
    """
    ladder = Ladder(problem)
    end = float(flow.ts[-1])
    ts = np.union1d(np.append(0.0, flow.mesh), np.geomspace(1e-6 * end, end, GRID))
    D = flow.observe(ladder, ts)
    changes = list(_changes(flow, ladder, ts, 1 + np.argmin(D, axis=1), REFINEMENTS))
    path = [1 + int(np.argmin(D[0])), *(after for _, _, after in changes)]
    left = [
        max([t for t, before, _ in changes if before == rung], default=float("nan"))
        for rung in range(1, 1 + D.shape[1])
    ]
    left[path[-1] - 1] = float("inf")
    return Climb(ts, D, left, path)


def _changes(
    flow: gradflow.Flow, ladder: Ladder, ts: Any, rung: Any, refinements: int
) -> Iterator[tuple[float, int, int]]:
    """The times at which the rung changes, each with the rungs before and after."""
    for i in np.flatnonzero(np.diff(rung)):
        if refinements == 0:
            yield float(ts[i + 1]), int(rung[i]), int(rung[i + 1])
            continue
        times = np.linspace(ts[i], ts[i + 1], REFINED)
        nearest = 1 + np.argmin(flow.observe(ladder, times), axis=1)
        yield from _changes(flow, ladder, times, nearest, refinements - 1)


#
# Samples of one shape
#


class SampleOnAllContexts(gradflow.AbstractWindowPopulation):
    """A `gradflow.Sample` listed on all contexts of its source, where contexts that do
    not occur have weight zero. Samples of any size then have the same shape and share
    one compiled solve."""

    weights: Float[np.ndarray, " contexts"]
    windows: Int[np.ndarray, "contexts lags"]
    one_hot: Float[np.ndarray, "contexts lags_times_d"]
    targets: Float[np.ndarray, "contexts d"]
    source: gradflow.AllContexts

    def __init__(self, sample: gradflow.Sample):
        source = sample.source
        if source is None:
            raise ValueError("`sample` must have a source: pass `source` to Sample.")
        shape = (source.vocabulary,) * source.lags
        where = np.ravel_multi_index(tuple(sample.windows.T), shape)
        self.weights = np.zeros(source.size)
        self.weights[where] = sample.weights
        self.targets = np.zeros((source.size, source.vocabulary))
        self.targets[where] = sample.targets
        self.windows, self.one_hot = source.windows, source.one_hot
        self.source = source

    @property
    def sampled_from(self) -> gradflow.AllContexts:
        return self.source


#
# The best loss with a given number of blocks
#


def linear_optimum(chain: gradflow.HighOrderChain, blocks: int) -> float:
    """The smallest cross-entropy of logits that are linear in the mean tokens
    Σ_{i∈I(j)} α_i x_{t-i} of the `blocks` strongest blocks; log d for no blocks.

    This is a logistic regression, which is convex, solved by Newton's method in NumPy.
    """
    d, kept = chain.size, np.sort(chain.importance[:blocks])
    windows, mean = chain.contexts(), chain.stationary
    tokens = np.eye(d)[windows]
    features = np.einsum("ji,cix->cjx", chain.pattern[kept], tokens)
    features = features.reshape(len(windows), -1)
    targets = chain.next_law(windows)
    W = np.zeros((features.shape[1], d))

    def law(W: np.ndarray) -> np.ndarray:
        logits = features @ W
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def loss(W: np.ndarray) -> float:
        return float(-mean @ np.sum(targets * np.log(law(W)), axis=1))

    for _ in range(100):
        P = law(W)
        gradient = features.T @ (mean[:, None] * (P - targets))
        weighted = mean[:, None] * features
        H = -np.einsum("ca,cy,cb,cz->aybz", weighted, P, features, P, optimize=True)
        for y in range(d):
            H[:, y, :, y] += (weighted * P[:, y : y + 1]).T @ features
        flat = H.reshape(W.size, W.size)
        step = -np.linalg.pinv(flat, rcond=1e-12, hermitian=True) @ gradient.ravel()
        decrement = -float(step @ gradient.ravel())
        if not decrement > 1e-15:
            break
        length, before = 1.0, loss(W)
        while loss(W + length * step.reshape(W.shape)) > before and length > 1e-6:
            length /= 2
        W = W + length * step.reshape(W.shape)
    return loss(W)
