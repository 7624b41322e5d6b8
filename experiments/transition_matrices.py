"""Experiment 7: other transition matrices with the same stationary distribution.

Claim. Condensation depends only on π; what follows depends on P:

- condensation is the same for every P with that π, at rate r = ‖π‖·‖π - 1/d‖;
- at θ¹ the attention grows at rate |κ|,

      κ = [Σ_i π_i γ_i ((P - 1πᵀ)β)_i]·Var_π(γ),   γ = gπ/‖π‖, β = c/(g‖π‖),
      c = log π - mean(log π), g² = ‖c‖/‖π‖;

- if κ > 0 the stages are condensation, focus, dilution, new direction, …; if κ < 0, a
  case that the paper does not discuss, WQ ≈ -WK grows, Φ → -ππᵀ and attention turns
  away from the frequent token: an anti-focus replaces the first focus;
- so the first focus ends at a time T(ε) with dT/d log(1/ε) = 1/r + 1/|κ|.

The chains have π = (0.75, 0.19, 0.05, 0.01) and are sticky, P = λI + (1-λ)1πᵀ,
Metropolis, or random and non-reversible (`MarkovChain.random`: exponential weights
scaled by rows and columns until both margins of π_i P_ij are π). The initial scale is
ε = 1e-6, and also 1e-5 for the difference in T. The growth rate of the attention is
d log √σ₁(WQ WKᵀ)/dt where it is steadiest as the flow leaves the plateau of θ¹, and uᵀv
is the product of its leading singular vectors at the end of the first (anti-)focus.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from _bars import draw_stages
from _common import REFERENCE_LAW, Claim, Measurement, chain_problem, run
from _watch import Watched, follow
from matplotlib.figure import Figure

from gradflow import MarkovChain

SCALE, LARGER_SCALE = 1e-6, 1e-5
HORIZON = 1e5
SEEDS = (5, 1, 4, 2, 10, 3)
QUICK_SEEDS = (3,)
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#8C8C8C", "#000000", "#7B3294", "#A6611A"),
)


class Case(NamedTuple):
    name: str
    kappa: float
    watched: Watched
    slope: float
    """(T(1e-6) - T(1e-5))/log 10."""
    attention: float
    """The frequent token's attention to itself at the end of the first (anti-)focus."""


def chains(quick: bool) -> dict[str, MarkovChain]:
    law = REFERENCE_LAW
    found = {"sticky 0.5": MarkovChain.sticky(law, 0.5)}
    if not quick:
        found["sticky 0.2"] = MarkovChain.sticky(law, 0.2)
        found["sticky 0.8"] = MarkovChain.sticky(law, 0.8)
    found["Metropolis"] = MarkovChain.metropolis(law)
    for seed in QUICK_SEEDS if quick else SEEDS:
        found[f"random {seed}"] = MarkovChain.random(law, seed)
    return found


def signed_kappa(chain: MarkovChain) -> float:
    law = chain.stationary
    size, c = np.linalg.norm(law), np.log(law) - np.mean(np.log(law))
    g = math.sqrt(np.linalg.norm(c) / size)
    gamma, beta = g * law / size, c / (g * size)
    moved = chain.transition @ beta - law @ beta
    return float((law * gamma) @ moved * (law @ gamma**2 - (law @ gamma) ** 2))


def examine(name: str, chain: MarkovChain) -> Case:
    problem = chain_problem(chain)
    watched = follow(problem, scale=SCALE, t1=HORIZON)
    end = watched.focus.end
    larger = follow(problem, scale=LARGER_SCALE, t1=2 * end)
    slope = (end - larger.focus.end) / math.log(LARGER_SCALE / SCALE)
    attention = watched.flow.observe(problem.observables["attention"], [end])[0]
    return Case(name, signed_kappa(chain), watched, slope, float(attention[0, 0]))


def measure(quick: bool) -> Measurement:
    law = np.array(REFERENCE_LAW)
    rate = float(np.linalg.norm(law) * np.linalg.norm(law - 1 / len(law)))
    every = chains(quick)
    cases = [examine(name, chain) for name, chain in every.items()]
    claims, numbers = [], {}
    for case in cases:
        name, w, sign = case.name, case.watched, math.copysign(1.0, case.kappa)
        chain, focus = every[name], w.focus
        inside = w.within(focus.start, focus.end)
        phi = w.seen["phi"][inside]
        turned = float(phi[np.argmax(sign * phi)])
        sides = float(w.seen["sides"][inside][-1])
        in_order = ("condensation", "focus" if sign > 0 else "anti-focus", "dilution")
        begins = sum(a == b for a, b in zip(w.stages.names, in_order, strict=False))
        T = 1 / rate + 1 / abs(case.kappa)
        claims += [
            Claim(f"{name}: rate of condensation", rate, w.condensation_rate, 1e-3),
            Claim(
                f"{name}: attention grows at |κ|", abs(case.kappa), w.focus_rate, 0.01
            ),
            Claim(f"{name}: uᵀv = sign κ", sign, sides, 1e-3),
            Claim(f"{name}: Φ ∥ sign(κ) ππᵀ", sign, turned, 1e-3),
            Claim(f"{name}: {', '.join(in_order)}", 3, begins, 0),
            Claim(f"{name}: dT/d log(1/ε)", T, case.slope, 0.01),
        ]
        numbers[name] = {
            "transition": chain.transition,
            "stationary_error": np.max(np.abs(law @ chain.transition - law)),
            "kappa": case.kappa,
            "condensation_rate": w.condensation_rate,
            "attention_rate": w.focus_rate,
            "sides": sides,
            "phi": turned,
            "names": w.stages.names,
            "boundaries": w.stages.boundaries,
            "scaled_durations": [
                rate * w.stages[0].end,
                abs(case.kappa) * (focus.end - focus.start),
            ],
            "time_slope": case.slope,
            "frequent_to_itself": case.attention,
            "entropy_rate": chain.entropy_rate,
            "final_excess": float(w.flow.loss[-1]) - chain.entropy_rate,
        }
    return Measurement(claims, numbers, cases, _table(cases, numbers))


