"""Experiment 9: where the theory breaks down as the initial scale ε grows to one.

Claim. The stages of *Focus and Dilution* require small initial weights. With entries
N(0, ε²) on the reference instance, and ε from 1e-5 to 1,

- the rate of condensation tends to ‖π‖·‖π - 1/d‖ and that of focus to κ as ε → 0;
- W0 becomes proportional to παᵀ near θ¹, and Φ to ππᵀ in focus, as ε → 0;
- as ε grows these features fade, and at order one there are no such stages.

Three scales say where:

- `sequence_ends`: the smallest ε tried at which some seed's stages differ from those of
  the smallest ε;
- `cycle_ends`: the same for the first cycle alone, that is, the first four stages;
- `rates_end`: the smallest ε tried at which some seed's rate of condensation or of
  focus is off by more than 10 %, or cannot be measured.

The rate of condensation is the largest d log s₁(W0)/dt. The rate of focus is
d log √σ₁(WQ WKᵀ)/dt where it is steadiest as the flow leaves the plateau of θ¹. The
cosines are |u₁ᵀπ|/‖π‖ where the flow is slowest near θ¹, with u₁ the leading left
singular vector of W0, and the largest ⟨Φ, ππᵀ⟩/(‖Φ‖‖π‖²) in the first focus.
"""

from typing import Any

import numpy as np
from _bars import draw_stages
from _common import Claim, Measurement, reference_problem, run
from _watch import follow
from matplotlib.figure import Figure

import gradflow

HORIZON = 3e4
OFF = 0.1
SEEDS = (0, 1, 2)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def measure(quick: bool) -> Measurement:
    exponents = np.array([-5, -3, -1.5, 0]) if quick else np.arange(-5, 0.1, 0.5)
    scales = 10.0**exponents
    problem = reference_problem()
    origin, theta1 = problem.known_saddles
    rows = [
        _row(problem, float(scale), seed)
        for scale in scales
        for seed in (SEEDS[:1] if quick else SEEDS)
    ]
    for row in rows:
        row["condensation_error"] = abs(row["condensation_rate"] / origin.rate - 1)
        row["focus_error"] = abs(row["focus_rate"] / theta1.rate - 1)
    expected = rows[0]["names"]
    same = _per_scale(rows, lambda row: row["names"] == expected)
    measured = _per_scale(
        rows,
        lambda row: row["condensation_error"] <= OFF and row["focus_error"] <= OFF,
    )
    smallest = [row for row in rows if row["scale"] == scales[0]]

    def worst(key: str, of: Any) -> float:
        return float(of([row[key] for row in smallest]))

    claims = [
        Claim(
            f"ε = {scales[0]:.0e}: rate of condensation",
            origin.rate,
            worst("condensation_rate", min),
            1e-3,
        ),
        Claim(
            f"ε = {scales[0]:.0e}: rate of focus, κ",
            theta1.rate,
            worst("focus_rate", min),
            0.01,
        ),
        Claim(f"ε = {scales[0]:.0e}: W0 ∥ παᵀ", 1.0, worst("condensation", min), 1e-4),
        Claim(f"ε = {scales[0]:.0e}: Φ ∥ ππᵀ", 1.0, worst("phi", min), 1e-3),
        Claim(f"ε = {scales[0]:.0e}: cycles", 2, worst("cycles", min), 0),
        Claim(
            f"ε = {scales[-1]:.0e}: seeds with these stages",
            0,
            sum(row["names"] == expected for row in rows if row["scale"] == scales[-1]),
            0,
        ),
    ]
    cycle = _per_scale(rows, lambda row: row["names"][:4] == expected[:4])
    ends, off = _first_from(scales, same), _first_from(scales, measured)
    numbers = {
        "scales": scales,
        "rows": rows_as_data(rows),
        "expected": expected,
        "sequence_ends": ends,
        "cycle_ends": _first_from(scales, cycle),
        "rates_end": off,
    }
    text = "\n".join(
        [
            _table(rows),
            f"stages differ from ε = {ends:.2g} on, those of the first cycle from "
            f"ε = {numbers['cycle_ends']:.2g}; a rate is off by more than {OFF:.0%} "
            f"from ε = {off:.2g} on",
        ]
    )
    return Measurement(claims, numbers, (rows, ends, off), text)


def _row(problem: gradflow.Problem, scale: float, seed: int) -> dict[str, Any]:
    w = follow(problem, scale=scale, t1=HORIZON, seed=seed)
    focus = w.first_focus
    phi = float("nan")
    if focus is not None:
        phi = float(np.max(w.seen["phi"][w.within(focus.start, focus.end)]))
    return {
        "scale": scale,
        "seed": seed,
        "names": w.stages.names,
        "boundaries": w.stages.boundaries,
        "cycles": max((s.cycle for s in w.stages), default=0),
        "condensation_rate": w.condensation_rate,
        "focus_rate": w.focus_rate,
        "condensation": w.at_rest("condensation"),
        "phi": phi,
        "final_loss": float(w.flow.loss[-1]),
        "stages": w.stages,
    }


