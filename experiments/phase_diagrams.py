"""Experiment 28, phase diagrams: the times of the stages over two pairs of parameters.

**Definitions.** The speed ‖∇L‖ of a flow has a prominent maximum (it rises and falls by
a factor of two around it) for each of its stages: the first is where condensation is
fastest, the second is the end of focus, and, in the chains of the second diagram, the
third is where a new direction is fastest. Their times are found on 2,400 saved times by
a parabola through log ‖∇L‖ over log t. A row of a diagram is one ensemble, and a
diagram is one sweep over rows; results are kept in the output directory.

**First diagram.** Over stickiness λ and the frequency π₁ of the most common token, with
the others in proportion 19 : 5 : 1, at two initial scales ε. Theory: condensation grows
at rate μ = ‖π‖·‖π - 1/d‖ and focus at rate κ (see `_closed_forms.py`), so that with
each e-fold of 1/ε they come later by

    1/μ  and  1/μ + 1/κ.

**Second diagram.** Over the initial scale ε and the split δ of the rare frequencies,
π = (0.7, 0.1+δ, 0.1, 0.1-δ), λ = 1/2. Theory (experiment 6): a transverse direction
grows at rate ρ = σ₁(G_M) ∝ δ from A ∝ ε until it saturates at S ∝ √δ, and is fastest at

    t = (log(√δ/ε) + c)/ρ

with one constant c for all δ and ε.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _closed_forms import FirstSaddle, first_rate
from _common import Claim, Measurement, run, sticky_problem
from _rank_one import gradients, orbit
from matplotlib.figure import Figure
from scipy.signal import find_peaks

import gradflow

WIDTH, TIMES, RTOL = 10, 2400, 1e-8
OTHERS = np.array([0.19, 0.05, 0.01]) / 0.25
SCALES = (1e-6, 1e-8)
PROMINENCE, SLOWEST = np.log(2.0), 1e-10
"""The least rise and fall of log ‖∇L‖ around a prominent maximum, and the speed below
which it is only rounding, as where a flow stalls."""
RANK_ONE_HORIZON = 1500.0


class Axes2(NamedTuple):
    """The values along both axes of both diagrams."""

    stickiness: np.ndarray
    frequency: np.ndarray
    scale: np.ndarray
    split: np.ndarray

    @staticmethod
    def of(size: int) -> "Axes2":
        return Axes2(
            np.linspace(0.1, 0.9, size),
            np.linspace(0.4, 0.9, size),
            np.geomspace(1e-9, 1e-5, size),
            np.geomspace(1e-4, 1e-2, size),
        )


def measure(quick: bool, out: Path) -> Measurement:
    sides = Axes2.of(3 if quick else 24)
    sweeps = {
        "focus": (
            focus_row,
            {"stickiness": sides.stickiness.tolist(), "scale": list(SCALES)},
        ),
        "split": (split_row, {"split": sides.split.tolist()}),
    }
    found = {}
    for name, (task, grid) in sweeps.items():
        size = len(sides.frequency)
        store = out / f"phase-diagram-{name}-{size}"
        gradflow.sweep(
            task,
            grid | {"size": [size]},
            store=store,
            workers=1 if quick else None,  # each has to compile
            progress=True,
        )
        data = gradflow.open_store(store).isel(size=0)
        found[name] = {key: data[key].values for key in data.data_vars}
    first = _first(sides, found["focus"])
    second = _second(sides, found["split"])
    flows = 2 * first.focus[0].size + second.time.size
    drift = max(np.nanmax(found[name]["drift"]) for name in found)
    energy = max(np.nanmax(found[name]["energy"]) for name in found)
    claims = [
        Claim("delay of condensation per e-fold of 1/ε, times μ, worst", 1.0,
              _worst(first.per_fold(0) * first.mu), 0.01),
        Claim("delay of the end of focus, over 1/μ + 1/κ, worst", 1.0,
              _worst(first.per_fold(1) / (1 / first.mu + 1 / first.kappa)), 0.05),
        Claim("next cycle: slope of tρ in log(√δ/ε)", 1.0, second.slope, 0.02),
        Claim("next cycle: t/theory with one c, worst", 1.0,
              _worst(second.time / second.theory), 0.1),
        Claim("flows without their stages", 0.0, first.missing + second.missing, 0.0),
        Claim("energy imbalance, worst", 0.0, energy, 1e-6),
        Claim("drift of conserved quantities, worst", 0.0, drift, 1e-6),
    ]  # fmt: skip
    numbers = {
        "flows": flows,
        "stickiness": sides.stickiness,
        "frequency": sides.frequency,
        "scales": SCALES,
        "condensation": first.condensation,
        "focus": first.focus,
        "mu": first.mu,
        "kappa": first.kappa,
        "scale": sides.scale,
        "split": sides.split,
        "rho": second.rho,
        "next_cycle": second.time,
        "next_cycle_theory": second.theory,
        "constant": second.constant,
    }
    text = (
        f"{flows:,} flows. λ, π₁: end of focus at t = {first.focus[0].min():.4g} … "
        f"{first.focus[0].max():.4g} for ε = {SCALES[0]:g}. ε, δ: next cycle at t = "
        f"{second.time.min():.4g} … {second.time.max():.4g}; c = {second.constant:.3f}"
    )
    return Measurement(claims, numbers, (sides, first, second), text)


def _worst(ratios: Any) -> float:
    return float(ratios.flat[np.argmax(np.abs(ratios - 1))])


#
# The tasks: a row of a diagram
#


def focus_row(point: dict[str, Any]) -> dict[str, Any]:
    """All frequencies π₁ at one stickiness and one initial scale."""
    problems = [
        sticky_problem(_law(frequency), point["stickiness"], WIDTH)
        for frequency in Axes2.of(point["size"]).frequency
    ]
    rates = [
        (first_rate(chain.stationary), FirstSaddle.of(chain).kappa)
        for chain in (_chain(problem) for problem in problems)
    ]
    longest = max(1 / mu + 1 / kappa for mu, kappa in rates)
    starts = [problem.init(seed=0, scale=point["scale"]) for problem in problems]
    return peaks(problems, starts, 2.0 * longest * np.log(1 / point["scale"]), 2)


def split_row(point: dict[str, Any]) -> dict[str, Any]:
    """All initial scales at one split."""
    problem, scales = split_problem(point["split"]), Axes2.of(point["size"]).scale
    reduction = gradflow.RankOneProblem(problem.population)
    _, end = orbit(reduction, RANK_ONE_HORIZON)
    rho = float(np.linalg.norm(gradients(reduction, end.params).G_M, 2))
    starts = [problem.init(seed=0, scale=scale) for scale in scales]
    horizon = 1.5 * np.log(1 / scales[0]) / rho
    return peaks([problem] * len(starts), starts, horizon, 3) | {"rho": rho}


def _law(frequency: float) -> np.ndarray:
    return np.append(frequency, (1 - frequency) * OTHERS)


def _chain(problem: gradflow.Problem) -> gradflow.MarkovChain:
    return problem.population.chain


def split_problem(split: float) -> gradflow.Problem:
    return sticky_problem((0.7, 0.1 + split, 0.1, 0.1 - split), 0.5, WIDTH)


def peaks(problems: Any, starts: Any, horizon: float, count: int) -> dict[str, Any]:
    """The first `count` prominent maxima of each member's speed."""
    ensemble = gradflow.integrate_ensemble(
        problems,
        gradflow.stack(starts),
        float(horizon),
        ts=np.append(0.0, np.geomspace(1.0, horizon, TIMES)),
        rtol=RTOL,
        observables=(),
        save_params=False,
    )
    certificates = [flow.certificate for flow in ensemble]
    return {
        "peaks": np.stack(
            [maxima(ensemble.ts[1:], speed[1:], count) for speed in ensemble.speed]
        ),
        "energy": np.array(
            [c.energy_imbalance / c.energy_released for c in certificates]
        ),
        "drift": np.array([max(c.drift.values()) for c in certificates]),
    }


