"""Experiment 29: the time of focus over 1,000 seeds, against the log(1/ε) law.

**Definitions.** The reference instance from entries N(0, ε²), as experiment 28: the
speed ‖∇L‖ has its first prominent maximum where condensation, its second where focus is
fastest. 1,000 seeds at each of five scales ε, in ensembles.

**Theory.** Near θ = 0 only (W0ᵀπ̂ - W1ĉ)/√2 grows, at rate μ, with π̂ = π/‖π‖ and ĉ
the unit vector along 1/d - π: m numbers N(0, ε²), a length εχ_m. Near θ¹ only
(WQᵀα + WKᵀα)/√2 does, at rate κ: k numbers, a length εχ_k, which condensation has
hardly changed. So condensation comes at

    t₁ = (log(1/ε) - log χ_m)/μ + c₁

and focus at

    t₂ = (log(1/ε) - log χ_m)/μ + (log(1/ε) - log χ_k)/κ + c₂,

with constants of the chain: medians on lines in log(1/ε) of slopes 1/μ and 1/μ + 1/κ,
and about them distributions that do not depend on ε, of variances v_m/μ² and
v_m/μ² + v_k/κ², v_n = Var log χ_n = ψ'(n/2)/4.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _closed_forms import FirstSaddle, first_rate
from _common import Claim, Measurement, reference_problem, run
from matplotlib.figure import Figure
from phase_diagrams import maxima
from scipy import special, stats

import gradflow
from gradflow.plotting import COLOURS

SCALES = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
WIDTH, BLOCK, TIMES, RTOL = 10, 100, 1200, 1e-7


class Law(NamedTuple):
    """What theory says of both times."""

    slopes: np.ndarray
    deviations: np.ndarray

    @staticmethod
    def of_reference() -> "Law":
        problem: Any = reference_problem(WIDTH)
        chain = problem.population.chain
        rates = np.array([first_rate(chain.stationary), FirstSaddle.of(chain).kappa])
        variance = special.polygamma(1, WIDTH / 2) / 4
        return Law(np.cumsum(1 / rates), np.sqrt(variance * np.cumsum(1 / rates**2)))

    def draws(self, count: int) -> np.ndarray:
        """Both times less their constants, of so many seeds."""
        lengths = np.random.default_rng(0).chisquare(WIDTH, (count, 2))
        return -np.cumsum(0.5 * np.log(lengths) * np.diff(self.slopes, prepend=0.0), 1)


def focus_times(point: dict[str, Any]) -> dict[str, Any]:
    """Both times of a block of seeds."""
    problem, scale = reference_problem(WIDTH), point["scale"]
    first = point["block"] * BLOCK
    seeds = range(first, first + point["members"])
    horizon = 1.3 * Law.of_reference().slopes[1] * np.log(1 / scale) + 50.0
    ensemble = gradflow.integrate_ensemble(
        problem,
        gradflow.stack([problem.init(seed=seed, scale=scale) for seed in seeds]),
        float(horizon),
        # Evenly: the maximum at t = 240 is no wider than that at t = 30.
        ts=np.linspace(0.0, horizon, TIMES),
        rtol=RTOL,
        observables=(),
        save_params=False,
    )
    worst = max(max(flow.certificate.drift.values()) for flow in ensemble)
    times = [maxima(ensemble.ts[1:], speed[1:], 2) for speed in ensemble.speed]
    return {"times": np.stack(times), "drift": worst}


def measure(quick: bool, out: Path) -> Measurement:
    scales = SCALES[-2:] if quick else SCALES
    blocks, members = (1, 40) if quick else (10, BLOCK)
    store = out / f"focus-time-{blocks}x{members}"
    grid = {"scale": scales, "block": range(blocks), "members": [members]}
    workers = 1 if quick else None  # each has to compile
    gradflow.sweep(focus_times, grid, store=store, workers=workers, progress=True)
    data = gradflow.open_store(store)
    times = data.times.values.reshape(len(scales), blocks * members, 2)
    law, folds = Law.of_reference(), np.log(1 / np.array(scales))
    medians = np.nanmedian(times, axis=1)
    deviations = np.nanstd(times, axis=1, ddof=1)
    slopes = [np.polyfit(folds[-3:], medians[-3:, i], 1)[0] for i in (0, 1)]
    # The law holds as ε → 0: its distribution is held to the smallest scale.
    last = times[-1] - medians[-1]
    drawn = law.draws(100_000)
    drawn = drawn - np.median(drawn, axis=0)
    tests: Any = [stats.ks_2samp(last[:, i], drawn[:, i]) for i in (0, 1)]
    distances = [float(test.statistic) for test in tests]
    names = ("condensation", "focus")
    count = times.shape[1]
    loose = 4 / np.sqrt(2 * count)
    claims = [
        *(Claim(f"{name}: delay per e-fold of 1/ε", law.slopes[i], slopes[i],
                0.1 if quick else 0.01) for i, name in enumerate(names)),
        *(Claim(f"{name}: deviation at ε = {scales[-1]:g}", law.deviations[i],
                deviations[-1, i], loose) for i, name in enumerate(names)),
        *(Claim(f"{name}: Kolmogorov's distance to the law, less its 0.1 % level",
                0.0, max(0.0, distances[i] - 1.95 / np.sqrt(count)), 0.0)
          for i, name in enumerate(names)),
        Claim("flows without a focus", 0.0, int(np.isnan(times).any(-1).sum()), 0.0),
        Claim("drift of conserved quantities", 0.0, float(data.drift.max()), 1e-5),
    ]  # fmt: skip
    numbers = {
        "scales": scales,
        "times": times if quick else None,
        "medians": medians,
        "deviations": deviations,
        "law_deviations": law.deviations,
        "slopes": slopes,
        "law_slopes": law.slopes,
        "kolmogorov": distances,
        "seeds": count,
    }
    text = f"{times.shape[0] * count:,} flows, {count:,} seeds at each scale"
    return Measurement(claims, numbers, (scales, times, law, drawn), text)


def draw(found: Measurement) -> Figure:
    scales, times, law, drawn = found.data
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    inverse, folds = 1 / np.array(scales), np.log(1 / np.array(scales))
    for i, (name, colour) in enumerate(
        zip(("condensation", "focus"), COLOURS, strict=False)
    ):
        low, middle, high = np.nanquantile(times[..., i], (0.05, 0.5, 0.95), axis=1)
        left.errorbar(
            inverse, middle, (middle - low, high - middle), fmt="o", color=colour,
            capsize=3, label=f"{name}: median, 5 % and 95 %",
        )  # fmt: skip
        line = middle[-1] + law.slopes[i] * (folds - folds[-1])
        left.plot(
            inverse, line, color=colour, label=f"slope {law.slopes[i]:.3f} per e-fold"
        )
    left.set_xscale("log")
    left.set_ylim(bottom=0)
    left.set_xlabel(r"$1/\epsilon$")
    left.set_ylabel("time $t$")
    left.set_title("(a) Fastest, over seeds", loc="left")
    left.legend(fontsize="small", loc="upper left")
    last = times[-1, :, 1] - np.nanmedian(times[-1, :, 1])
    right.hist(
        last, bins=40, density=True, color=COLOURS[1], alpha=0.4,
        label=f"{len(last):,} seeds",
    )  # fmt: skip
    grid = np.linspace(drawn[:, 1].min(), np.quantile(drawn[:, 1], 0.9999), 300)
    density = stats.gaussian_kde(drawn[:20_000, 1])(grid)
    right.plot(
        grid, density, color="black",
        label=r"$-\log(\chi_m)/\mu - \log(\chi_k)/\kappa$",
    )  # fmt: skip
    right.set_xlabel("time of focus, less its median")
    right.set_ylabel("density")
    right.set_title(rf"(b) $\epsilon = 10^{{{np.log10(scales[-1]):.0f}}}$", loc="left")
    right.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    run(__doc__, measure, draw, keeps=True)