def _table(cases: list[Case], numbers: dict[str, Any]) -> str:
    short = {"new direction": "new", "condensation": "cond"}
    lines = [
        f"{'chain':<11} {'κ':>8} {'rate/|κ|':>8} {'a_00':>6} {'excess':>8}  stages and "
        "the times at which they end"
    ]
    for case in cases:
        found, stages = numbers[case.name], case.watched.stages
        told = ", ".join(f"{short.get(s.name, s.name)} {s.end:.0f}" for s in stages)
        ratio = found["attention_rate"] / abs(case.kappa)
        lines.append(
            f"{case.name:<11} {case.kappa:>8.5f} {ratio:>8.4f} {case.attention:>6.3f} "
            f"{found['final_excess']:>8.1e}  {told}"
        )
    lines.append(
        "scaled times: ‖π‖·‖π - 1/d‖ × end of condensation, |κ| × length of the first "
        "(anti-)focus"
    )
    for case in cases:
        first, second = numbers[case.name]["scaled_durations"]
        lines.append(f"{case.name:<11} {first:>8.2f} {second:>8.2f}")
    return "\n".join(lines)


def draw(measurement: Measurement) -> Figure:
    cases: list[Case] = measurement.data
    figure = Figure(figsize=(11.5, 8.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # pyright: ignore
    (first, second), (third, bars) = figure.subplots(2, 2)
    law = np.array(REFERENCE_LAW)
    rate = np.linalg.norm(law) * np.linalg.norm(law - 1 / len(law))
    condensed = math.log(1 / SCALE) / rate
    for case, colour in zip(cases, COLOURS, strict=False):
        w = case.watched
        style: Any = {
            "color": colour,
            "linewidth": 1.5,
            "linestyle": "-" if case.kappa > 0 else (0, (5, 2)),
        }
        first.plot(w.ts, w.seen["s1"], **style)
        scaled = abs(case.kappa) * (w.ts - condensed)
        label = rf"{case.name}  ($\kappa$ = {case.kappa:.3f})"
        second.plot(scaled, w.seen["root"], label=label, **style)
        third.plot(scaled, w.seen["phi"], **style)
    t = np.array([5.0, 27.0])
    first.plot(t, SCALE * np.exp(rate * t), color="0.3", linestyle=":")
    first.annotate(
        r"$e^{\|\pi\|\|\pi-1/d\|t}$",
        (18, SCALE * np.exp(rate * 18)),
        (6, -14),
        textcoords="offset points",
    )
    first.set(xlim=(0, 60), yscale="log", xlabel="time $t$", ylabel=r"$s_1(W_0)$")
    first.set_title("(a) Condensation is the same for all", loc="left")
    x = np.array([2.0, 12.0])
    second.plot(x, SCALE * np.exp(x), color="0.3", linestyle=":")
    second.annotate(
        r"$e^{|\kappa| t}$",
        (9, SCALE * np.exp(9)),
        (6, -14),
        textcoords="offset points",
    )
    rescaled = (
        r"$|\kappa|\,(t - t_c)$,  $t_c = \log(1/\varepsilon)/(\|\pi\|\|\pi-1/d\|)$"
    )
    second.set(xlim=(-4, 24), yscale="log", xlabel=rescaled)
    second.set_ylabel(r"$\sqrt{\sigma_1(W_Q W_K^\top)}$")
    second.set_title(r"(b) Attention grows at rate $|\kappa|$", loc="left")
    third.set(xlim=(0, 40), ylim=(-1.08, 1.08), xlabel=rescaled)
    third.set_ylabel(r"cosine of $\Phi$ with $\pi\pi^\top$")
    third.set_title(r"(c) $\Phi \to \mathrm{sign}(\kappa)\,\pi\pi^\top$", loc="left")
    draw_stages(bars, {c.name: c.watched.stages for c in cases}, 10.0, HORIZON)
    bars.set_title("(d) Stages", loc="left")
    figure.legend(
        *second.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(5, len(cases)),
        fontsize="small",
    )
    return figure


if __name__ == "__main__":
    run(__doc__, measure, draw)