def rows_as_data(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "stages"} for row in rows]


def _per_scale(rows: list[dict[str, Any]], holds: Any) -> dict[float, bool]:
    """For each scale, whether the condition is true for all seeds."""
    found: dict[float, bool] = {}
    for row in rows:
        found[row["scale"]] = found.get(row["scale"], True) and bool(holds(row))
    return found


def _first_from(scales: Any, holds: dict[float, bool]) -> float:
    """The smallest scale at which the condition is false; infinite if it never is."""
    return min((float(s) for s in scales if not holds[float(s)]), default=float("inf"))


def _table(rows: list[dict[str, Any]]) -> str:
    short = {"new direction": "new", "condensation": "cond"}
    lines = [
        f"{'ε':>8} {'seed':>4} {'cycles':>6} {'cond off':>8} {'κ off':>8} "
        f"{'1-cos W0':>8} {'1-cos Φ':>8}  stages"
    ]
    for row in rows:
        names = ", ".join(str(short.get(n, n)) for n in row["names"])
        lines.append(
            f"{row['scale']:>8.1e} {row['seed']:>4} {row['cycles']:>6} "
            f"{row['condensation_error']:>8.1e} {row['focus_error']:>8.1e} "
            f"{1 - row['condensation']:>8.1e} {1 - row['phi']:>8.1e}  {names}"
        )
    return "\n".join(lines)


def draw(measurement: Measurement) -> Figure:
    rows, ends, off = measurement.data
    figure = Figure(figsize=(11.5, 7.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # pyright: ignore
    (errors, bars), (cosines, counts) = figure.subplots(2, 2)
    x = np.array([row["scale"] for row in rows])
    for ax, keys, labels in (
        (
            errors,
            ("condensation_error", "focus_error"),
            (r"condensation, $\|\pi\|\|\pi-1/d\|$", r"focus, $\kappa$"),
        ),
        (
            cosines,
            ("condensation", "phi"),
            (r"$W_0$ and $\pi\alpha^\top$", r"$\Phi$ and $\pi\pi^\top$"),
        ),
    ):
        for key, label, colour in zip(keys, labels, COLOURS, strict=False):
            y = np.array([row[key] for row in rows])
            y = y if key.endswith("error") else np.maximum(1 - y, 1e-16)
            ax.plot(x, y, "o", color=colour, markersize=4, alpha=0.6)
            middles = [
                np.nanmedian(y[x == s]) if np.any(np.isfinite(y[x == s])) else np.nan
                for s in np.unique(x)
            ]
            ax.plot(np.unique(x), middles, color=colour, label=label)
        ax.set(xscale="log", yscale="log", xlabel=r"initial scale $\varepsilon$")
        ax.legend(fontsize="small", loc="lower right")
    errors.axhline(OFF, color="0.3", linestyle=":", linewidth=1)
    errors.set_ylabel("relative error of the rate")
    errors.set_title("(a) Rates", loc="left")
    cosines.set_ylabel("1 - cosine")
    cosines.set_title("(c) Directions", loc="left")
    counts.plot(
        x, [row["cycles"] for row in rows], "o", color=COLOURS[0], label="cycles"
    )
    counts.plot(
        x,
        [len(row["names"]) for row in rows],
        "s",
        color=COLOURS[1],
        markerfacecolor="none",
        label="stages",
    )
    counts.set(xscale="log", xlabel=r"initial scale $\varepsilon$", ylabel="number")
    counts.set_ylim(-0.5, 12.5)
    counts.set_title("(d) Stages and cycles found", loc="left")
    for ax in (errors, cosines, counts):
        for where, style, name in (
            (ends, "--", "stages differ from here on"),
            (off, ":", "a rate is off by 10 % from here on"),
        ):
            if np.isfinite(where):
                ax.axvline(where, color="0.4", linestyle=style, zorder=0, label=name)
    counts.legend(fontsize="small", loc="upper right")
    by_scale = {f"{r['scale']:.1e}": r["stages"] for r in rows if r["seed"] == 0}
    draw_stages(bars, by_scale, 1.0, HORIZON)
    bars.set_ylabel(r"initial scale $\varepsilon$ (seed 0)")
    bars.set_title("(b) Stages", loc="left")
    return figure


if __name__ == "__main__":
    run(__doc__, measure, draw)
