"""Experiment 4: near a saddle the flow is the linear flow, and stays for log(1/ε).

Claims, for a critical point θ* with J = -∇²L(θ*) of largest eigenvalue μ* > 0, and the
flow from θ* + εξ with standard normal ξ:

1. *Linearisation.* The flow is `gradflow.landscape.linearised_flow`, θ* + ε exp(Jt)ξ,
   up to C ε² e^{2μ*t}. At θ* = 0 the quadratic term of the flow vanishes, as the loss
   depends on θ by M = W0 W1 and Φ, of second and of fourth order: the error is
   C ε³ e^{3μ*t}. Compared at every one of a series of times: the power of ε in
   ‖flow - linear flow‖ is 3 at θ = 0 and 2 at θ¹, at each of them; and towards the end
   the error grows in time at 3μ* and 2μ*, as the bound does.
2. *Residence.* From entries N(0, ε²) the flow stays Θ(log 1/ε) within a distance r of
   θ = 0, and then of θ¹; r is a tenth of ‖θ¹‖ here.
   - At 0: ‖θ‖ = r when ε C e^{μt} = r, with μ = ‖π‖·‖π - 1/d‖. So the stay is
     log(1/ε)/μ plus a constant that depends on r and on the direction of the start.
   - At θ¹, from arrival, where the distance to the nearest θ¹ falls below r, until it
     exceeds r again: the passage from 0 to arrival takes a time that does not depend on
     ε once W0 has any fixed size (the flow then follows the orbit that joins 0 to θ¹),
     and before, the attention is frozen: ẆQ is of order ‖W0‖²‖WK‖. So at arrival the
     attention is C'ε, of the same size as at the start. From there it grows at rate
     |κ|, while the embeddings relax, and leaves when ε C' e^{|κ|t} ~ r: the stay is
     log(1/ε)/|κ| plus a constant, as if the attention started its growth at arrival.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _closed_forms import DistanceToFirstSaddle, FirstSaddle, first_rate
from _common import REFERENCE_LAW, Claim, Measurement, reference_problem, run, slope
from jaxtyping import Array
from matplotlib.figure import Figure

import gradflow
from gradflow.landscape import linearised_flow
from gradflow.plotting import COLOURS

NEAR = 0.1
"""r, relative to ‖θ¹‖."""
AMPLIFICATION = 20.0
"""e^{μ*t} at the last time of a comparison: few e-folds less than it takes to leave."""
TIMES = 16
RTOL = 1e-12
"""The errors to be seen are as small as 1e-9 of the parameters."""


class Comparison(NamedTuple):
    """Flow and linear flow from a series of starts."""

    scales: np.ndarray
    ts: np.ndarray
    errors: np.ndarray
    """‖flow - linear flow‖ of each scale at each time."""
    rate: float
    """μ*."""
    power: int
    """Of ε, by theory."""

    @property
    def powers(self) -> np.ndarray:
        """Of ε, as measured at each time."""
        return np.array([slope(self.scales, e) for e in self.errors.T])

    @property
    def growth(self) -> float:
        """d log error/dt over μ*, towards the end: the last quarter of the times."""
        last = slice(-TIMES // 4, None)
        fits = np.polyfit(self.rate * self.ts[last], np.log(self.errors[:, last]).T, 1)
        return float(np.mean(fits[0]))

    @property
    def farthest(self) -> float:
        return float(self.powers[np.argmax(np.abs(self.powers - self.power))])


def compare(
    problem: gradflow.Problem, at: Any, rate: float, power: int, scales: Any
) -> Comparison:
    ts = np.linspace(0.0, np.log(AMPLIFICATION) / rate, TIMES + 1)[1:]
    noise = problem.init(seed=0, scale=1.0)
    errors = []
    for e in scales:
        start = jax.tree.map(lambda x, dx, e=e: x + e * dx, at, noise)
        flow = gradflow.integrate(
            problem, start, ts[-1], ts=ts, rtol=RTOL, observables=()
        )
        linear = linearised_flow(problem, at, start, ts)
        squares = jax.tree.map(
            lambda a, b: np.sum((np.asarray(a) - b) ** 2, axis=(1, 2)),
            flow.params,
            linear,
        )
        errors.append(np.sqrt(sum(jax.tree.leaves(squares))))
    return Comparison(np.asarray(scales), ts, np.array(errors), rate, power)


class _Beyond(eqx.Module):
    """The distance from θ = 0, less r."""

    radius: Array

    def __call__(self, params: Any) -> Array:
        squares = [jnp.sum(x**2) for x in jax.tree.leaves(params)]
        return jnp.sqrt(sum(squares)) - self.radius


class _BeyondFirstSaddle(eqx.Module):
    """The distance from the nearest θ¹, less r."""

    distance: DistanceToFirstSaddle
    radius: Array

    def __call__(self, params: Any) -> Array:
        return self.distance(params) - self.radius


class Stay(NamedTuple):
    """When one flow was near 0 and near θ¹."""

    left_zero: float
    arrived: float
    left: float

    @property
    def at_first_saddle(self) -> float:
        return self.left - self.arrived


def stay(problem: gradflow.Problem, scale: float) -> Stay:
    chain = problem.population.chain
    saddle, mu = FirstSaddle.of(chain), first_rate(chain.stationary)
    kappa = abs(saddle.kappa)
    horizon = np.log(1 / scale) * (1 / mu + 1 / kappa) + 5 / kappa
    start = problem.init(seed=0, scale=scale)
    flow = gradflow.integrate(problem, start, horizon, ts=[0.0], observables=())
    radius = jnp.asarray(NEAR * np.sqrt(2) * saddle.g)
    to_saddle = _BeyondFirstSaddle(DistanceToFirstSaddle.to(saddle), radius)
    zero = gradflow.find_events(flow, _Beyond(radius))
    first = gradflow.find_events(flow, to_saddle)
    if [e.rising for e in zero[:1]] + [e.rising for e in first[:2]] != [1, 0, 1]:
        raise RuntimeError(
            f"The flow from ε = {scale:g} did not come to within r = {radius:.3g} of "
            f"θ¹ and leave it again until t = {horizon:.4g}: {zero}; {first}"
        )
    return Stay(zero[0].t, first[0].t, first[1].t)


def measure(quick: bool) -> Measurement:
    problem = reference_problem()
    theory, mu = FirstSaddle.of(problem.population.chain), first_rate(REFERENCE_LAW)
    kappa = abs(theory.kappa)
    starts = np.array([1e-3, 1e-4]) if quick else np.geomspace(1e-3, 1e-4, 4)
    zero, first = problem.init(scale=0.0), theory.params()
    at_zero = compare(problem, zero, mu, 3, starts)
    at_first = compare(problem, first, kappa, 2, starts)

    scales = [1e-4, 1e-6, 1e-8] if quick else [1e-4, 1e-5, 1e-6, 1e-7, 1e-8]
    stays = [stay(problem, e) for e in scales]
    logs = np.log(1 / np.array(scales))
    zero_stays = np.array([s.left_zero for s in stays])
    first_stays = np.array([s.at_first_saddle for s in stays])
    per_e_fold = [float(np.polyfit(logs, x, 1)[0]) for x in (zero_stays, first_stays)]
    transfers = np.array([s.arrived - s.left_zero for s in stays])

    claims = [
        Claim("power of ε in the error at 0, farthest", 3.0, at_zero.farthest, 0.05),
        Claim("power of ε in the error at θ¹, farthest", 2.0, at_first.farthest, 0.05),
        Claim("growth of the error at 0 in the end, over μ", 3.0, at_zero.growth, 0.05),
        Claim(
            "growth of the error at θ¹ in the end, over κ", 2.0, at_first.growth, 0.05
        ),
        Claim("stay at 0 per e-fold of 1/ε, 1/μ", 1 / mu, per_e_fold[0], 0.05),
        Claim("stay at θ¹ per e-fold of 1/ε, 1/κ", 1 / kappa, per_e_fold[1], 0.05),
        Claim(
            "passage from 0 to θ¹, per e-fold, over 1/μ",
            0.0,
            float(np.polyfit(logs, transfers, 1)[0] * mu),
            0.01,
        ),
    ]
    numbers = {
        name: {
            "scales": c.scales,
            "ts": c.ts,
            "errors": c.errors,
            "powers": c.powers,
            "growth": c.growth,
        }
        for name, c in (("at_zero", at_zero), ("at_first_saddle", at_first))
    } | {
        "stay": {
            "scales": scales,
            "radius": NEAR * np.sqrt(2) * theory.g,
            "left_zero": zero_stays,
            "arrived": [s.arrived for s in stays],
            "left": [s.left for s in stays],
            "per_e_fold": per_e_fold,
        }
    }
    data = at_zero, at_first, scales, zero_stays, first_stays, mu, kappa
    return Measurement(claims, numbers, data)


def draw(found: Measurement) -> Figure:
    at_zero, at_first, scales, zero_stays, first_stays, mu, kappa = found.data
    figure = Figure(figsize=(10.5, 8.0), layout="constrained")
    (zero, first), (powers, residence) = figure.subplots(2, 2)
    _collapse(zero, at_zero, r"(a) At $\theta=0$", r"\mu")
    _collapse(first, at_first, r"(b) At $\theta^1$", r"\kappa")

    pairs = ((at_zero, r"\theta=0", r"\mu"), (at_first, r"\theta^1", r"\kappa"))
    for (c, where, rate), colour in zip(pairs, COLOURS, strict=False):
        powers.plot(
            c.rate * c.ts,
            c.powers,
            "o",
            color=colour,
            markerfacecolor="none",
            label=rf"${where}$, clock ${rate}\,t$",
        )
        powers.axhline(
            c.power,
            color=colour,
            linestyle="--",
            linewidth=1,
            label=f"theory: {c.power}",
        )
    powers.set(
        ylim=(1.5, 3.5),
        xlabel="time, in e-folds of the fastest mode",
        ylabel=r"power of $\varepsilon$ in the error",
        title="(c) Order of the error at each time",
    )
    powers.legend(loc="upper center", ncols=2, fontsize="small")

    e = np.asarray(scales)
    cases = (
        ("at $0$", zero_stays, mu, r"1/\mu"),
        (r"at $\theta^1$", first_stays, kappa, r"1/\kappa"),
    )
    for (where, stays, rate, name), colour in zip(cases, COLOURS, strict=False):
        line = stays[-1] + (np.log(1 / e) - np.log(1 / e[-1])) / rate
        residence.plot(
            e,
            line,
            "--",
            color=colour,
            linewidth=1,
            label=rf"theory: slope ${name}$ = {1 / rate:.3f}",
        )
        fitted = np.polyfit(np.log(1 / e), stays, 1)[0]
        residence.plot(
            e,
            stays,
            "o",
            color=colour,
            markerfacecolor="none",
            label=f"stay {where}: {fitted:.3f}",
        )
    residence.set(
        xscale="log",
        xlabel=r"initial scale $\varepsilon$",
        ylabel="time",
        ylim=(0, None),
        title=r"(d) Residence within $r=0.1\,\|\theta^1\|$",
    )
    residence.legend(loc="upper right")
    return figure


def _collapse(ax: Any, c: Comparison, title: str, rate: str) -> None:
    """Errors over their power of ε, of all starts on one curve."""
    for e, errors, marker, colour in zip(
        c.scales, c.errors, "o^sD", COLOURS, strict=False
    ):
        ax.plot(
            c.rate * c.ts,
            errors / e**c.power,
            marker,
            color=colour,
            markerfacecolor="none",
            label=rf"$\varepsilon$ = {e:.1e}",
        )
    scaled = c.errors[-1] / c.scales[-1] ** c.power
    x = c.rate * c.ts
    ax.plot(
        x,
        scaled[-1] * np.exp(c.power * (x - x[-1])),
        "k--",
        linewidth=1,
        label=rf"bound's growth $e^{{{c.power}{rate}\,t}}$",
    )
    ax.set(
        yscale="log",
        xlabel=rf"time ${rate}\,t$",
        ylabel=rf"$\|$flow − linear flow$\|\,/\,\varepsilon^{c.power}$",
        title=title,
    )
    ax.legend(loc="lower right", fontsize="small")


if __name__ == "__main__":
    run(__doc__, measure, draw)