def maxima(ts: np.ndarray, speed: np.ndarray, count: int) -> np.ndarray:
    """Times of the first prominent maxima; NaN where there are fewer."""
    x, y = np.log(ts), np.log(speed)
    found = np.full(count, np.nan)
    peaks_at, _ = find_peaks(y, prominence=PROMINENCE, height=np.log(SLOWEST))
    for i, at in enumerate(peaks_at[:count]):
        a, b, _ = np.polyfit(x[at - 1 : at + 2] - x[at], y[at - 1 : at + 2], 2)
        found[i] = np.exp(x[at] - b / (2 * a))
    return found


#
# Comparison with theory
#


class First(NamedTuple):
    """Arrays over stickiness and frequency, with the times for each scale."""

    condensation: np.ndarray
    focus: np.ndarray
    mu: np.ndarray
    kappa: np.ndarray

    def per_fold(self, stage: int) -> np.ndarray:
        early, late = (self.condensation, self.focus)[stage]
        return (late - early) / np.log(SCALES[0] / SCALES[1])

    @property
    def missing(self) -> int:
        return int(np.isnan(self.focus).sum())


def _first(sides: Axes2, seen: dict[str, np.ndarray]) -> First:
    shape = (len(sides.stickiness), len(SCALES), len(sides.frequency), 2)
    times = seen["peaks"].reshape(shape)
    chains = [
        [gradflow.MarkovChain.sticky(_law(f), s) for f in sides.frequency]
        for s in sides.stickiness
    ]
    return First(
        times[..., 0].swapaxes(0, 1),
        times[..., 1].swapaxes(0, 1),
        np.array([[first_rate(c.stationary) for c in row] for row in chains]),
        np.array([[FirstSaddle.of(c).kappa for c in row] for row in chains]),
    )


