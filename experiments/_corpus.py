"""Shared by the experiments on corpora: a text as a Markov chain, the flow of the
one-layer Transformer on it, and the attention of its tokens along that flow.

With `--quick` the text is the generated one in `data/`. A finished flow is kept in the
output directory and not integrated again; a flow that was killed resumes from its
checkpoint there.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import Claim, Measurement, chain_problem
from jaxtyping import Array
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import gradflow
from gradflow import corpora, plotting

SMALL_TEXT = Path(__file__).parent / "data" / "small.txt"
BESIDE = Path(__file__).parents[2] / "shared" / "corpora"
SMOOTHING = 1e-3
SCALE, RTOL = 1e-3, 1e-6
TIMES = 200
"""The number of saved times. A large flow has no dense output, so its stages are found
from these."""
DIFFUSE = 0.5
"""Attention is diffuse while it is spread over at least this fraction of the number of
keys, exp(entropy), that it starts with."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


class Corpus(NamedTuple):
    """A text and the tokens in it that are watched."""

    name: str
    read: Callable[[Any], list[str]]
    folder: str
    inputs: tuple[str, ...]
    rest: str = "<rest>"

    def tokens(self, quick: bool) -> list[str]:
        if quick:
            return corpora.tokenise(corpora.read_text(SMALL_TEXT), "whitespace")
        beside = BESIDE / self.folder
        return self.read(beside if beside.is_dir() else None)


class Size(NamedTuple):
    vocabulary: int
    width: int
    horizon: float


class Followed(NamedTuple):
    """A flow on a corpus, and a `Seen` at its saved times."""

    flow: gradflow.Flow
    stages: gradflow.Stages
    seen: dict[str, Any]
    inputs: list[int]
    """The indices of the watched tokens."""

    @property
    def chain(self) -> Any:
        problem: Any = self.flow.problem
        return problem.population.chain


class Seen(eqx.Module):
    """Measurements at parameters θ: the attention of the inputs to all keys, the
    entropy of every query's attention, every token's share of the loss,
    Σ_y P_iy log(1/p_i(y)), and how far W0 has condensed, ‖πᵀW0‖/‖π‖."""

    problem: gradflow.Problem
    inputs: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, params: Any) -> dict[str, Array]:
        population = self.problem.population
        law = jnp.asarray(population.chain.stationary)
        attention = self.problem.model.context_attention(params, population)
        log_law = jax.nn.log_softmax((attention @ params.W0) @ params.W1)
        return {
            "attention": attention[jnp.asarray(self.inputs)],
            "entropy": -jnp.sum(jax.scipy.special.xlogy(attention, attention), axis=1),
            "token_loss": -jnp.sum(population.targets * log_law, axis=1),
            "embedding": jnp.linalg.norm(params.W0, axis=1),
            "condensed": jnp.linalg.norm(law @ params.W0) / jnp.linalg.norm(law),
            "singular_values": jnp.linalg.svd(params.W0, compute_uv=False)[:5],
        }


def vocabulary_of(corpus: Corpus, tokens: list[str], size: int) -> corpora.Vocabulary:
    return corpora.Vocabulary.from_tokens(
        tokens, size, keep=corpus.inputs, rest=corpus.rest
    )


def follow(corpus: Corpus, quick: bool, size: Size, out: Path) -> Followed:
    """The flow on the corpus's bigrams with infinite context."""
    tokens = corpus.tokens(quick)
    vocabulary = vocabulary_of(corpus, tokens, size.vocabulary)
    chain = gradflow.MarkovChain.from_tokens(tokens, vocabulary, smoothing=SMOOTHING)
    problem = chain_problem(chain, size.width)
    flow = kept_flow(problem, size.horizon, out, f"{corpus.folder}-{chain.size}")
    inputs = [vocabulary.index(token) for token in corpus.inputs]
    seen = flow.observe(Seen(problem, tuple(inputs)), flow.ts)
    return Followed(flow, gradflow.find_stages(flow), seen, inputs)


def kept_flow(
    problem: gradflow.Problem, horizon: float, out: Path, name: str
) -> gradflow.Flow:
    """The flow from entries N(0, ε²), read from the output directory if possible."""
    start = problem.init(seed=0, scale=SCALE)
    ts = np.append(0.0, np.geomspace(1.0, horizon, TIMES))
    path = out / f"{name}.npz"
    if path.is_file():
        flow = gradflow.Flow.load(path)
        known: Any = flow.problem
        same = flow.settings.rtol == RTOL and np.array_equal(flow.ts, ts)
        if (
            same
            and eqx.tree_equal(known, problem) is True
            and _equal(flow.start, start)
        ):
            return flow
    flow = gradflow.integrate(
        problem,
        start,
        horizon,
        ts=ts,
        rtol=RTOL,
        observables=(),
        progress=True,
        checkpoint=out / f"{name}.checkpoint",
    )
    # Drop the dense output, so that the flow is the same as when it is read again.
    return gradflow.Flow.load(flow.save(path))


