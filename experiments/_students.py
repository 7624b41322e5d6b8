"""What the experiments on students of high-order chains share: a student, what is seen
of it along its flow, and the rungs of the ladder that it stands on.

The teacher is x_t ~ softmax(Σ_j A_j Σ_{i∈I(j)} α_i x_{t-i}), the student's logits are
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
"""Of blocks, and of rungs: what is the third is green in every figure."""
STYLES = ("-", "--", ":", "-.")
"""Of heads."""


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
    """A chain whose A_k are Gaussian with ‖A_k‖_F = size · d · ratio^{1-k}, so that the
    entries of A_1 are of that size, and, where `centred`, sum to zero along rows and
    along columns; where `uncorrelated`, also ⟨A_j, A_k⟩ = 0 for j ≠ k, by Gram and
    Schmidt.

    What is the same in all rows of A_k the law does not see; what is the same in all
    its columns adds to the logits whatever was read, and no block can claim it. Of
    Gaussian matrices both are of order 1/d of ‖A_k‖², and cosines between two of them
    of order 1/d: little at the paper's d = 50, but not for the few tokens of a chain
    whose contexts can be listed.
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
    """A student on all contexts of the chain; by default with a head for each block."""
    model = gradflow.PositionalHeads(chain.size, chain.lags, heads or chain.blocks)
    return gradflow.Problem(model, gradflow.AllContexts(chain))


class StudentWatch(eqx.Module):
    """What is seen of a student, beside its observables of the same names:

    - `values` (heads × blocks): ⟨V_k, A_j⟩/‖A_j‖² of what is left of both when what is
        the same for all next tokens, or for all tokens read, is taken away: the loss
        does not see it.
    """

    problem: gradflow.Problem

    def __call__(self, params: Any) -> dict[str, Any]:
        known = self.problem.observables
        A = jnp.asarray(self.problem.population.chain.matrices)
        A = _centred(A)
        inner = jnp.einsum("kyx,jyx->kj", _centred(params.V), A)
        names = (
            "loss",
            "attention",
            "attention_to_blocks",
            "pattern_shares",
            "block_loss",
            "ladder",
            "head_overlap",
        )
        seen = {name: known[name](params) for name in names}
        return {**seen, "values": inner / jnp.sum(A**2, axis=(1, 2))[None, :]}


def _centred(matrices: Any) -> Any:
    matrices = matrices - matrices.mean(axis=1, keepdims=True)
    return matrices - matrices.mean(axis=2, keepdims=True)


class Followed(NamedTuple):
    """A student's flow, its stages, and a `StudentWatch` at the times `ts`."""

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
        """For the file and the table; blocks and heads are counted from one."""
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
    """How a flow climbs the ladder."""

    ts: Float[np.ndarray, " times"]
    ladder: Float[np.ndarray, "times rungs"]
    """D_j at `ts`: the steps of the solver and a logarithmic grid between them."""
    left: list[float]
    """When each rung is left for the last time: infinite for the one that the flow
    ends on, NaN for one that it is never on."""
    path: list[int]
    """The rungs in the order in which the flow is on them, counted from one."""

    @property
    def rung(self) -> Int[np.ndarray, " times"]:
        """The nearest, counted from one."""
        return 1 + np.argmin(self.ladder, axis=1)

    @property
    def reaches_the_top(self) -> bool:
        return self.ladder.shape[1] in self.path

    @property
    def is_ordered(self) -> bool:
        """Whether all rungs that the flow was on were left in their order."""
        left = [t for t in self.left if not np.isnan(t)]
        return all(a < b for a, b in itertools.pairwise(left))

    @property
    def is_monotone(self) -> bool:
        """Whether the flow is on each rung once, one after the other."""
        return self.path == list(range(1, 1 + self.ladder.shape[1]))


GRID = 1000
"""Times on a logarithmic clock at which the rung is looked at, beside the solver's."""
REFINED, REFINEMENTS = 32, 4
"""An interval in which the rung changes is cut into so many parts, so many times: the
change is then located to 1e-6 of the interval."""


def climb(flow: gradflow.Flow, problem: gradflow.Problem) -> Climb:
    """The ladder of `problem` along a flow.

    Where the nearest rung changes is looked for on the solver's steps and on a fine
    logarithmic grid between them, and located on the solver's dense output.
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
    """When the rung changes, from which and to which."""
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
    """A `gradflow.Sample` as it is, listed on all contexts of its source: those that do
    not occur have weight zero. Samples of any size then have one shape, and one
    compiled solve serves all of them."""

    weights: Float[np.ndarray, " contexts"]
    windows: Int[np.ndarray, "contexts lags"]
    one_hot: Float[np.ndarray, "contexts lags_times_d"]
    targets: Float[np.ndarray, "contexts d"]
    source: gradflow.AllContexts

    def __init__(self, sample: gradflow.Sample):
        source = sample.source
        if source is None:
            raise ValueError("`sample` must know its source.")
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
# What so many blocks can tell
#


def linear_optimum(chain: gradflow.HighOrderChain, blocks: int) -> float:
    """The least cross-entropy of logits that are linear in the mean tokens
    Σ_{i∈I(j)} α_i x_{t-i} of the strongest `blocks` blocks; with none, log d.

    A logistic regression, convex, by Newton's method in NumPy.
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
