"""Experiment 21: SGD, momentum and AdamW compared with the flow.

Setting. The one-layer Transformer on the reference chain, from ε = 1e-3, is trained on
freshly drawn sequences: contexts of s = 16 tokens and the token after them, 128 in a
batch, by a forward pass on tokens. The flow is that of the exact finite context of the
same length (all 3,264 pairs of last token and counts), which also measures the loss and
gradient of every training run. There are five seeds for the sequences; the start is
always the same.

- SGD: η = 0.1; clock Σ η.
- momentum: β = 0.9 and η = 0.01. A gradient moves θ by η/(1-β) in the end, so each step
  counts that much on the clock, Σ η/(1-β): again 0.1 per step. On this clock the
  remaining effect of momentum is inertia, m θ̈ + θ̇ = -∇L with
  m = β/(1-β) · η/(1-β) = 0.9, so that a direction of rate μ grows at the rate r with
  m r² + r = μ.
- AdamW: η = 1e-3, weight decay 1e-4; clock Σ η. Its steps do not shrink with the
  gradient, so its clock cannot be compared with the flow's, only its order.

Definitions. A direction *opens* when it first reaches half of the size that it has in
the flow at the end of the stage that opens it: σ₁(W0) in condensation, √σ₁(WQ WKᵀ) in
focus, σ₂(W0) in the new direction. (`find_stages` looks for the lowest speed between
two openings; the speed at a noisy iterate says little about this, because noise keeps
‖∇L‖ high on a plateau.) The order of a training run is that of its openings at its
saved steps; directions that do not open by the horizon are missing.

The question, which theory does not answer, is whether the stages come in the flow's
order. The claims are those expected for small steps: SGD and momentum keep the order in
every seed; SGD opens each direction within 10 % of the flow's time; and momentum opens
the first at μ/r times the flow's, as it grows at that rate from the start.

`--quick`: 3 tokens, s = 6, η = 0.3, two seeds, no AdamW.
"""

from typing import Any, NamedTuple

import numpy as np
import optax
from _common import REFERENCE_LAW, REFERENCE_STICKINESS, Claim, Measurement, run
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import gradflow

SCALE, WIDTH = 1e-3, 10
RATE, QUICK_RATE, MOMENTUM = 0.1, 0.3, 0.9
ADAM_RATE, ADAM_STEPS = 1e-3, 3000
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


class Direction(NamedTuple):
    """A singular value that a stage opens."""

    stage: str
    observable: str
    component: int
    power: float

    def size(self, observables: dict[str, Any]) -> np.ndarray:
        return np.asarray(observables[self.observable])[:, self.component] ** self.power


DIRECTIONS = (
    Direction("condensation", "singular_values_W0", 0, 1.0),
    Direction("focus", "singular_values_QK", 0, 0.5),
    Direction("new direction", "singular_values_W0", 1, 1.0),
)
WATCHED = ("singular_values_W0", "singular_values_QK")


class Run(NamedTuple):
    optimiser: str
    seed: int
    training: gradflow.Training
    openings: dict[str, float]

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(sorted(self.openings, key=lambda name: self.openings[name]))


