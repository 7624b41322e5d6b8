"""Check that `auto` never stalls, on fifty random chains and, if available, WikiText-2.

The chains have 3 to 12 tokens and are in turn sticky, Metropolis and random; initial
scales are 1e-2 to 1e-5, and each flow runs to t = 3,000. The flow on WikiText-2 uses
the bigrams of its 99 most common tokens and of the rest, width 32, to t = 6,000.
Targets at rtol 1e-8: the horizon is reached, conserved quantities drift by less than
1e-7 relative, Newton's method fails in fewer than 10 % of the steps, and there are
fewer than 20,000 steps.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _timing import footer, table

import gradflow
from gradflow import corpora

RTOL = 1e-8
LARGEST_DRIFT, LARGEST_LOSS, MOST_STEPS = 1e-7, 0.1, 20_000
CORPUS = Path(__file__).parents[2] / "shared" / "corpora" / "wikitext-2"


def random_chains(count: int) -> Iterator[tuple[str, gradflow.Problem, Any, float]]:
    """The name, problem, start and horizon of each case."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        d = 3 + seed % 10
        pi = rng.dirichlet(np.ones(d)) + 1e-3
        pi /= pi.sum()
        kind = ("sticky", "metropolis", "random")[seed % 3]
        if kind == "sticky":
            chain = gradflow.MarkovChain.sticky(pi, rng.uniform(0.2, 0.8))
        elif kind == "metropolis":
            chain = gradflow.MarkovChain.metropolis(pi)
        else:
            chain = gradflow.MarkovChain.random(pi, seed=seed)
        scale = 10.0 ** -rng.integers(2, 6)
        model = gradflow.OneLayerTransformer(d, 10)
        problem = gradflow.Problem(model, gradflow.InfiniteContext(chain))
        start = problem.init(seed=seed, scale=scale)
        yield f"{kind}, d = {d}, ε = {scale:.0e}", problem, start, 3000.0


def wikitext(tokens: int = 100) -> Iterator[tuple[str, gradflow.Problem, Any, float]]:
    try:
        words = corpora.wikitext2(CORPUS if CORPUS.is_dir() else None)
    except FileNotFoundError as error:
        print(f"WikiText-2 is skipped: {error}")
        return
    vocabulary = corpora.Vocabulary.from_tokens(words, tokens, rest="<unk>")
    chain = gradflow.MarkovChain.from_tokens(words, vocabulary, smoothing=1e-3)
    model = gradflow.OneLayerTransformer(tokens, 32)
    problem = gradflow.Problem(model, gradflow.InfiniteContext(chain))
    yield f"WikiText-2, d = {tokens}, m = 32", problem, problem.init(seed=0), 6000.0


def row(name: str, problem: gradflow.Problem, start: Any, t1: float) -> tuple[str, ...]:
    """Integrate one flow and return its row; the last cell is the verdict."""
    flow = gradflow.integrate(
        problem, start, t1, rtol=RTOL, observables=(), throw=False, dense_memory=0
    )
    stats, drift = flow.stats, max(flow.certificate.drift.values())
    steps = stats["num_accepted_steps"] + stats["num_rejected_steps"]
    lost = stats["num_newton_failures"] / steps
    wanting = [
        what
        for what, bad in (
            (f"ended at {flow.ts[-1]:g}", flow.ts[-1] < t1),
            ("drift", not drift < LARGEST_DRIFT),
            ("Newton", not lost < LARGEST_LOSS),
            ("steps", not steps < MOST_STEPS),
        )
        if bad
    ]
    return (
        name,
        f"{flow.loss[-1] - problem.floor:.1e}",
        f"{steps:,}",
        f"{stats['num_rejected_steps']:,}",
        f"{stats['num_newton_failures']:,}",
        f"{stats['num_evaluations']:,}",
        f"{stats['num_hessian_products']:,}",
        f"{drift:.1e}",
        f"{flow.certificate.energy_imbalance:.1e}",
        ", ".join(wanting) or "fine",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chains", type=int, default=50)
    parser.add_argument("--no-wikitext", action="store_true")
    options = parser.parse_args()
    rows = []
    cases = [random_chains(options.chains)]
    cases += [] if options.no_wikitext else [wikitext()]
    for case in cases:
        for arguments in case:
            rows.append(row(*arguments))
            print("  ".join(rows[-1]), flush=True)
    header = ("flow", "L - floor", "steps", "rejected", "Newton failed")
    header += ("evaluations", "products", "drift", "imbalance", "verdict")
    print()
    print(table(header, rows))
    fine = sum(cells[-1] == "fine" for cells in rows)
    print(f"\n{fine} of {len(rows)} flows meet all targets")
    print(footer("gradflow", "jax", "jaxlib", "diffrax"))


if __name__ == "__main__":
    main()
