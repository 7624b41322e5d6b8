"""Experiment 6, the degenerate point: what exchangeable rare tokens do to the flow.

**Claim.** If the rare tokens are exchangeable, the rank-one flow ends at a critical
point θ* where G_M = ∂L/∂M and G_Φ = ∂L/∂Φ both vanish. No direction grows there, and
the full flow stalls. A split δ of the rare frequencies makes it a saddle, which the
full flow leaves after a time of order log(√δ/ε)/δ.

**Definitions.** P = λI + (1-λ)1πᵀ with λ = 1/2 and π = (0.7, 0.1+δ, 0.1, 0.1-δ). θ* is
the end of the rank-one flow that leaves θ¹ by its focus, integrated until it rests and
polished by Newton's method on the rank-one loss. *Transverse* is the unstable
eigenvalue of the full Hessian at θ* across the rank-one manifold, by theory
μ = σ₁([G_M, k G_Φγ, q G_Φᵀγ]) (see `_rank_one.py`), here read off the full Hessian,
-λ_min, and off G_M. *Tangential* is that of the Hessian of the rank-one loss in its
2d+2 numbers, max(0, -λ_min); zero to rounding here, which is below any C δ². The next
cycle starts with a new direction: when the second singular value σ₂ of W0 is half of S,
what it comes to. (At S ∝ √δ the flow rests again; how it goes on is not measured here.)

**Theory.** μ ∝ δ, (m-1)-fold; tangential at most C δ². Across the manifold the top
singular pair (u, v) of G_M grows as A e^{μ(t-s)}, A = ‖uᵀW0 - vᵀW1ᵀ‖/√2 at a time s of
the stall, and saturates at σ₂ = S as a pitchfork does,

    σ₂² = x²/(1 + x²/S²),  x = (A/√2) e^{μ(t-s)},

so that it is at S/2 at the time s + log(√(2/3)·S/A)/μ; A ∝ ε gives a time that grows by
1/μ with each e-fold of the initial scale ε; S ∝ √δ.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from _common import Claim, Measurement, run, slope, sticky_problem
from _rank_one import gradients, of_M_and_Phi, orbit
from matplotlib.figure import Figure

import gradflow
from gradflow.landscape import CriticalPoint, hessian_spectrum
from gradflow.plotting import COLOURS

STICKINESS = 0.5
SETTLED = 1500.0
"""When the rank-one flow rests: its slowest rate is 0.047."""
STALLED = 3000.0
"""When the full flow does, and nothing has grown yet for δ ≤ 1e-3."""
SCALE = 1e-8
LARGEST_SPLIT = 1e-3


class End(NamedTuple):
    """The end of the rank-one flow at a split."""

    point: CriticalPoint
    G_M: np.ndarray
    G_Phi: np.ndarray
    spectrum: np.ndarray
    """Of the full Hessian."""

    @property
    def transverse(self) -> float:
        return float(-self.spectrum[0])

    @property
    def tangential(self) -> float:
        return max(0.0, -float(self.point.eigenvalues[0]))

    @property
    def multiplicity(self) -> int:
        return int(np.sum(np.abs(self.spectrum / self.spectrum[0] - 1) < 1e-3))

    @property
    def error(self) -> float:
        """How far θ* may be from the critical manifold: ‖∇L‖ over the least λ > 0."""
        curved = self.point.eigenvalues[self.point.eigenvalues > 1e-6]
        return float(self.point.gradient_norm / curved[0])


class Escape(NamedTuple):
    """How a full flow leaves the degenerate point."""

    split: float
    scale: float
    times: np.ndarray
    second: np.ndarray
    """σ₂ of W0."""
    largest: float
    """S."""
    start: float
    """A."""
    rate: float
    time: float
    """When σ₂ is half of S."""

    @property
    def expected(self) -> float:
        return STALLED + np.log(np.sqrt(2 / 3) * self.largest / self.start) / self.rate

    @property
    def theory(self) -> np.ndarray:
        """σ₂ of the pitchfork at the times."""
        exponent = np.minimum(self.rate * (self.times - STALLED), 300.0)
        x = self.start / np.sqrt(2) * np.exp(exponent)
        return x / np.sqrt(1 + (x / self.largest) ** 2)


class Seen(NamedTuple):
    """For the figure."""

    splits: np.ndarray
    ends: list[End]
    escapes: list[Escape]
    times: np.ndarray
    stalled: dict[str, np.ndarray]
    """The flow without a split: speed, ‖G_M‖, ‖G_Φ‖."""


def measure(quick: bool) -> Measurement:
    splits = np.geomspace(1e-5, LARGEST_SPLIT, 5 if quick else 9)
    degenerate, ends = end_at(0.0), [end_at(split) for split in splits]
    mu = np.array([end.transverse for end in ends])
    tangential = np.array([end.tangential for end in ends])

    horizon = 1e5 if quick else 1e6
    times, stalled = stall(horizon)
    chosen = splits[[2, 4]] if quick else splits[::2]
    escapes = [escape(split, SCALE) for split in chosen]
    scales = [1e-6] if quick else [1e-6, 1e-7, 1e-9]
    others = [escape(LARGEST_SPLIT, scale) for scale in scales]
    same_split = [escapes[-1], *others]
    e_folds = np.log([1 / e.scale for e in same_split])
    per_fold = np.polyfit(e_folds, [e.time for e in same_split], 1)[0]

    late = times >= STALLED
    second = stalled["second"]
    width = 10
    claims = [
        Claim("δ = 0: ‖G_M‖ at θ*", 0.0, _norm(degenerate.G_M), 1e-14),
        Claim("δ = 0: ‖G_Φ‖ at θ*", 0.0, _norm(degenerate.G_Phi), 1e-14),
        Claim("δ = 0: unstable eigenvalue", 0.0, degenerate.transverse, 1e-14),
        Claim(f"δ = 0: speed at t = {horizon:g}", 0.0, stalled["speed"][-1], 1e-14),
        Claim(f"δ = 0: growth of σ₂(W0), t = {STALLED:g} to {horizon:g}", 1.0,
              second[-1] / second[late][0], 1e-6),
        Claim("slope of the transverse eigenvalue in δ", 1.0, slope(splits, mu), 0.05),
        Claim("multiplicity m-1, least", width - 1, min(e.multiplicity for e in ends),
              0.0),
        Claim("multiplicity m-1, most", width - 1, max(e.multiplicity for e in ends),
              0.0),
        Claim("transverse eigenvalue over σ₁(G_M), worst", 1.0,
              _worst([e.transverse / _norm(e.G_M, 2) for e in ends]), 1e-6),
        Claim("largest tangential eigenvalue", 0.0, tangential.max(), 1e-14),
        *(Claim(f"time of the next cycle, δ = {e.split:.1e}, ε = {e.scale:g}",
                e.expected, e.time, 0.02) for e in [*escapes, *others]),
        Claim("its growth with log(1/ε), times μ", 1.0, per_fold * mu[-1], 0.02),
        Claim("slope of S in δ", 0.5,
              slope([e.split for e in escapes], [e.largest for e in escapes]), 0.05),
    ]  # fmt: skip
    numbers = {
        "splits": splits,
        "transverse": mu,
        "transverse_over_split": mu / splits,
        "second_G_M_singular_value": [
            np.linalg.svd(e.G_M, compute_uv=False)[1] for e in ends
        ],
        "tangential": tangential,
        "tangential_lowest_eigenvalue": [e.point.eigenvalues[0] for e in ends],
        "tangential_over_split_squared": tangential / splits**2,
        "multiplicity": [e.multiplicity for e in ends],
        "slope": slope(splits, mu),
        "end_gradient_norm": [e.point.gradient_norm for e in (degenerate, *ends)],
        "end_newton_distance": [e.point.distance for e in (degenerate, *ends)],
        "end_error_bound": [e.error for e in (degenerate, *ends)],
        "ends": [
            {n: getattr(e.point.params, n) for n in ("gamma", "beta", "q", "k")}
            for e in (degenerate, *ends)
        ],
        "degenerate_G_M": np.linalg.norm(degenerate.G_M),
        "degenerate_G_Phi": np.linalg.norm(degenerate.G_Phi),
        "degenerate_lowest": degenerate.spectrum[:5],
        "stall_times": times,
        "stall_speed": stalled["speed"],
        "stall_G_M": stalled["G_M"],
        "stall_G_Phi": stalled["G_Phi"],
        "stall_second": second,
        "escapes": [
            {
                "split": e.split,
                "scale": e.scale,
                "time": e.time,
                "expected": e.expected,
                "rate": e.rate,
                "largest": e.largest,
            }
            for e in [*escapes, *others]
        ],
        "escape_slope": slope([e.split for e in escapes], [e.time for e in escapes]),
        "per_fold": per_fold,
    }
    worst = max(e.error for e in (degenerate, *ends))
    text = (
        f"rank-one end points: ‖∇L‖ ≤ {max(numbers['end_gradient_norm']):.1e}, within "
        f"{worst:.1e} of the critical manifold; μ/δ = {mu[0] / splits[0]:.5f} at "
        f"δ = {splits[0]:g}, {mu[-1] / splits[-1]:.5f} at {splits[-1]:g}"
    )
    return Measurement(
        claims, numbers, Seen(splits, ends, escapes, times, stalled), text
    )


def _norm(G: np.ndarray, order: int | None = None) -> float:
    return float(np.linalg.norm(G, order))


def _worst(ratios: list[float]) -> float:
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def problem_at(split: float) -> gradflow.Problem:
    return sticky_problem((0.7, 0.1 + split, 0.1, 0.1 - split), STICKINESS)


def end_at(split: float) -> End:
    problem = problem_at(split)
    reduction = gradflow.RankOneProblem(problem.population)
    _, point = orbit(reduction, SETTLED)
    there = gradients(reduction, point.params)
    full = reduction.embed(point.params, problem.model.width)
    spectrum = hessian_spectrum(problem, full).eigenvalues
    return End(point, there.G_M, there.G_Phi, spectrum)


def flow_at(split: float, scale: float, t1: float) -> gradflow.Flow:
    problem = problem_at(split)
    return gradflow.integrate(
        problem, problem.init(scale=scale), t1, rtol=1e-10, observables=()
    )


def second_singular_value(params: Any) -> Any:
    return jnp.linalg.svd(params.W0, compute_uv=False)[1]


def _both_gradients(pi: Any, P: Any, params: Any) -> Any:
    M = params.W0 @ params.W1
    Phi = params.W0 @ params.WQ @ params.WK.T @ params.W0.T
    norms = [jnp.linalg.norm(G) for G in of_M_and_Phi(pi, P, M, Phi)]
    return *norms, second_singular_value(params)


def stall(t1: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The full flow without a split, on a logarithmic clock."""
    flow = flow_at(0.0, 1e-6, t1)
    problem: Any = flow.problem
    chain = problem.population.chain
    watch = partial(
        _both_gradients, jnp.asarray(chain.stationary), jnp.asarray(chain.transition)
    )
    shown = flow.ts >= 1
    G_M, G_Phi, second = flow.observe(watch, flow.ts[shown])
    seen = {"speed": flow.speed[shown], "G_M": G_M, "G_Phi": G_Phi, "second": second}
    return flow.ts[shown], seen


