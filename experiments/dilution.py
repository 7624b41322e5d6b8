"""Experiment 5, dilution: the rank-one flow, and when and how fast the full one leaves.

**Claim.** After θ¹ the full flow follows the rank-one manifold

    W0 = γαᵀ,  W1 = αβᵀ,  WQ = q αᾱᵀ,  WK = k αᾱᵀ,

whose flow is an ODE in 2d+2 numbers, past the peak of focus and through dilution; then
it parts from it, as the end point θ* of the rank-one flow is a saddle of the full loss.

**Definitions.** ε is the initial scale. The *orbit* is the rank-one flow that leaves θ¹
by its focus (q = k → 0). The *distance* is ‖θ - θ'‖/‖θ‖, θ' the state that the reduced
flow stands for, started by `gradflow.compare_rank_one` from the full flow's state when
it is nearest to the manifold. They have *parted* when it exceeds 1 %.

**Theory.**

- Rate. The Hessian of the full loss across the manifold is m-1 copies of
  [[0, B], [Bᵀ, 0]], B = [G_M, k G_Φγ, q G_Φᵀγ] (see `_rank_one.py`): the distance grows
  at the rate μ = σ₁(B) at θ*, an (m-1)-fold eigenvalue -μ of the full Hessian.
- Distance. Linearised about the reduced flow, Ẋ = -[[0, B(t)], [B(t)ᵀ, 0]] X with X the
  part of the start that projecting took away.
- Parting time. Noise of size ε must grow at θ⁰, θ¹ and θ*, one after the other:
  dt/d log(1/ε) = 1/(‖π‖·‖π - 1/d‖) + 1/κ + 1/μ.
- Embeddings. From θ¹ to θ*, γ of the frequent token grows and all the others fall, as
  on the orbit.
- Focus. The attention to the frequent token rises from 0.75, peaks at 0.773, 0.754 and
  0.751 (theory.md) and decays, for the rare queries, as on the orbit; query 0 keeps
  its focus.
"""

from typing import Any, NamedTuple

import numpy as np
from _common import REFERENCE_LAW, Claim, Measurement, reference_problem, run
from _rank_one import SOLVER, Gradients, gradients, orbit, rate_across
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import gradflow
from gradflow.landscape import hessian_spectrum
from gradflow.plotting import COLOURS

SCALE = 1e-6
FITTED = (1e-4, 1e-2)
"""Distances between which the rate of parting is measured."""
HORIZON = 1000.0
STEP = 0.5
"""Of linear theory."""
SETTLED = 4000.0
"""When the rank-one flow has ended: its slowest rate is 0.011."""


class Seen(NamedTuple):
    """For the figure."""

    comparison: gradflow.RankOneComparison
    linear: np.ndarray
    """The distance by linear theory, at the comparison's times."""
    rate: float
    times: np.ndarray
    full_gamma: np.ndarray
    full_attention: np.ndarray
    orbit_times: np.ndarray
    orbit_gamma: np.ndarray
    orbit_attention: np.ndarray
    scales: np.ndarray
    parted: np.ndarray
    clock: float