def measure(quick: bool) -> Measurement:
    law = (0.7, 0.25, 0.05) if quick else REFERENCE_LAW
    length, batch = (6, 64) if quick else (16, 128)
    t1, eta = (180.0, QUICK_RATE) if quick else (400.0, RATE)
    seeds = range(2) if quick else range(5)
    chain = gradflow.MarkovChain.sticky(law, REFERENCE_STICKINESS)
    model = gradflow.OneLayerTransformer(chain.size, WIDTH)
    problem = gradflow.Problem(model, gradflow.FiniteContext(chain, length))
    sampler = gradflow.SequenceSampler(chain, length, batch)
    start = problem.init(seed=0, scale=SCALE)
    solver = "tsit5" if quick else "auto"  # it compiles faster
    flow = gradflow.integrate(problem, start, t1, solver=solver, observables=WATCHED)
    stages = gradflow.find_stages(flow)
    halves = _halves(problem, flow, stages)
    expected = _openings(flow, halves)

    steps = round(t1 / eta)
    optimisers = {
        "SGD": (optax.sgd, eta, steps),
        "momentum": (optax.sgd(eta * (1 - MOMENTUM), MOMENTUM), eta, steps),
    }
    if not quick:
        optimisers["AdamW"] = (optax.adamw, ADAM_RATE, ADAM_STEPS)
    runs = []
    for name, (optimiser, rate, count) in optimisers.items():
        for seed in seeds:
            training = gradflow.train(
                problem,
                start,
                optimiser,
                count,
                learning_rate=rate,
                sampler=sampler,
                seed=seed,
                saved=np.linspace(0, count, 251).round().astype(int),
                observables=WATCHED,
            )
            runs.append(Run(name, seed, training, _openings(training, halves)))
    order = tuple(sorted(expected, key=lambda name: expected[name]))
    rows = {
        name: _row([r for r in runs if r.optimiser == name], order, expected)
        for name in optimisers
    }
    close = [rows[name] for name in ("SGD", "momentum")]
    inertia = _slowed(stages[0].evidence["rate"], MOMENTUM / (1 - MOMENTUM) * eta)
    claims = [
        Claim(
            "SGD and momentum: seeds in the flow's order",
            float(sum(row["seeds"] for row in close)),
            float(sum(row["same_order"] for row in close)),
            0.0,
        ),
        Claim("SGD: worst t/t_flow of an opening", 1.0, close[0]["worst_ratio"], 0.1),
        Claim(
            "momentum: t/t_flow of condensation, mean",
            inertia,
            float(np.mean(close[1]["openings"]["condensation"]))
            / expected["condensation"],
            0.05,
        ),
    ]
    compared = [
        gradflow.compare(flow, r.training) for r in runs if r.optimiser == "SGD"
    ]
    numbers = {
        "contexts": problem.population.size,
        "floor": problem.floor,
        "flow_openings": expected,
        "flow_stages": [
            {"name": s.name, "start": s.start, "end": s.end, **s.evidence}
            for s in stages
        ],
        "rows": rows,
        "runs": [
            {
                "optimiser": r.optimiser,
                "seed": r.seed,
                "openings": r.openings,
                "order": r.order,
                "final_loss": float(r.training.loss[-1]),
            }
            for r in runs
        ],
        "inertia": inertia,
        "sgd_largest_distance": [c.largest for c in compared],
    }
    text = f"{stages}\n{_table(rows, expected)}"
    return Measurement(claims, numbers, (flow, expected, runs), text)


def _slowed(rate: float, mass: float) -> float:
    """The factor by which inertia delays a direction that grows at this rate."""
    return float(rate * 2 * mass / (np.sqrt(1 + 4 * mass * rate) - 1))


def _halves(
    problem: gradflow.Problem, flow: gradflow.Flow, stages: gradflow.Stages
) -> dict[str, float]:
    """For each direction that the flow opens, half its size at the end of its stage."""
    found = {}
    for direction in DIRECTIONS:
        ends = [s.end for s in stages if s.name == direction.stage]
        if ends:
            values = flow.observe(
                problem.observables[direction.observable], np.array(ends[:1])
            )
            size = direction.size({direction.observable: values})
            found[direction.stage] = 0.5 * float(size[0])
    return found


def _openings(
    flow: gradflow.Flow | gradflow.Training, halves: dict[str, float]
) -> dict[str, float]:
    """The time at which each direction first reaches its level in `halves`, by linear
    interpolation between saved times."""
    found = {}
    for direction in DIRECTIONS:
        if direction.stage not in halves:
            continue
        size, level = direction.size(flow.observables), halves[direction.stage]
        i = int(np.argmax(size >= level))
        if size[i] >= level:
            t = np.interp(level, size[i - 1 : i + 1], flow.ts[i - 1 : i + 1])
            found[direction.stage] = float(t)
    return found