def escape(split: float, scale: float) -> Escape:
    """The full flow until σ₂ has come to its largest, and how the theory says it."""
    problem = problem_at(split)
    reduction = gradflow.RankOneProblem(problem.population)
    _, point = orbit(reduction, SETTLED)
    U, sigma, Vt = np.linalg.svd(gradients(reduction, point.params).G_M)
    t1 = 1.5 * np.log(1 / scale) / sigma[0]
    flow = flow_at(split, scale, t1)
    state = flow.at(STALLED)
    alpha = np.asarray(reduction.directions(state)[0])
    grown = (U[:, 0] @ np.asarray(state.W0) - np.asarray(state.W1) @ Vt[0]) / np.sqrt(2)
    grown = grown - (grown @ alpha) * alpha
    times = np.linspace(STALLED, t1, 2000)
    second = flow.observe(second_singular_value, times)
    half = int(np.argmax(second > second[-1] / 2))
    two = slice(half - 1, half + 1)
    time = float(np.interp(np.log(second[-1] / 2), np.log(second[two]), times[two]))
    return Escape(
        split=float(split),
        scale=scale,
        times=times,
        second=second,
        largest=float(second[-1]),
        start=float(np.linalg.norm(grown)),
        rate=float(sigma[0]),
        time=time,
    )