def _equal(a: Any, b: Any) -> bool:
    """Whether two sets of parameters are equal, with NumPy or with JAX arrays."""
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


#
# Measurements
#


class Phase(NamedTuple):
    """An interval in which a token's attention is diffuse, or mostly on one key."""

    what: str
    start: float
    end: float

    def __str__(self) -> str:
        return f"{self.what} (t = {self.start:.3g} to {self.end:.3g})"


def phases(followed: Followed, index: int) -> list[Phase]:
    """The phases of the index-th input's attention at the saved times, in order of
    time: diffuse, or else on the key that gets most of it."""
    attention = followed.seen["attention"][:, index]
    keys = np.exp(followed.seen["entropy"][:, followed.inputs[index]])
    labels, me = followed.chain.labels, followed.inputs[index]
    names = []
    for row, spread in zip(attention, keys, strict=True):
        top = int(np.argmax(row))
        on = "itself" if top == me else repr(labels[top])
        names.append("diffuse" if spread > DIFFUSE * keys[0] else f"on {on}")
    ts = followed.flow.ts
    starts = [0, *(i for i in range(1, len(ts)) if names[i] != names[i - 1])]
    ends = [*starts[1:], len(ts) - 1]
    return [
        Phase(names[i], float(ts[i]), float(ts[j]))
        for i, j in zip(starts, ends, strict=True)
    ]