def measure(quick: bool) -> Measurement:
    problem = reference_problem()
    chain = problem.population.chain
    reduction = gradflow.RankOneProblem(problem.population)
    theta1, theta2 = problem.known_saddles
    flow, end = orbit(reduction, SETTLED)
    mu = rate_across(reduction, end.params)
    spectrum = hessian_spectrum(
        problem, reduction.embed(end.params, problem.model.width)
    ).eigenvalues
    times, gamma, attention = _along_orbit(flow, reduction)

    scales = np.array([1e-4, SCALE] if quick else [1e-3, 1e-4, 1e-5, SCALE, 1e-7])
    comparisons = {float(scale): _compared(problem, scale) for scale in scales}
    parted = np.array([c.parted[0.01] for c in comparisons.values()], dtype=float)
    comparison = comparisons[SCALE]
    rate, residual = _rate_of_parting(comparison)
    linear = _linear_distance(comparison, reduction)
    linear_parting = float(np.interp(0.01, linear, comparison.times))
    clock = 1 / theta1.rate + 1 / theta2.rate + 1 / mu
    per_fold = float(np.polyfit(np.log(1 / scales), parted, 1)[0])

    until = comparison.parted[0.1] or HORIZON
    full_times = np.linspace(0.0, until, 1200)
    W0, full_attention = comparison.full.observe(_Watched(problem), full_times)
    full_gamma = W0 @ comparison.alpha
    # The orbit has no clock of its own: γ of token 0, which grows all the way, is half
    # way from θ¹ to θ* at the same time.
    half = 0.5 * (gamma[0, 0] + gamma[-1, 0])
    shift = _passes(full_times, full_gamma, half) - _passes(times, gamma, half)
    peaks, orbit_peaks = full_attention.max(axis=0), attention.max(axis=0)
    leaves = parted[list(scales).index(SCALE)]

    def then(ts: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.array([np.interp(leaves, ts, column) for column in values.T])

    decayed = then(full_times, full_attention)
    orbit_decayed = then(times + shift, attention)
    moved = then(full_times, full_gamma) - gamma[0]
    orbit_moved = then(times + shift, gamma) - gamma[0]

    rare = range(1, chain.size)
    claims = [
        Claim("rate of parting: σ₁(B) at θ*, distance grows at", mu, rate, 0.01),
        Claim("σ₁(B) at θ*, full Hessian's -λ_min", mu, -spectrum[0], 1e-9),
        Claim("multiplicity m-1", problem.model.width - 1,
              int(np.sum(np.abs(spectrum + mu) < 1e-6 * mu)), 0.0),
        Claim(f"parting time at ε = {SCALE:g}, linear theory", linear_parting,
              parted[list(scales).index(SCALE)], 0.01),
        Claim("dt/d log(1/ε) of parting", clock, per_fold, 0.02),
        *(Claim(f"peak attention of query {i} to token 0", orbit_peaks[i], peaks[i],
                2e-3) for i in rare),
        Claim("attention of query 0 to token 0", 1.0, peaks[0], 1e-3),
        *(Claim(f"decayed attention of query {i}, at parting", orbit_decayed[i],
                decayed[i], 5e-3) for i in rare),
        *(Claim(f"Δγ_{j} since θ¹, at parting", orbit_moved[j], moved[j], 5e-3)
          for j in range(chain.size)),
    ]  # fmt: skip
    there: Gradients = gradients(reduction, end.params)
    numbers = {
        "rate_across": mu,
        "rate_measured": rate,
        "rate_residual": residual,
        "hessian_lowest": spectrum[:20],
        "end_gradient_norm": end.gradient_norm,
        "end_newton_distance": end.distance,
        "end": {n: getattr(end.params, n) for n in ("gamma", "beta", "q", "k")},
        "end_G_M_singular_values": np.linalg.svd(there.G_M, compute_uv=False),
        "end_G_Phi_norm": np.linalg.norm(there.G_Phi),
        "end_hessian_along": end.eigenvalues,
        "scales": scales,
        "parted_1_percent": parted,
        "parted_10_percent": [c.parted[0.1] for c in comparisons.values()],
        "comparison_starts": [c.start for c in comparisons.values()],
        "parting_per_fold": per_fold,
        "clock": clock,
        "linear_parting": linear_parting,
        "peaks": peaks,
        "orbit_peaks": orbit_peaks,
        "decayed": decayed,
        "orbit_decayed": orbit_decayed,
        "end_attention": attention[-1],
        "gamma_at_first_saddle": gamma[0],
        "gamma_moved": moved,
        "orbit_gamma_moved": orbit_moved,
        "end_gamma_moved": np.asarray(end.params.gamma) - gamma[0],
    }
    data = Seen(
        comparison, linear, mu, full_times, full_gamma, full_attention,
        times + shift, gamma, attention, scales, parted, clock,
    )  # fmt: skip
    return Measurement(claims, numbers, data, str(comparison))


class _Watched:
    """W0 and the attention of each query to the most frequent token, 0."""

    def __init__(self, problem: gradflow.Problem):
        self.attention = problem.observables["attention"]

    def __call__(self, params: Any) -> Any:
        return params.W0, self.attention(params)[:, 0]


def _compared(problem: gradflow.Problem, scale: float) -> gradflow.RankOneComparison:
    flow = gradflow.integrate(
        problem,
        problem.init(scale=float(scale)),
        HORIZON,
        solver=SOLVER,
        rtol=1e-10,
        observables=(),
    )
    return gradflow.compare_rank_one(flow)


def _along_orbit(
    flow: gradflow.Flow, reduction: gradflow.RankOneProblem
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times, γ and the attention to token 0; the last is where it ends."""
    times = np.append(np.linspace(0.0, 1000.0, 2001), SETTLED)
    attention = reduction.observables["attention"]
    gamma, row = flow.observe(lambda p: (p.gamma, attention(p)[:, 0]), times)
    return times, gamma, row


def _passes(times: np.ndarray, gamma: np.ndarray, level: float) -> float:
    """When γ of token 0 first does."""
    last = int(np.argmax(gamma[:, 0] > level))
    two = slice(last - 1, last + 1)
    return float(np.interp(level, gamma[two, 0], times[two]))


def _rate_of_parting(comparison: gradflow.RankOneComparison) -> tuple[float, float]:
    """d log(distance)/dt between two distances, and the largest residual of the fit."""
    window = [comparison.parts_at(level) for level in FITTED]
    inside = (comparison.times >= window[0]) & (comparison.times <= window[1])
    t, log_distance = comparison.times[inside], np.log(comparison.distance[inside])
    fit = np.polyfit(t, log_distance, 1)
    return float(fit[0]), float(np.max(np.abs(np.polyval(fit, t) - log_distance)))


def _linear_distance(
    comparison: gradflow.RankOneComparison, reduction: gradflow.RankOneProblem
) -> np.ndarray:
    """The distance by the linearisation across the manifold about the reduced flow, at
    the comparison's times. The Hessian is taken as constant, its value half way,
    between times `STEP` apart."""
    alpha, alpha_bar = comparison.alpha, comparison.alpha_bar
    first = comparison.full.at(comparison.start)
    W0, WQ, WK, W1 = (np.asarray(getattr(first, n)) for n in ("W0", "WQ", "WK", "W1"))
    # Across α; across ᾱ alone; and across both, where nothing moves.
    X = _across(np.vstack([W0, W1.T, WQ @ alpha_bar, WK @ alpha_bar]), alpha)
    Y = _across(np.vstack([alpha @ WQ, alpha @ WK]), alpha_bar)
    rest = [_across(_across(W, alpha_bar).T, alpha) for W in (WQ, WK)]

    times = comparison.times - comparison.start
    fine = np.linspace(0.0, times[-1], int(times[-1] / STEP))
    states = comparison.reduced.at(0.5 * (fine[1:] + fine[:-1]))
    squares = [np.sum(X**2) + np.sum(Y**2)]
    for i, step in enumerate(np.diff(fine)):
        state = gradflow.RankOneParameters(
            *(np.asarray(getattr(states, n)[i]) for n in ("gamma", "beta", "q", "k"))
        )
        G = gradients(reduction, state)
        X = _moved(G.across, step) @ X
        Y = _moved(np.array([[state.gamma @ G.G_Phi @ state.gamma]]), step) @ Y
        squares.append(np.sum(X**2) + np.sum(Y**2))
    moving = np.exp(np.interp(times, fine, np.log(squares)))
    size = np.sqrt(moving + np.sum(np.square(rest)))
    p = comparison.reduced.params
    norm = np.sqrt(np.sum(p.gamma**2, 1) + np.sum(p.beta**2, 1) + p.q**2 + p.k**2)
    return size / np.hypot(norm, size)


def _across(rows: np.ndarray, unit: np.ndarray) -> np.ndarray:
    return rows - np.outer(rows @ unit, unit)


def _moved(B: np.ndarray, step: float) -> np.ndarray:
    """exp(-[[0, B], [Bᵀ, 0]]·step)."""
    rows, columns = B.shape
    T = np.block([[np.zeros((rows, rows)), B], [B.T, np.zeros((columns, columns))]])
    eigenvalues, V = np.linalg.eigh(T)
    return (V * np.exp(-eigenvalues * step)) @ V.T


def draw(found: Measurement) -> Figure:
    seen: Seen = found.data
    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_distance(seen, axes[0, 0])
    _draw_parting(seen, axes[0, 1])
    _draw_orbit(
        seen, axes[1, 0], seen.full_gamma, seen.orbit_gamma,
        r"embedding $\gamma_j$ along $\alpha$",
        "(c) Frequent and rare embeddings move apart",
    )  # fmt: skip
    _draw_orbit(
        seen, axes[1, 1], seen.full_attention, seen.orbit_attention,
        "attention to token 0", "(d) Focus of the rare queries decays",
    )  # fmt: skip
    _draw_peaks(seen, axes[1, 1])
    _legend(figure)
    return figure


def _draw_distance(seen: Seen, ax: Any) -> None:
    c = seen.comparison
    until = c.times <= 1.15 * (c.parted[0.1] or HORIZON)
    t = c.times[until]
    ax.plot(
        t,
        seen.linear[until],
        color="black",
        label="linear theory about the reduced flow",
    )
    parting = c.parted[0.01]
    assert parting is not None
    guide = np.linspace(parting - 230, parting - 40, 2)
    ax.plot(
        guide, 0.04 * np.exp(seen.rate * (guide - parting)), "--", color=COLOURS[1],
        label=rf"rate $\sigma_1(B)$ = {seen.rate:.5f} at $\theta^*$",
    )  # fmt: skip
    ax.plot(
        t[::3], c.distance[until][::3], "o", color=COLOURS[0], markersize=3.5,
        label="full flow from reduced flow",
    )  # fmt: skip
    ax.axhline(0.01, color="0.6", linewidth=0.8, linestyle=":")
    ax.annotate("1 %", (t[0], 0.01), xytext=(0, 3), textcoords="offset points")
    ax.set_yscale("log")
    ax.set_ylim(top=2)
    ax.set_xlabel("time $t$")
    ax.set_ylabel(r"distance $\|\theta-\theta^{\prime}\|/\|\theta\|$")
    ax.set_title(r"(a) Parting, $\epsilon = 10^{-6}$", loc="left")
    ax.legend(fontsize="small", loc="lower right")


def _draw_parting(seen: Seen, ax: Any) -> None:
    x = np.log(1 / seen.scales)
    line = np.array([x[0] - 0.7, x[-1] + 0.7])
    middle = np.mean(seen.parted) - seen.clock * np.mean(x)
    ax.plot(
        np.exp(-line), middle + seen.clock * line, color="black",
        label=rf"$1/\lambda_0+1/\kappa+1/\sigma_1(B)$ = {seen.clock:.2f} per e-fold",
    )  # fmt: skip
    ax.plot(seen.scales, seen.parted, "o", color=COLOURS[0], label="full flow")
    ax.set_xscale("log")
    ax.invert_xaxis()
    ax.set_xlabel(r"initial scale $\epsilon$")
    ax.set_ylabel("time of parting by 1 %")
    ax.set_title("(b) Parting time", loc="left")
    ax.legend(fontsize="small", loc="upper left")


def _draw_orbit(
    seen: Seen, ax: Any, full: np.ndarray, orbit: np.ndarray, label: str, title: str
) -> None:
    end = seen.times[-1]
    _draw_tokens(seen, ax, full, orbit, np.linspace(0, end, 60))
    for j in range(full.shape[1]):
        ax.plot(end * 1.02, orbit[-1, j], "<", color=COLOURS[j])
    ax.set_xlim(60, end * 1.03)
    ax.set_xlabel("time $t$")
    ax.set_ylabel(label)
    ax.set_title(title, loc="left")


def _draw_tokens(
    seen: Seen, ax: Any, full: np.ndarray, orbit: np.ndarray, at: np.ndarray
) -> None:
    for j in range(full.shape[1]):
        ax.plot(seen.orbit_times[:-1], orbit[:-1, j], color=COLOURS[j], linewidth=1.2)
        points = np.interp(at, seen.times, full[:, j])
        ax.plot(at, points, "o", color=COLOURS[j], markersize=3.5)


def _draw_peaks(seen: Seen, ax: Any) -> None:
    """The peaks of focus, which are low for rare queries."""
    peak = seen.times[np.argmax(seen.full_attention[:, 1])]
    inset = ax.inset_axes((0.53, 0.55, 0.44, 0.36))
    at = np.linspace(peak - 40, peak + 15, 23)
    _draw_tokens(seen, inset, seen.full_attention, seen.orbit_attention, at)
    inset.set_xlim(peak - 40, peak + 15)
    inset.set_ylim(0.747, 0.776)
    inset.tick_params(labelsize="x-small")
    ax.indicate_inset_zoom(inset, edgecolor="0.6")


def _legend(figure: Figure) -> None:
    style: dict[str, Any] = {"color": "0.3"}
    handles = [
        *(
            Line2D(
                [],
                [],
                color=COLOURS[j],
                linewidth=4,
                label=rf"token {j}, $\pi$ = {p:g}",
            )
            for j, p in enumerate(REFERENCE_LAW)
        ),
        Line2D([], [], label=r"rank-one orbit from $\theta^1$", **style),
        Line2D([], [], marker="<", linestyle="", label=r"its end $\theta^*$", **style),
        Line2D(
            [], [], marker="o", linestyle="", markersize=3.5, label="full flow", **style
        ),
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, fontsize="small"
    )


if __name__ == "__main__":
    run(__doc__, measure, draw)