def draw(found: Measurement) -> Figure:
    seen: Seen = found.data
    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_stall(seen, axes[0, 0])
    _draw_eigenvalues(seen, axes[0, 1])
    _draw_escapes(seen, axes[1, 0])
    _draw_times(seen, axes[1, 1])
    return figure


def _draw_stall(seen: Seen, ax: Any) -> None:
    names = {
        "speed": r"speed $\|\nabla L\|$",
        "G_M": r"$\|G_M\|$",
        "G_Phi": r"$\|G_\Phi\|$",
    }
    for colour, (name, label) in zip(COLOURS, names.items(), strict=False):
        ax.loglog(seen.times, seen.stalled[name], ".-", color=colour, label=label)
    _shade_rounding(ax)
    ax.set_ylim(1e-18, 10)
    ax.set_xlabel("time $t$")
    ax.set_ylabel("norm")
    ax.set_title(r"(a) Exchangeable rare tokens ($\delta=0$): a stall", loc="left")
    ax.legend(fontsize="small", loc="upper right")


def _draw_eigenvalues(seen: Seen, ax: Any) -> None:
    x = seen.splits
    mu = np.array([e.transverse for e in seen.ends])
    floor = np.array([abs(e.point.eigenvalues[0]) for e in seen.ends])
    ax.loglog(x, mu[0] * x / x[0], color="black", label=r"slope 1 in $\delta$")
    ax.loglog(x, x**2, ":", color="black", label=r"$\delta^2$")
    ax.loglog(x, mu, "o", color=COLOURS[0], label=r"transverse, $(m-1)$-fold")
    ax.loglog(
        x, floor, "s", color=COLOURS[1], markersize=4,
        label=r"tangential: $|\lambda_{\min}|$",
    )  # fmt: skip
    _shade_rounding(ax)
    ax.set_ylim(1e-18, 1)
    ax.set_xlabel(r"split $\delta$ of the rare frequencies")
    ax.set_ylabel(r"unstable eigenvalue at $\theta^*$")
    ax.set_title("(b) Eigenvalues", loc="left")
    ax.legend(fontsize="small", loc="center", bbox_to_anchor=(0.5, 0.3), ncols=2)


