"""Experiment 20: gradient descent follows the flow with an error of order η, until
η passes 2/λ_max.

Definitions. Gradient descent θ_{n+1} = θ_n - η∇L(θ_n) runs on the exact population loss
of the reference instance, from the same θ_0 as the flow (ε = 1e-3), on the clock
t = nη. Its error is e(t) = ‖θ_n - θ(t)‖, where θ(t) is the flow, and λ_max(t) is the
largest eigenvalue of ∇²L(θ(t)), by a dense eigenvalue solver. Descent at rate η
*breaks* at the first saved time at which e(t) > 2 η c(t), where c(t) = e(t)/η for the
smallest η: from then on its error is no longer of order η.

Claims.
- max_{t ≤ 120} e(t) halves with η: ratios 2 ± 0.1 at η, η/2, η/4.
- e(t) is proportional to η below the edge: slope 1 at each of several times.
- The edge is 2/λ_max. The sharpness λ_max grows along this flow, so descent at any η
  crosses the edge at some time, and it never breaks before. Beyond the edge a deviation
  along the top eigenvector grows by |1 - ηλ_max| per step. It was damped until then, so
  it starts at the rounding of a double, and descent breaks when

      (1/η) ∫ log|1 - ηλ_max(t)| dt = log 2⁵³,

  where the integral is kept from falling below zero, as no deviation is below rounding.

This theory does not say what descent does beyond the edge. It does not diverge: its
loss goes on falling along another path. Rates above 1.2, for which terms of order η²
already matter during condensation, are left out.

`--quick`: horizon 420, solver tsit5 and fewer rates.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from _common import Claim, Measurement, reference_problem, run, slope
from jax.flatten_util import ravel_pytree
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import gradflow

SCALE = 1e-3
LARGEST_RATE = 1.2
HALVED_UNTIL = 120.0
SPACING = 2.0
"""The approximate time between saved times."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


class Descent(NamedTuple):
    eta: float
    compared: gradflow.Comparison

    def error(self, t: Any) -> Any:
        """e(t), interpolated between saved times."""
        return np.interp(t, self.compared.ts, self.compared.distance)


def measure(quick: bool) -> Measurement:
    t1 = 420.0 if quick else 1000.0
    least = 0.08 if quick else 0.005
    rates = np.geomspace(least, LARGEST_RATE, 7 if quick else 30)
    at = np.array([120.0, 300.0, 420.0] if quick else [120.0, 400.0, 700.0, 1000.0])
    problem = reference_problem()
    start = problem.init(seed=0, scale=SCALE)
    solver = "tsit5" if quick else "auto"  # it compiles faster
    flow = gradflow.integrate(problem, start, t1, solver=solver, observables=())
    ts = np.arange(10.0, t1 + 1, 20.0 if quick else 5.0)
    sharpness = _sharpness(problem, flow, ts)

    halves = [_descend(problem, flow, 0.1 / n, HALVED_UNTIL) for n in (1, 2, 4)]
    largest = [d.compared.largest for d in halves]
    runs = [_descend(problem, flow, eta, t1) for eta in rates]
    finest = runs[0]
    breaks = [_break_time(d, finest) for d in runs]
    predicted = [_predicted(d.eta, ts, sharpness) for d in runs]
    broken = [
        (d.eta, t, when, float(np.interp(t, ts, sharpness)))
        for d, t, when in zip(runs, breaks, predicted, strict=True)
        if t is not None and when is not None
    ]
    disagreeing = sum(
        (t is None) != (when is None) for t, when in zip(breaks, predicted, strict=True)
    )
    until = np.array(
        [float(np.max(sharpness[ts <= t], initial=sharpness[0])) for t in at]
    )
    slopes = [_slope(runs, t, 2 / top) for t, top in zip(at, until, strict=True)]
    late = np.array([t / when for _, t, when, _ in broken])
    early = sum(eta * top < 2 for eta, _, _, top in broken)
    claims = [
        Claim("error ratio, η = 0.1 and 0.05", 2.0, largest[0] / largest[1], 0.05),
        Claim("error ratio, η = 0.05 and 0.025", 2.0, largest[1] / largest[2], 0.05),
        *(
            Claim(f"t = {t:g}: power of η, below the edge", 1.0, s, 0.05)
            for t, s in zip(at, slopes, strict=True)
        ),
        Claim("rates that break before η = 2/λ_max", 0.0, float(early), 0.0),
        Claim("rates that break or not, contrary to theory", 0.0, disagreeing, 0.0),
        Claim("smallest ratio of break time to theory", 1.0, late.min(), 0.05),
        Claim("largest ratio of break time to theory", 1.0, late.max(), 0.05),
    ]
    numbers = {
        "horizon": t1,
        "rates": [d.eta for d in runs],
        "ts": at,
        "errors": [[float(d.error(t)) for t in at] for d in runs],
        "slopes": slopes,
        "halved_errors": largest,
        "sharpness_ts": ts,
        "sharpness": sharpness,
        "breaks": [
            {"eta": eta, "t": t, "predicted": when, "product": eta * top}
            for eta, t, when, top in broken
        ],
        "largest_product_without_break": max(
            (
                d.eta * float(sharpness.max())
                for d, t in zip(runs, breaks, strict=True)
                if t is None
            ),
            default=None,
        ),
        "final_losses": [float(d.compared.training_loss[-1]) for d in runs],
        "flow_loss": float(flow.loss[-1]),
        "certificate": str(flow.certificate),
    }
    data = (runs, breaks, predicted, at, until, ts, sharpness)
    return Measurement(claims, numbers, data, f"{flow}\n{halves[0].compared}")