class Second(NamedTuple):
    """Arrays over split and scale."""

    time: np.ndarray
    rho: np.ndarray
    log_ratio: np.ndarray
    """log(√δ/ε)."""

    @property
    def constant(self) -> float:
        """c, from the median."""
        return float(np.nanmedian(self.time * self.rho[:, None] - self.log_ratio))

    @property
    def theory(self) -> np.ndarray:
        return (self.log_ratio + self.constant) / self.rho[:, None]

    @property
    def slope(self) -> float:
        x, y = self.log_ratio.ravel(), (self.time * self.rho[:, None]).ravel()
        there = np.isfinite(y)
        return float(np.polyfit(x[there], y[there], 1)[0])

    @property
    def missing(self) -> int:
        return int(np.isnan(self.time).sum())


def _second(sides: Axes2, seen: dict[str, np.ndarray]) -> Second:
    ratio = np.log(np.sqrt(sides.split)[:, None] / sides.scale[None])
    return Second(seen["peaks"][..., 2], seen["rho"], ratio)


#
# The figure
#


def draw(found: Measurement) -> Figure:
    sides, first, second = found.data
    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _map(
        left,
        (sides.frequency, sides.stickiness),
        first.focus[0],
        np.log(1 / SCALES[0]) * (1 / first.mu + 1 / first.kappa),
        "time at which focus ends",
    )
    left.set_xlabel(r"frequency $\pi_1$ of the most common token")
    left.set_ylabel(r"stickiness $\lambda$")
    left.set_title(
        rf"(a) $\epsilon = 10^{{{np.log10(SCALES[0]):.0f}}}$; dashed: "
        r"$\log\frac{1}{\epsilon}\,(1/\mu + 1/\kappa)$",
        loc="left",
    )
    _map(
        right,
        (sides.scale, sides.split),
        second.time,
        second.theory,
        "time of the next cycle",
    )
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel(r"initial scale $\epsilon$")
    right.set_ylabel(r"split $\delta$ of the rare frequencies")
    right.set_title(
        r"(b) dashed: $(\log(\sqrt{\delta}/\epsilon) + c)\,/\,\rho(\delta)$", loc="left"
    )
    return figure


def _map(ax: Any, sides: Any, times: Any, theory: Any, what: str) -> None:
    """Draw the measured times as colours with white contours, and the theory's contours
    at the same levels, dashed."""
    x, y = sides
    logs = np.log10(times)
    image = ax.pcolormesh(x, y, logs, shading="gouraud", cmap="viridis")
    ticks = _levels(np.nanmin(logs), np.nanmax(logs))
    ax.contour(x, y, logs, levels=ticks, colors="white", linewidths=1.0)
    ax.contour(
        x, y, np.log10(theory), levels=ticks, colors="black", linewidths=1.3,
        linestyles="dashed",
    )  # fmt: skip
    bar = ax.figure.colorbar(image, ax=ax, label=what)
    bar.set_ticks(ticks, labels=[_power(10**tick) for tick in ticks])


def _power(value: float) -> str:
    if value < 9999:
        return f"{value:g}"
    exponent = int(np.floor(np.log10(value) + 1e-9))
    front = round(value / 10**exponent)
    factor = "" if front == 1 else rf"{front}\times"
    return f"${factor}10^{{{exponent}}}$"


def _levels(low: float, high: float) -> list[float]:
    """Contour levels 1, 2, 5 times a power of ten, or only powers if there are many."""
    decades = range(int(np.floor(low)), int(np.ceil(high)) + 1)
    steps = (1, 2, 5) if high - low < 2.5 else (1, 3)
    levels = [decade + np.log10(step) for decade in decades for step in steps]
    return [float(level) for level in levels if low < level < high]


if __name__ == "__main__":
    run(__doc__, measure, draw, keeps=True)
