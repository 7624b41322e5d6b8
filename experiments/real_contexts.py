"""Experiment 26: real contexts compared with their Markov approximation.

Contexts of s = 16 and 64 tokens from a corpus, with the tokens that actually follow,
make a sample without a Markov assumption. The same number of contexts of the same
length, drawn from the corpus's chain, make a sample with it. The chain with infinite
context is the theory's limit. The three differ by the non-Markov structure of the text
and by the length. On each, the flow of the one-layer Transformer starts from the same
weights, with entries N(0, ε²).

The question is which stages survive. The claim is a closed form: at zero attention and
small weights, W0 condenses at rate σ₁(∂L/∂M at 0), ∂L/∂M = Σ_c w_c a_c (1/d - T_c)ᵀ
with a_c the frequencies of the tokens in context c, for every list of contexts.
"""

from pathlib import Path
from typing import Any

import numpy as np
from _common import Claim, Measurement, run
from _corpus import (
    COLOURS,
    SMOOTHING,
    Corpus,
    kept_flow,
    vocabulary_of,
)
from matplotlib.figure import Figure
from tinystories import TINYSTORIES
from wikitext import WIKITEXT

import gradflow
from gradflow import plotting

LENGTHS, VOCABULARY, WIDTH = (16, 64), 100, 16
EXAMPLES, HORIZON = 4000, 1000.0
SEED = 0


def measure(quick: bool, out: Path) -> Measurement:
    texts = (WIKITEXT,) if quick else (WIKITEXT, TINYSTORIES)
    found = {
        (corpus.name, kind, length): (flow, gradflow.find_stages(flow))
        for corpus in texts
        for kind, length, flow in _flows(corpus, quick, out)
    }
    claims, lines, numbers = [], [], []
    for (name, kind, length), (flow, stages) in found.items():
        problem: Any = flow.problem
        rate = stages[0].evidence.get("rate", np.nan) if len(stages) else np.nan
        title = f"{name}, {kind}, s = {length}"
        theory = _first_rate(problem.population)
        claims.append(Claim(f"{title}: rate of condensation", theory, rate, 0.1))
        lines += [f"\n{title} ({problem.population.size:,} contexts)", str(stages)]
        lines.append(str(flow.certificate))
        numbers.append(
            {
                "corpus": name,
                "kind": kind,
                "length": length,
                "contexts": problem.population.size,
                "names": stages.names,
                "boundaries": stages.boundaries,
                "rate": rate,
                "ts": flow.ts,
                "loss": flow.loss,
                "floor": problem.floor,
            }
        )
    return Measurement(claims, {"flows": numbers}, found, "\n".join(lines))


def _flows(corpus: Corpus, quick: bool, out: Path) -> Any:
    """The kind of contexts, their length, and the flow."""
    tokens = corpus.tokens(quick)
    size, examples = (12, 200) if quick else (VOCABULARY, EXAMPLES)
    lengths = LENGTHS[:1] if quick else LENGTHS
    vocabulary = vocabulary_of(corpus, tokens, size)
    numbers = vocabulary.encode(tokens)
    chain = gradflow.MarkovChain.from_tokens(numbers, vocabulary, smoothing=SMOOTHING)
    model = gradflow.OneLayerTransformer(size, 4 if quick else WIDTH)
    for length in lengths:
        drawn = _run(chain, examples, length)
        for kind, sequences, few in (
            ("real contexts", numbers, examples),
            ("Markov contexts", drawn, None),
        ):
            sample = gradflow.SampledContext(
                chain, sequences, length, examples=few, seed=SEED
            )
            problem = gradflow.Problem(model, sample)
            name = f"{corpus.folder}-{kind.split()[0].lower()}-{length}"
            yield kind, length, kept_flow(problem, HORIZON, out, name)
    problem = gradflow.Problem(model, gradflow.InfiniteContext(chain))
    yield "chain", "∞", kept_flow(problem, HORIZON, out, f"{corpus.folder}-infinite")


def _run(chain: Any, count: int, length: int) -> np.ndarray:
    """`count` runs of the stationary chain, of `length` tokens and one after them."""
    rng = np.random.default_rng(SEED)
    sums = np.cumsum(chain.transition, axis=1)
    state = rng.choice(chain.size, count, p=chain.stationary)
    runs = [state]
    for _ in range(length):
        drawn = rng.random(count)[:, None] > sums[state]
        state = np.minimum(drawn.sum(axis=1), chain.size - 1)
        runs.append(state)
    return np.stack(runs, axis=1)


def _first_rate(population: Any) -> float:
    """σ₁ of ∂L/∂M at 0."""
    n = np.exp(population.log_multiplicities)
    attention = n / n.sum(axis=1, keepdims=True)
    miss = 1 / population.vocabulary - population.targets
    gradient = attention.T @ (population.weights[:, None] * miss)
    return float(np.linalg.svd(gradient, compute_uv=False)[0])


def draw(measurement: Measurement) -> Figure:
    found = measurement.data
    figure = Figure(figsize=(8.4, 1.7 + 1.25 * len(found)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(len(found), 1, sharex=True))
    for ax, (key, (flow, stages)) in zip(axes, found.items(), strict=True):
        name, kind, length = key
        shown = flow.ts > 0
        colour = COLOURS[("real contexts", "Markov contexts", "chain").index(kind)]
        ax.plot(flow.ts[shown], flow.loss[shown], color=colour, linewidth=2)
        ax.set_xscale("log")
        ax.set_xlim(flow.ts[1], flow.ts[-1])
        ax.set_ylabel("loss, nats", fontsize="small")
        plotting.plot_stages(stages, ax)
        s = r"$\infty$" if length == "∞" else str(length)
        ax.text(
            0.02,
            0.12,
            f"{name}, {kind}, $s$ = {s}",
            transform=ax.transAxes,
            fontsize="small",
        )
    axes[-1].set_xlabel("time $t$")
    return figure


if __name__ == "__main__":
    run(__doc__, measure, draw, keeps=True)