def _predicted(eta: float, ts: Any, sharpness: Any) -> float | None:
    """The time at which rounding errors have grown by a factor of 2⁵³, or None."""
    times = np.linspace(ts[0], ts[-1], 20_000)
    factor = np.abs(1 - eta * np.interp(times, ts, sharpness))
    gains = np.log(factor) / eta * np.diff(times, prepend=times[0])
    grown = 0.0
    for t, gain in zip(times, gains, strict=True):
        grown = max(0.0, grown + gain)
        if grown > 53 * np.log(2):
            return float(t)
    return None


def _sharpness(problem: gradflow.Problem, flow: gradflow.Flow, ts: Any) -> np.ndarray:
    _, unravel = ravel_pytree(flow.start)
    hessian = jax.jit(jax.hessian(lambda y: problem(unravel(y))))
    states = [ravel_pytree(flow.at(float(t)))[0] for t in ts]
    return np.array([np.linalg.eigvalsh(hessian(y))[-1] for y in states])


def _descend(
    problem: gradflow.Problem, flow: gradflow.Flow, eta: float, t1: float
) -> Descent:
    steps = round(t1 / eta)
    eta = t1 / steps
    saved = np.unique(np.rint(np.arange(0, t1, SPACING) / eta).astype(int))
    training = gradflow.train(
        problem,
        flow.start,
        eta,
        steps,
        saved=np.unique(np.append(saved, steps)),
        observables=(),
        throw=False,
    )
    return Descent(eta, gradflow.compare(flow, training))


def _break_time(descent: Descent, finest: Descent) -> float | None:
    ts = descent.compared.ts
    expected = descent.eta / finest.eta * finest.error(ts)
    # Earlier there is no error to speak of.
    apart = (ts > 10) & (descent.compared.distance > 2 * expected)
    return float(ts[np.argmax(apart)]) if np.any(apart) else None


def _slope(runs: list[Descent], t: float, edge: float) -> float:
    # Near the edge terms of order η² also show: use rates below half of it.
    below = [d for d in runs if d.eta < edge / 2]
    return slope([d.eta for d in below], [d.error(t) for d in below])


