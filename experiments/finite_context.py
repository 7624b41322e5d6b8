"""Experiment 8: the stages of finite contexts, and how they become those of s = ∞.

Claim. The population of contexts of length s is exact here: every (last token, counts)
with its probability. Without attention and weights the gradient is

    ∂L/∂M = G_s = Σ_c w_c n̄_c (1/d - P_{i_c})ᵀ = π1ᵀ/d - diag(π) A_s P,
    A_s = (1/s) Σ_{t<s} Pᵗ,

n̄_c the frequencies in context c and i_c its last token. For the sticky chain

    G_s = π(1/d - π)ᵀ - λ a_s (diag(π) - ππᵀ),   a_s = (1 - λˢ)/(s(1 - λ)):

the limit, of rank one, and a correction of order 1/s and of full rank. So

- W0 and W1 condense at rate σ₁(G_s), which tends to ‖π‖·‖π - 1/d‖ like 1/s;
- for s < ∞ further directions, of rates σ₂(G_s), … of order 1/s, are unstable at 0 too.
  A context then tells of its last token without any attention, by what it counts;
- the times at which stages end, and the loss along the flow, tend to those of s = ∞
  like 1/s once s is large.

The instance is the sticky chain with π = (0.75, 0.2, 0.05) and λ = 0.5, m = k = 10,
ε = 1e-3; the rate of condensation is the largest d log s₁(W0)/dt. Slopes, of log
differences from s = ∞ over log s, are between the two largest s.
"""

from typing import Any

import numpy as np
from _bars import draw_stages
from _common import Claim, Measurement, run
from _padded import PaddedContexts
from _watch import Watched, follow
from matplotlib.figure import Figure

import gradflow

LAW, STICKINESS = (0.75, 0.2, 0.05), 0.5
SCALE, HORIZON = 1e-3, 1e4
LENGTHS = ((2, 3, 4, 6, 8, 12, 16), (24, 32, 48, 64))
"""In groups, each of which is compiled once."""
QUICK_LENGTHS = ((2, 8, 16),)
INFINITE = "∞"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def populations(quick: bool) -> dict[str, gradflow.Population]:
    chain = gradflow.MarkovChain.sticky(LAW, STICKINESS)
    found: dict[str, gradflow.Population] = {}
    for group in QUICK_LENGTHS if quick else LENGTHS:
        exact: dict[str, gradflow.Population] = {
            str(s): gradflow.FiniteContext(chain, s) for s in group
        }
        if not found:
            exact = {INFINITE: gradflow.InfiniteContext(chain), **exact}
        size = max(population.size for population in exact.values())
        found |= {s: PaddedContexts(p, size) for s, p in exact.items()}
    return found


def initial_gradient(population: gradflow.Population) -> np.ndarray:
    """∂L/∂M at 0, from the list of contexts."""
    n = np.exp(population.log_multiplicities)
    n /= n.sum(axis=1, keepdims=True)
    error = 1 / population.vocabulary - population.targets
    return np.einsum("c,cj,cy->jy", population.weights, n, error)


def measure(quick: bool) -> Measurement:
    model = gradflow.OneLayerTransformer(len(LAW), 10)
    cases: dict[str, Watched] = {}
    rates: dict[str, np.ndarray] = {}
    for s, population in populations(quick).items():
        problem = gradflow.Problem(model, population)
        cases[s] = follow(problem, scale=SCALE, t1=HORIZON)
        gradient = initial_gradient(population)
        rates[s] = np.linalg.svd(gradient, compute_uv=False)
    limit = cases[INFINITE]
    lengths = [int(s) for s in cases if s != INFINITE]
    long = [str(s) for s in lengths[-2:]]
    same = [s for s in long if cases[s].stages.names == limit.stages.names]
    loss_gap = {s: _loss_gap(cases[s], limit) for s in cases if s != INFINITE}
    claims = [
        Claim(
            f"s = {s}: rate of condensation",
            float(rates[s][0]),
            case.condensation_rate,
            0.01,
        )
        for s, case in cases.items()
    ]
    law = np.array(LAW)
    rate = float(np.linalg.norm(law) * np.linalg.norm(law - 1 / len(law)))
    rate_gap = [abs(float(rates[s][0]) - rate) for s in long]
    claims += [
        Claim("σ₁(G_∞) = ‖π‖·‖π - 1/d‖", rate, float(rates[INFINITE][0]), 1e-12),
        Claim("σ₂(G_∞) = 0", 0.0, float(rates[INFINITE][1]), 1e-12),
        Claim("slope of σ₁(G_s) - σ₁(G_∞) in s", -1.0, _slope(long, rate_gap), 0.1),
        Claim(
            "slope of the loss's distance in s",
            -1.0,
            _slope(long, [loss_gap[s] for s in long]),
            0.25,
        ),
    ]
    slopes = []
    if len(same) == 2:
        gaps = [
            np.abs(cases[s].stages.boundaries - limit.stages.boundaries) for s in long
        ]
        slopes = [_slope(long, pair) for pair in zip(*gaps, strict=True)]
        claims += [
            Claim(
                f"slope of the end of {stage.name} {stage.cycle or ''}", -1.0, x, 0.25
            )
            for stage, x in zip(limit.stages, slopes, strict=False)
        ]
    numbers = {
        "law": LAW,
        "stickiness": STICKINESS,
        "scale": SCALE,
        "boundary_slopes": slopes,
        "lengths": {
            s: {
                "contexts": int(np.sum(_weights(case) > 0)),
                "total_weight": float(np.sum(_weights(case))),
                "initial_rates": rates[s],
                "condensation_rate": case.condensation_rate,
                "names": case.stages.names,
                "boundaries": case.stages.boundaries,
                "final_loss": float(case.flow.loss[-1]),
                "loss_gap": loss_gap.get(s, 0.0),
                "rest_loss": case.rest.loss if case.rest else None,
            }
            for s, case in cases.items()
        },
    }
    return Measurement(claims, numbers, (cases, rates, loss_gap), _table(numbers))