def _draw_escapes(seen: Seen, ax: Any) -> None:
    for colour, e in zip(COLOURS, seen.escapes, strict=False):
        ax.loglog(e.times, e.theory, color=colour)
        at = np.unique(np.geomspace(1, len(e.times) - 1, 40).astype(int))
        ax.loglog(
            e.times[at], e.second[at], "o", color=colour, markersize=3.5,
            label=rf"$\delta$ = {_power(e.split)}",
        )  # fmt: skip
    ax.plot([], [], color="0.3", label="theory: pitchfork")
    ax.set_ylim(top=1)
    ax.set_xlabel("time $t$")
    ax.set_ylabel(r"second singular value $\sigma_2$ of $W_0$")
    ax.set_title(r"(c) A second direction grows, $\epsilon=10^{-8}$", loc="left")
    ax.legend(fontsize="small", loc="upper left")


def _draw_times(seen: Seen, ax: Any) -> None:
    splits = [e.split for e in seen.escapes]
    ax.loglog(
        splits, [e.expected for e in seen.escapes], color="black",
        label=r"$s + \log(\sqrt{2/3}\,S/A)/\mu$",
    )  # fmt: skip
    ax.loglog(splits, [e.time for e in seen.escapes], "o", color=COLOURS[0],
              label="full flow")  # fmt: skip
    ax.set_xlabel(r"split $\delta$ of the rare frequencies")
    ax.set_ylabel("time of the next cycle")
    ax.set_title(r"(d) Next cycle, $\epsilon=10^{-8}$", loc="left")
    ax.legend(fontsize="small", loc="upper right")


def _shade_rounding(ax: Any) -> None:
    ax.axhspan(1e-18, 1e-15, color="0.9", zorder=0)
    ax.text(
        0.04, 2e-18, "rounding", color="0.35", fontsize="small",
        transform=ax.get_yaxis_transform(),
    )  # fmt: skip


def _power(value: float) -> str:
    exponent = int(np.floor(np.log10(value) + 1e-9))
    factor = value / 10**exponent
    front = "" if abs(factor - 1) < 0.01 else rf"{factor:.1f}\times"
    return rf"${front}10^{{{exponent}}}$"


if __name__ == "__main__":
    run(__doc__, measure, draw)