def bands(followed: Followed) -> dict[str, np.ndarray]:
    """The mean attention entropy over time for queries in three bands of frequency: the
    most frequent tenth, the middle, and the rarest half."""
    law = followed.chain.stationary
    rank = np.argsort(np.argsort(-law, kind="stable"))
    d = len(law)
    cuts = {
        f"{d // 10} most frequent": rank < d // 10,
        "middle": (rank >= d // 10) & (rank < d // 2),
        f"{d - d // 2} rarest": rank >= d // 2,
    }
    return {
        name: followed.seen["entropy"][:, chosen] @ law[chosen] / law[chosen].sum()
        for name, chosen in cuts.items()
    }


def numbers(corpus: Corpus, followed: Followed) -> dict[str, Any]:
    flow, stages = followed.flow, followed.stages
    return {
        "vocabulary": followed.chain.size,
        "parameters": sum(x.size for x in jax.tree.leaves(flow.start)),
        "horizon": float(flow.ts[-1]),
        "run_seconds": flow.stats["run_seconds"],
        "memory": flow.stats["memory"]["total"],
        "steps": flow.stats["num_accepted_steps"],
        "certificate": str(flow.certificate).splitlines(),
        "stages": [
            {"name": s.name, "cycle": s.cycle, "start": s.start, "end": s.end}
            | {"evidence": {k: str(v) for k, v in s.evidence.items()}}
            for s in stages
        ],
        "ts": flow.ts,
        "loss": flow.loss,
        "attention": followed.seen["attention"] if followed.chain.size < 50 else None,
        "bands": bands(followed),
        "rate_of_condensation": rate_of_condensation(followed),
        "inputs": {
            token: {
                "frequency": followed.chain.stationary[followed.inputs[i]],
                "phases": [str(phase) for phase in phases(followed, i)],
                "to_itself": followed.seen["attention"][:, i, followed.inputs[i]],
            }
            for i, token in enumerate(corpus.inputs)
        },
    }


def rate_of_condensation(followed: Followed) -> float:
    """d log(‖πᵀW0‖)/dt while ‖πᵀW0‖ grows from 10 to 50 times its initial value: above
    the noise, and while the loss is still quadratic."""
    size, ts = followed.seen["condensed"], followed.flow.ts
    grown = (size > 10 * size[0]) & (size < 50 * size[0])
    first = np.cumprod(grown | (size <= 10 * size[0])).astype(bool) & grown
    return float(np.polyfit(ts[first], np.log(size[first]), 1)[0])


def claims(followed: Followed) -> list[Claim]:
    flow, chain = followed.flow, followed.chain
    problem: Any = flow.problem
    law, d = chain.stationary, chain.size
    entropy = float(-law @ np.log(law))
    certificate = flow.certificate
    imbalance = certificate.energy_imbalance / certificate.energy_released
    drift = max(certificate.drift.values())
    mu = problem.known_saddles[0].rate
    start = float(np.mean(followed.seen["entropy"][0]))
    return [
        Claim(f"d = {d}: initial loss, log d", math.log(d), flow.loss[0], 1e-5),
        Claim(f"d = {d}: initial attention entropy, H(π)", entropy, start, 1e-5),
        Claim(
            f"d = {d}: rate of condensation", mu, rate_of_condensation(followed), 0.02
        ),
        Claim(f"d = {d}: energy imbalance over energy released", 0.0, imbalance, 1e-5),
        Claim(f"d = {d}: largest drift of conserved quantities", 0.0, drift, 1e-4),
    ]


def measured(
    corpus: Corpus, quick: bool, sizes: tuple[Size, ...], out: Path
) -> Measurement:
    everything = [follow(corpus, quick, size, out) for size in sizes]
    lines = []
    for followed in everything:
        lines += [f"\n{corpus.name}, d = {followed.chain.size}", str(followed.flow)]
        lines += ["", str(followed.stages), ""]
        for i, token in enumerate(corpus.inputs):
            found = ", then ".join(map(str, phases(followed, i)))
            lines.append(f"attention of {token!r}: {found}")
    return Measurement(
        claims=[claim for followed in everything for claim in claims(followed)],
        numbers={"flows": [numbers(corpus, followed) for followed in everything]},
        data=(corpus, everything),
        text="\n".join(lines),
    )


#
# The figure
#


def draw(measurement: Measurement) -> Figure:
    corpus, everything = measurement.data
    figure = Figure(figsize=(6.4 * len(everything), 9.6), layout="constrained")
    axes = figure.subplots(4, len(everything), sharex="col", squeeze=False)
    several = len(corpus.inputs) > 1
    for column, followed in enumerate(everything):
        loss, values, attention, entropy = axes[:, column]
        flow = followed.flow
        shown = flow.ts > 0
        plotting.plot_loss(flow, loss)
        problem: Any = flow.problem
        n = sum(x.size for x in jax.tree.leaves(flow.start))
        loss.set_title(
            f"{corpus.name}, $d$ = {followed.chain.size:,}, "
            f"$m$ = {problem.model.width} ({n:,} parameters)",
            loc="left",
        )
        for i, value in enumerate(followed.seen["singular_values"][shown].T):
            values.plot(flow.ts[shown], value, color=COLOURS[i], label=f"$s_{i + 1}$")
        values.set_yscale("log")
        values.set_ylabel("singular values of $W_0$")
        if several:
            _draw_inputs(attention, corpus, followed)
        else:
            _draw_keys(attention, corpus, followed)
        for (name, band), colour in zip(bands(followed).items(), COLOURS, strict=False):
            entropy.plot(flow.ts[shown], band[shown], color=colour, label=name)
        entropy.set_ylabel("attention entropy, nats")
        entropy.set_xlabel("time $t$")
        for ax in (values, attention, entropy):
            ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        loss.set_xlabel("")
        plotting.plot_stages(followed.stages, list(axes[:, column]))
    return figure


def _draw_keys(ax: Axes, corpus: Corpus, followed: Followed) -> None:
    """Draw the attention of the single input to the keys that at some time get most of
    it."""
    row, ts = followed.seen["attention"][:, 0], followed.flow.ts
    me, shown = followed.inputs[0], ts > 0
    order = [i for i in np.argsort(-row.max(axis=0)) if i != me][: len(COLOURS) - 2]
    for key, colour in zip([*order, me], COLOURS, strict=False):
        name = "itself" if key == me else repr(followed.chain.labels[key])
        style = "--" if key == me else "-"
        name = name.replace("$", r"\$")
        ax.plot(ts[shown], row[shown, key], style, color=colour, label=name)
    ax.set_yscale("log")
    ax.set_ylim(max(1e-6, 0.3 * float(row[:, [*order, me]].min())), 1.5)
    ax.set_ylabel(f"attention of {corpus.inputs[0]!r} to")


def _draw_inputs(ax: Axes, corpus: Corpus, followed: Followed) -> None:
    """Draw the number of keys over which each input spreads its attention."""
    ts = followed.flow.ts
    for i, (token, colour) in enumerate(zip(corpus.inputs, COLOURS, strict=False)):
        keys = np.exp(followed.seen["entropy"][:, followed.inputs[i]])
        ax.plot(ts[ts > 0], keys[ts > 0], color=colour, label=repr(token))
    ax.set_yscale("log")
    ax.set_ylabel("keys attended to, exp(entropy)")