def _row(
    runs: list[Run], order: tuple[str, ...], expected: dict[str, float]
) -> dict[str, Any]:
    ratios = np.array(
        [
            [r.openings.get(name, np.inf) / expected[name] for name in order]
            for r in runs
        ]
    )
    ratios = np.where(np.isfinite(ratios), ratios, 1e9)
    worst = ratios.ravel()[np.argmax(np.abs(np.log(ratios)))]
    return {
        "seeds": len(runs),
        "same_order": sum(r.order == order for r in runs),
        "orders": sorted({" → ".join(r.order) for r in runs}),
        "openings": {name: [r.openings.get(name) for r in runs] for name in order},
        "worst_ratio": float(worst),
        "final_losses": [float(r.training.loss[-1]) for r in runs],
    }


def _table(rows: dict[str, dict[str, Any]], expected: dict[str, float]) -> str:
    lines = ["times at which directions open (range over seeds)"]
    lines.append(
        f"{'flow':<10}" + "".join(f"{n} {t:.4g}   " for n, t in expected.items())
    )
    for name, row in rows.items():
        cells = []
        for stage, times in row["openings"].items():
            known = [t for t in times if t is not None]
            span = f"{min(known):.4g}-{max(known):.4g}" if known else "never"
            missing = len(times) - len(known)
            cells.append(f"{stage} {span}" + (f" ({missing} never)" if missing else ""))
        same = f"same order {row['same_order']} of {row['seeds']}"
        lines.append(f"{name:<10}{'   '.join(cells)}   {same}")
    return "\n".join(lines)


def draw(measurement: Measurement) -> Figure:
    flow, expected, runs = measurement.data
    names = list(dict.fromkeys(r.optimiser for r in runs))
    figure = Figure(figsize=(13.0, 7.4), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # pyright: ignore
    axes = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        chosen = [r for r in runs if r.optimiser == name]
        above, below = axes[:, column]
        _draw_losses(above, flow, chosen, name)
        _draw_directions(below, flow, chosen, expected, name)
        above.set_title(f"({'abc'[column]}) {name}: loss", loc="left")
        below.set_title(f"({'def'[column]}) {name}: directions", loc="left")
    figure.legend(
        *axes[1, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize="small",
    )
    return figure


def _on_the_flows_clock(name: str) -> bool:
    return name != "AdamW"


def _draw_losses(ax: Axes, flow: gradflow.Flow, runs: list[Run], name: str) -> None:
    if _on_the_flows_clock(name):
        ax.plot(flow.ts, flow.loss, color="black", linewidth=2, label="flow")
    for r in runs:
        ax.plot(
            r.training.ts, r.training.loss, color=COLOURS[0], linewidth=0.8, alpha=0.8
        )
    ax.plot([], [], color=COLOURS[0], label=f"{name}, {len(runs)} seeds")
    ax.set_xlim(0, float(runs[0].training.ts[-1]))
    ax.set(xlabel=_clock(name), ylabel="exact loss $L$ (nats)")
    ax.legend(fontsize="small", loc="upper right")


def _draw_directions(
    ax: Axes,
    flow: gradflow.Flow,
    runs: list[Run],
    expected: dict[str, float],
    name: str,
) -> None:
    labels = {
        "condensation": r"$\sigma_1(W_0)$",
        "focus": r"$\sqrt{\sigma_1(W_Q W_K^\top)}$",
        "new direction": r"$\sigma_2(W_0)$",
    }
    for direction, colour in zip(DIRECTIONS, COLOURS, strict=False):
        if direction.stage not in expected:
            continue
        for r in runs:
            size = direction.size(r.training.observables)
            ax.plot(r.training.ts, size, color=colour, linewidth=0.8, alpha=0.8)
        if _on_the_flows_clock(name):
            size = direction.size(flow.observables)
            ax.plot(flow.ts, size, color="black", linewidth=1.4, linestyle=(0, (4, 3)))
        ax.plot([], [], color=colour, label=labels[direction.stage])
    if _on_the_flows_clock(name):
        ax.plot([], [], "k", linestyle=(0, (4, 3)), label="flow")
    ax.set_xlim(0, float(runs[0].training.ts[-1]))
    ax.set(xlabel=_clock(name), ylabel="singular value")


def _clock(name: str) -> str:
    if name == "momentum":
        return r"time $t = \sum \eta/(1-\beta)$"
    return r"time $t = \sum \eta$"


if __name__ == "__main__":
    run(__doc__, measure, draw)