def _weights(case: Watched) -> np.ndarray:
    problem: Any = case.flow.problem
    return problem.population.weights


def _loss_gap(case: Watched, limit: Watched) -> float:
    """max_t |L_s(θ_s(t)) - L_∞(θ_∞(t))| over the saved times."""
    return float(np.max(np.abs(case.flow.loss - limit.flow.loss)))


def _slope(lengths: list[str], gaps: Any) -> float:
    (a, b), (x, y) = map(float, lengths), gaps
    return float(np.log(y / x) / np.log(b / a))


def _table(numbers: dict[str, Any]) -> str:
    short = {"new direction": "new", "condensation": "cond"}
    lines = [
        f"{'s':>4} {'contexts':>8} {'σ₁(G)':>8} {'σ₂(G)':>8} {'rate':>8} "
        f"{'loss gap':>8}  stages, and when they end"
    ]
    for s, row in numbers["lengths"].items():
        ends = [*row["boundaries"], HORIZON]
        told = ", ".join(
            f"{short.get(n, n)} {t:.1f}"
            for n, t in zip(row["names"], ends, strict=False)
        )
        first, second = row["initial_rates"][:2]
        lines.append(
            f"{s:>4} {row['contexts']:>8} {first:>8.5f} {second:>8.5f} "
            f"{row['condensation_rate']:>8.5f} {row['loss_gap']:>8.4f}  {told}"
        )
    return "\n".join(lines)


def draw(measurement: Measurement) -> Figure:
    cases, rates, loss_gap = measurement.data
    figure = Figure(figsize=(11.5, 8.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # pyright: ignore
    (losses, bars), (growth, gaps) = figure.subplots(2, 2)
    finite = [s for s in cases if s != INFINITE]
    x = np.array([float(s) for s in finite])
    shown = [s for s in finite if s in ("2", "4", "8", "16", "64")]
    for s, colour in zip(shown, COLOURS, strict=False):
        flow = cases[s].flow
        losses.plot(flow.ts[1:], flow.loss[1:], color=colour, label=f"$s$ = {s}")
    flow = cases[INFINITE].flow
    losses.plot(flow.ts[1:], flow.loss[1:], "k--", linewidth=1.2, label=r"$s = \infty$")
    losses.set(xscale="log", xlim=(1, HORIZON), xlabel="time $t$")
    losses.set_ylabel("loss $L$ (nats)")
    losses.set_title("(a) Loss", loc="left")
    losses.legend(fontsize="small", loc="upper right")

    order = {f"$s$ = {s}": cases[s].stages for s in finite}
    draw_stages(bars, order | {r"$s = \infty$": cases[INFINITE].stages}, 1.0, HORIZON)
    bars.set_title("(b) Stages", loc="left")

    for i, colour in zip(range(2), COLOURS, strict=False):
        theory = [rates[s][i] for s in finite]
        name = rf"$\sigma_{i + 1}(G_s)$"
        growth.plot(x, theory, color=colour, label=f"{name}, theory")
        growth.axhline(rates[INFINITE][i], color=colour, linestyle=":", linewidth=1)
    measured = [cases[s].condensation_rate for s in finite]
    growth.plot(x, measured, "o", color=COLOURS[0], label="rate of $W_0$, measured")
    growth.set(xscale="log", xlabel="context length $s$", ylabel="rate at 0")
    growth.set_ylim(-0.02, None)
    growth.set_title(r"(c) Condensation (dotted: $s = \infty$)", loc="left")
    growth.legend(fontsize="small", loc="center right")

    limit = cases[INFINITE].stages
    gaps.plot(
        x,
        [loss_gap[s] for s in finite],
        "s-",
        color="0.4",
        label="loss, at its largest",
    )
    for i, (stage, colour) in enumerate(zip(limit[:-1], COLOURS, strict=False)):
        pairs = [
            (float(s), abs(cases[s].stages[i].end / stage.end - 1))
            for s in finite
            if cases[s].stages.names[: i + 1] == limit.names[: i + 1]
            and len(cases[s].stages) > i + 1
        ]
        if pairs:
            cycle = f" {stage.cycle}" if stage.cycle else ""
            gaps.plot(
                *np.array(pairs).T,
                "o-",
                color=colour,
                label=f"end of {stage.name}{cycle}",
            )
    gaps.plot(x[-3:], 3 / x[-3:], "k:", label="slope -1")
    gaps.set(xscale="log", yscale="log", xlabel="context length $s$")
    gaps.set_ylabel(r"distance from $s = \infty$ (times: relative)")
    gaps.set_title("(d) Convergence", loc="left")
    gaps.legend(fontsize="x-small", loc="lower left")
    return figure


if __name__ == "__main__":
    run(__doc__, measure, draw)
