"""Experiment 8: the stages with finite contexts, and their limit s = ∞.

Claim. The population of contexts of length s is exact: it has every pair (last token,
counts) with its probability. At zero weights the gradient is

    ∂L/∂M = G_s = Σ_c w_c n̄_c (1/d - P_{i_c})ᵀ = π1ᵀ/d - diag(π) A_s P,
    A_s = (1/s) Σ_{t<s} Pᵗ,

where n̄_c are the frequencies in context c and i_c is its last token. For the sticky
chain

    G_s = π(1/d - π)ᵀ - λ a_s (diag(π) - ππᵀ),   a_s = (1 - λˢ)/(s(1 - λ)),

which is the limit, of rank one, plus a correction of order 1/s and of rank d - 1. So

- W0 and W1 condense at rate σ₁(G_s), which tends to ‖π‖·‖π - 1/d‖ like 1/s;
- for s < ∞ further directions are also unstable at 0, with rates σ₂(G_s), … of order
  1/s, because the counts in a context carry information about its last token even
  without attention;
- the loss on the plateau of θ¹, the rate of focus and, once s is large, the times at
  which stages end tend to those of s = ∞ like 1/s.

Instances: sticky chains with λ = 0.5, m = k = 10, ε = 1e-3. π = (0.75, 0.2, 0.05) with
s = 2 … 64 shows the stages; π = (0.8, 0.2) with s = 2 … 4096 shows the convergence,
because it has so few contexts that large s is cheap.

The rate of condensation is the largest d log s₁(W0)/dt. The rate of focus is
d log √σ₁(WQ WKᵀ)/dt where it is steadiest as the flow leaves the plateau of θ¹. The
loss on that plateau is taken at time 2 log(1/ε)/σ₁(G_∞). Slopes are those of the log
difference from s = ∞ over log s, between the two largest s. Focus lasts log(1/ε)/κ_s,
where κ_s - κ is of order 1/s, so its end converges only once that difference is small
compared with κ. For d = 2, κ itself is small: the slope of the end of focus is claimed
only for s = 2048 → 4096.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from _bars import draw_stages
from _common import Claim, Measurement, run
from _padded import PaddedContexts
from _watch import Watched, follow
from matplotlib.figure import Figure

import gradflow
from gradflow.populations import AbstractDenseUnorderedPopulation

STICKINESS, SCALE, HORIZON = 0.5, 1e-3, 1e4
RTOL = 1e-7
INFINITE = "∞"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


class Instance(NamedTuple):
    """A stationary distribution π and lengths s, in groups that share a compilation."""

    law: tuple[float, ...]
    groups: tuple[tuple[int, ...], ...]


THREE_TOKENS = Instance((0.75, 0.2, 0.05), ((2, 3, 4, 8, 16), (32,), (64,)))
TWO_TOKENS = Instance((0.8, 0.2), ((2, 8, 32, 128, 512), (2048, 4096)))
QUICK = Instance((0.8, 0.2), ((2, 256, 512),))


class Length(NamedTuple):
    """The results for one context length."""

    watched: Watched
    rates: np.ndarray
    """The singular values of G_s."""
    contexts: int
    plateau_loss: float
    """The loss at time 2 log(1/ε)/σ₁(G_∞)."""

    @property
    def stages(self) -> gradflow.Stages:
        return self.watched.stages


def populations(instance: Instance) -> dict[str, AbstractDenseUnorderedPopulation]:
    chain = gradflow.MarkovChain.sticky(instance.law, STICKINESS)
    found: dict[str, AbstractDenseUnorderedPopulation] = {}
    for group in instance.groups:
        exact: dict[str, AbstractDenseUnorderedPopulation] = {
            str(s): gradflow.FiniteContext(chain, s) for s in group
        }
        if not found:
            exact = {INFINITE: gradflow.InfiniteContext(chain), **exact}
        size = max(population.size for population in exact.values())
        found |= {s: PaddedContexts(p, size) for s, p in exact.items()}
    return found


def initial_gradient(population: AbstractDenseUnorderedPopulation) -> np.ndarray:
    """∂L/∂M at 0, from the list of contexts."""
    n = np.exp(population.log_multiplicities)
    n /= n.sum(axis=1, keepdims=True)
    error = 1 / population.vocabulary - population.targets
    return np.einsum("c,cj,cy->jy", population.weights, n, error)


def examine(instance: Instance) -> dict[str, Length]:
    model = gradflow.OneLayerTransformer(len(instance.law), 10)
    law = np.array(instance.law)
    found: dict[str, Length] = {}
    rate = np.linalg.norm(law) * np.linalg.norm(law - 1 / len(law))
    condensed = float(2 * np.log(1 / SCALE) / rate)
    for s, population in populations(instance).items():
        problem = gradflow.Problem(model, population)
        watched = follow(problem, scale=SCALE, t1=HORIZON, rtol=RTOL)
        found[s] = Length(
            watched,
            np.linalg.svd(initial_gradient(population), compute_uv=False),
            int(np.sum(population.weights > 0)),
            float(watched.flow.observe(problem, [condensed])[0]),
        )
    return found


def measure(quick: bool) -> Measurement:
    instances = (QUICK,) if quick else (THREE_TOKENS, TWO_TOKENS)
    claims, numbers, data, text = [], {}, [], []
    for instance in instances:
        d = len(instance.law)
        found = examine(instance)
        slopes = _slopes(found)
        claims += _claims(d, found, slopes, quick)
        numbers[f"d = {d}"] = {
            "law": instance.law,
            "stickiness": STICKINESS,
            "scale": SCALE,
            "slopes": slopes,
            "lengths": {s: _row(length) for s, length in found.items()},
        }
        data.append(found)
        text.append(f"d = {d}\n" + _table(found))
        text.append(", ".join(f"slope of {k}: {v:.3f}" for k, v in slopes.items()))
    return Measurement(claims, numbers, data, "\n".join(text))


def _claims(
    d: int, found: dict[str, Length], slopes: dict[str, float], quick: bool
) -> list[Claim]:
    claims = [
        Claim(
            f"d = {d}, s = {s}: rate of condensation",
            float(length.rates[0]),
            length.watched.condensation_rate,
            0.01,
        )
        for s, length in found.items()
    ]
    claimed = ["σ₁(G_s)", "rate of condensation"]
    if d == 2:
        claimed += ["plateau loss", "rate of focus"]
        claimed += [] if quick else ["end of focus 1"]
    return claims + [
        Claim(f"d = {d}: slope in s of the {what}", -1.0, slopes[what], 0.1)
        for what in claimed
    ]


def _slopes(found: dict[str, Length]) -> dict[str, float]:
    """The slopes of the distances from s = ∞, between the two largest s; for the ends
    of stages as far as the stages are the same."""
    limit, long = found[INFINITE], list(found)[-2:]
    measures: dict[str, Callable[[Length], Any]] = {
        "σ₁(G_s)": lambda length: length.rates[0],
        "rate of condensation": lambda length: length.watched.condensation_rate,
        "plateau loss": lambda length: length.plateau_loss,
        "rate of focus": lambda length: length.watched.focus_rate,
    }
    slopes = {
        what: _slope(long, [value(found[s]) - value(limit) for s in long])
        for what, value in measures.items()
    }
    for i, stage in enumerate(limit.stages[:-1]):
        names = {found[s].stages.names[: i + 2] for s in (*long, INFINITE)}
        if len(names) > 1:
            break
        gaps = [found[s].stages[i].end - stage.end for s in long]
        slopes[f"end of {_name(stage)}"] = _slope(long, gaps)
    return slopes


def _name(stage: gradflow.Stage) -> str:
    return f"{stage.name} {stage.cycle}" if stage.cycle else stage.name


def _row(length: Length) -> dict[str, Any]:
    w = length.watched
    problem: Any = w.flow.problem
    return {
        "contexts": length.contexts,
        "total_weight": float(np.sum(problem.population.weights)),
        "initial_rates": length.rates,
        "condensation_rate": w.condensation_rate,
        "names": w.stages.names,
        "boundaries": w.stages.boundaries,
        "final_loss": float(w.flow.loss[-1]),
        "plateau_loss": length.plateau_loss,
        "focus_rate": w.focus_rate,
    }


def _slope(lengths: list[str], gaps: Any) -> float:
    (a, b), (x, y) = map(float, lengths), np.abs(gaps)
    return float(np.log(y / x) / np.log(b / a))


def _table(found: dict[str, Length]) -> str:
    short = {"new direction": "new", "condensation": "cond"}
    lines = [
        f"{'s':>4} {'contexts':>8} {'σ₁(G)':>8} {'σ₂(G)':>8} {'rate':>8} "
        f"{'plateau':>8} {'focus':>8}  stages and the times at which they end"
    ]
    for s, length in found.items():
        told = ", ".join(
            f"{short.get(stage.name, stage.name)} {stage.end:.1f}"
            for stage in length.stages
        )
        lines.append(
            f"{s:>4} {length.contexts:>8} {length.rates[0]:>8.5f} "
            f"{length.rates[1]:>8.5f} {length.watched.condensation_rate:>8.5f} "
            f"{length.plateau_loss:>8.5f} {length.watched.focus_rate:>8.5f}  {told}"
        )
    return "\n".join(lines)


def draw(measurement: Measurement) -> Figure:
    first, last = measurement.data[0], measurement.data[-1]
    figure = Figure(figsize=(11.5, 8.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # pyright: ignore
    (losses, bars), (growth, gaps) = figure.subplots(2, 2)
    _draw_losses(losses, first)
    finite = {f"$s$ = {s}": first[s].stages for s in first if s != INFINITE}
    draw_stages(bars, finite | {r"$s = \infty$": first[INFINITE].stages}, 1.0, HORIZON)
    _draw_rates(growth, first)
    _draw_gaps(gaps, last)
    for letter, ax, data in zip(
        "abcd", (losses, bars, growth, gaps), (first, first, first, last), strict=True
    ):
        d = len(data[INFINITE].rates)
        ax.set_title(f"({letter}) {ax.get_title(loc='left')}, $d$ = {d}", loc="left")
    return figure


def _draw_losses(ax: Any, found: dict[str, Length]) -> None:
    shown = [s for s in found if s in ("2", "4", "8", "16", "64", "512")]
    for s, colour in zip(shown, COLOURS, strict=False):
        flow = found[s].watched.flow
        ax.plot(flow.ts[1:], flow.loss[1:], color=colour, label=f"$s$ = {s}")
    flow = found[INFINITE].watched.flow
    ax.plot(flow.ts[1:], flow.loss[1:], "k--", linewidth=1.2, label=r"$s = \infty$")
    ax.set(xscale="log", xlim=(1, HORIZON), xlabel="time $t$")
    ax.set_ylabel("loss $L$ (nats)")
    ax.set_title("Loss", loc="left")
    ax.legend(fontsize="small", loc="upper right")


def _draw_rates(ax: Any, found: dict[str, Length]) -> None:
    finite = [s for s in found if s != INFINITE]
    x = np.array([float(s) for s in finite])
    for i, colour in zip(range(2), COLOURS, strict=False):
        theory = [found[s].rates[i] for s in finite]
        ax.plot(x, theory, color=colour, label=rf"$\sigma_{i + 1}(G_s)$, theory")
        limit = found[INFINITE].rates[i]
        ax.axhline(limit, color=colour, linestyle=":", linewidth=1)
    measured = [found[s].watched.condensation_rate for s in finite]
    ax.plot(x, measured, "o", color=COLOURS[0], label="rate of $W_0$, measured")
    ax.set(xscale="log", xlabel="context length $s$", ylabel="rate at 0")
    ax.set_xticks(x, finite)
    ax.minorticks_off()
    ax.set_ylim(-0.02, None)
    ax.set_title(r"Condensation (dotted: $s = \infty$)", loc="left")
    ax.legend(fontsize="small", loc="center right")


def _draw_gaps(ax: Any, found: dict[str, Length]) -> None:
    finite = [s for s in found if s != INFINITE]
    x = np.array([float(s) for s in finite])
    limit = found[INFINITE]
    rate = [abs(found[s].rates[0] / limit.rates[0] - 1) for s in finite]
    ax.plot(x, rate, "^-", color="k", label=r"$\sigma_1(G_s)$")
    loss = [abs(found[s].plateau_loss / limit.plateau_loss - 1) for s in finite]
    ax.plot(x, loss, "s-", color="0.5", label=r"loss on the plateau of $\theta^1$")
    focus = limit.watched.focus_rate
    rates = [abs(found[s].watched.focus_rate / focus - 1) for s in finite]
    ax.plot(x, rates, "v-", color=COLOURS[3], label="rate of focus")
    for i, (stage, colour) in enumerate(zip(limit.stages[:-1], COLOURS, strict=False)):
        pairs = [
            (float(s), abs(found[s].stages[i].end / stage.end - 1))
            for s in finite
            if found[s].stages.names[: i + 2] == limit.stages.names[: i + 2]
        ]
        if pairs and stage.name != "condensation":
            label = f"end of {_name(stage)}"
            ax.plot(*np.array(pairs).T, "o-", color=colour, label=label)
    ax.plot(x, 8 / x, "k:", linewidth=1, label="slope $-1$")
    ax.set(xscale="log", yscale="log", xlabel="context length $s$")
    ax.set_ylabel(r"relative distance from $s = \infty$")
    ax.set_title("Convergence", loc="left")
    ax.legend(fontsize="x-small", loc="lower left")


if __name__ == "__main__":
    run(__doc__, measure, draw)