def draw(measurement: Measurement) -> Figure:
    runs, breaks, predicted, at, until, ts, sharpness = measurement.data
    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1)  # pyright: ignore
    by_rate, by_time, edge = figure.subplots(1, 3)
    _draw_by_rate(by_rate, runs, at, until)
    _draw_by_time(by_time, runs, breaks)
    _draw_edge(edge, runs, breaks, predicted, ts, sharpness)
    return figure


def _draw_by_rate(ax: Axes, runs: list[Descent], at: Any, until: Any) -> None:
    eta = np.array([d.eta for d in runs])
    for t, top, colour in zip(at, until, COLOURS, strict=False):
        error = np.array([d.error(t) for d in runs])
        ax.loglog(eta, error, "o-", color=colour, markersize=4, label=f"$t$ = {t:g}")
        ax.axvline(2 / top, color=colour, linewidth=1, linestyle=":")
    low = eta[[0, len(eta) // 2]]
    ax.loglog(low, 0.2 * runs[0].error(at[0]) * low / low[0], "k--", linewidth=1)
    ax.annotate(
        "slope 1",
        (low[1], 0.2 * runs[0].error(at[0]) * low[1] / low[0]),
        xytext=(4, -8),
        textcoords="offset points",
        fontsize="small",
    )
    ax.plot([], [], color="0.4", linestyle=":", label=r"$\eta = 2/\lambda_{\max}$")
    ax.set(
        xlabel=r"learning rate $\eta$",
        ylabel=r"$\|\theta_{\rm descent} - \theta_{\rm flow}\|$",
    )
    ax.set_title(r"(a) The error is of order $\eta$ up to the edge", loc="left")
    ax.legend(fontsize="small", loc="lower right")


def _draw_by_time(ax: Axes, runs: list[Descent], breaks: list[float | None]) -> None:
    broken = [i for i, t in enumerate(breaks) if t is not None]
    picked = [0, *broken[:: max(1, len(broken) // 4)][:4]]
    for i, colour in zip(picked, COLOURS, strict=False):
        d, t = runs[i], breaks[i]
        c = d.compared
        shown = c.ts > 0
        ax.plot(
            c.ts[shown],
            c.distance[shown] / d.eta,
            color=colour,
            linewidth=1.3,
            label=rf"$\eta$ = {d.eta:.3g}",
        )
        if t is not None:
            ax.plot(t, d.error(t) / d.eta, "o", color=colour, markersize=6)
    ax.set(yscale="log", xlabel="time $t$")
    ax.set_ylabel(r"error divided by $\eta$")
    ax.set_ylim(bottom=1e-2)
    ax.set_title("(b) One curve for all, until it breaks (dots)", loc="left")
    ax.legend(fontsize="small", loc="upper left")


def _draw_edge(
    ax: Axes,
    runs: list[Descent],
    breaks: list[float | None],
    predicted: list[float | None],
    ts: Any,
    sharpness: Any,
) -> None:
    ax.plot(ts, 2 / sharpness, color="0.3", label=r"$2/\lambda_{\max}(t)$ of the flow")
    known = [(t, d.eta) for d, t in zip(runs, breaks, strict=True) if t is not None]
    ax.plot(*np.transpose(known), "o", color=COLOURS[1], label="descent breaks")
    theory = [(t, d.eta) for d, t in zip(runs, predicted, strict=True) if t is not None]
    ax.plot(
        *np.transpose(theory), "k_", markersize=9, label="rounding grown to size one"
    )
    never = [d.eta for d, t in zip(runs, breaks, strict=True) if t is None]
    ax.plot(
        np.full(len(never), ts[-1]),
        never,
        ">",
        color=COLOURS[0],
        markerfacecolor="none",
        clip_on=False,
        label="not broken by the horizon",
    )
    ax.set(yscale="log", xlabel="time $t$", ylabel=r"learning rate $\eta$")
    ax.set_xlim(0, float(ts[-1]))
    ax.set_title("(c) When it breaks", loc="left")
    ax.legend(fontsize="small", loc="lower left")


if __name__ == "__main__":
    run(__doc__, measure, draw)
