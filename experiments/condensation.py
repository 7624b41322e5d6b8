"""Experiment 2: from a small start the embedding condenses on π at a known rate.

Claim. The flow leaves θ = 0 along W0 ≈ σ₁ (π/‖π‖)αᵀ, with

    d log σ₁(W0)/dt → μ = ‖π‖·‖π - 1/d‖    and    cos(u₁, π) → 1    as ε → 0,

u₁ the first left singular vector of W0, from entries N(0, ε²); meanwhile the attention
stays where it started.

How fast it converges. Without attention ∂L/∂M = π(p - π)ᵀ exactly, with p the predicted
law: W0 moves along π only, and the rest of it stays as it began, of size ε.

- *Rate.* Linearly the part of W0 along π is a e^{μt} + b e^{-μt} with a, b of size ε,
  next to a constant rest of size ε, so the rate is μ up to e^{-2μt}; the curvature of
  the loss slows it down by (ε e^{μt})². The sum is least at e^{2μt} ~ 1/ε, where it is
  of order ε. So the rate is read half way, where σ₁ is the geometric mean of its first
  and its largest value. (Its largest value is no measure of μ: where a and b nearly
  cancel at the start it is there, above μ by several percent at any ε.)
- *Direction.* When σ₁ has come to size one the angle to π is of order ε, and
  1 - cos(u₁, π) of order ε². Measured at its best in the stage.
- *Attention.* ẆQ is of order σ₁²‖WK‖ and σ₁ is of size one for a short time only: ‖WQ‖
  grows by a factor that does not depend on ε, and Φ = W0 WQ WKᵀ W0ᵀ is of order ε².
  Measured at the end of the stage.

The stage ends here when the loss has come 99 % of the way from log d to H(π), its value
at the first saddle.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from _closed_forms import first_rate, velocity
from _common import (
    REFERENCE_LAW,
    REFERENCE_STICKINESS,
    Claim,
    Measurement,
    reference_problem,
    run,
    slope,
    sticky_problem,
)
from matplotlib.figure import Figure

import gradflow
from gradflow.plotting import COLOURS

AFTERWARDS = 20.0
"""How long to go on once growth at rate μ alone would have brought W0 to size one."""
FINEST = 1e-6


class Stage(NamedTuple):
    """Condensation from one start."""

    ts: np.ndarray
    rates: np.ndarray
    """d log σ₁(W0)/dt."""
    rate: float
    """Half way."""
    misalignment: float
    """1 - cos(u₁, π), the least."""
    focus: float
    """‖Φ‖ at the end."""
    attention_growth: float
    """‖WQ‖ at the end, relative to the start."""


class _Watch(eqx.Module):
    problem: gradflow.Problem

    def __call__(self, params: Any) -> dict[str, Any]:
        law = jnp.asarray(self.problem.population.chain.stationary)
        direction = law / jnp.linalg.norm(law)
        U, s, Vt = jnp.linalg.svd(params.W0, full_matrices=False)
        u, moves = U[:, 0], velocity(self.problem, params)
        cosine = jnp.abs(u @ direction)
        beside = u - (u @ direction) * direction
        Phi = params.W0 @ params.WQ @ params.WK.T @ params.W0.T
        return {
            "log_size": jnp.log(s[0]),
            "rate": u @ moves.W0 @ Vt[0] / s[0],
            # 1 - cos without cancellation: sin²/(1 + cos).
            "misalignment": beside @ beside / (1 + cosine),
            "loss": self.problem(params),
            "focus": jnp.linalg.norm(Phi),
            "attention": jnp.linalg.norm(params.WQ),
        }


def condense(
    problem: gradflow.Problem, scale: float, seed: int, afterwards: float = AFTERWARDS
) -> Stage:
    """The stage from a start of entries N(0, scale²)."""
    chain = problem.population.chain
    flow = gradflow.integrate(
        problem,
        problem.init(seed=seed, scale=scale),
        np.log(1 / scale) / first_rate(chain.stationary) + afterwards,
        ts=[0.0],
        observables=(),
    )
    seen = flow.observe(_Watch(problem), flow.mesh)
    end = 0.01 * np.log(chain.size) + 0.99 * chain.unigram_entropy
    inside = np.arange(len(flow.mesh)) <= np.argmax(seen["loss"] < end)
    if not np.any(seen["loss"] < end):
        inside[:] = True
    return Stage(
        ts=flow.mesh,
        rates=seen["rate"],
        rate=half_way(seen["log_size"], seen["rate"]),
        misalignment=float(np.min(seen["misalignment"][inside])),
        focus=float(seen["focus"][inside][-1]),
        attention_growth=float(seen["attention"][inside][-1] / seen["attention"][0]),
    )


def half_way(log_size: np.ndarray, rates: np.ndarray) -> float:
    """The rate where the size is the geometric mean of its first and its largest."""
    top = int(np.argmax(log_size))
    middle = 0.5 * (log_size[0] + log_size[top])
    after = int(np.flatnonzero(log_size[: top + 1] < middle)[-1]) + 1
    within = slice(after - 1, after + 1)
    return float(np.interp(middle, log_size[within], rates[within]))


def measure(quick: bool) -> Measurement:
    scales = [1e-3, 1e-4, FINEST] if quick else [1e-2, 1e-3, 1e-4, 1e-5, FINEST]
    seeds = range(1) if quick else range(5)
    problem, mu = reference_problem(), first_rate(REFERENCE_LAW)
    stages = [[condense(problem, e, seed) for seed in seeds] for e in scales]
    errors = np.array([[abs(s.rate / mu - 1) for s in row] for row in stages])
    tilts = np.array([[s.misalignment for s in row] for row in stages])
    focus = np.array([[s.focus for s in row] for row in stages])
    laws, predicted, obtained = other_laws(3 if quick else 10)

    at = scales.index(1e-4)
    claims = [
        Claim(
            "rate at ε = 1e-6, farthest of seeds", mu, farthest(stages[-1], mu), 0.01
        ),
        Claim("its error's order in ε", 1.0, order(scales, errors), 0.05),
        Claim("cos(u₁, π) at ε = 1e-4, least of seeds", 1.0, 1 - tilts[at].max(), 1e-3),
        Claim("order of 1 - cos in ε", 2.0, order(scales, tilts), 0.05),
        Claim("order of ‖Φ‖ at the end in ε", 2.0, order(scales, focus), 0.05),
        Claim(
            f"rate over μ for {len(laws)} random π at ε = 1e-6, farthest",
            1.0,
            max(obtained / predicted, key=lambda ratio: abs(ratio - 1)),
            0.01,
        ),
    ]
    numbers = {
        "scales": scales,
        "seeds": list(seeds),
        "rates": [[s.rate for s in row] for row in stages],
        "misalignments": tilts,
        "focus": focus,
        "attention_growth": [[s.attention_growth for s in row] for row in stages],
        "random_laws": laws,
        "random_laws_rates": obtained,
    }
    data = mu, scales, stages, errors, tilts, focus, predicted, obtained
    return Measurement(claims, numbers, data)


def other_laws(count: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Random laws, uniform on the simplex; the rates by theory, and measured."""
    rng = np.random.default_rng(0)
    laws = [rng.dirichlet(np.ones(len(REFERENCE_LAW))) for _ in range(count)]
    problems = [sticky_problem(law, REFERENCE_STICKINESS) for law in laws]
    measured = [condense(p, FINEST, seed=0, afterwards=0.0).rate for p in problems]
    return laws, np.array([first_rate(law) for law in laws]), np.array(measured)


def farthest(stages: list[Stage], rate: float) -> float:
    return max((s.rate for s in stages), key=lambda r: abs(r - rate))


def order(scales: list[float], values: np.ndarray) -> float:
    """Of the geometric mean over seeds, as a power of ε."""
    return slope(scales, np.exp(np.mean(np.log(values), axis=1)))


def draw(found: Measurement) -> Figure:
    mu, scales, stages, errors, tilts, focus, predicted, obtained = found.data
    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    (rates, orders), (frozen, laws) = figure.subplots(2, 2)

    for e, row, colour in zip(scales, stages, COLOURS, strict=False):
        label = rf"$\varepsilon = 10^{{{np.log10(e):.0f}}}$"
        rates.plot(mu * row[0].ts, row[0].rates / mu, color=colour, label=label)
    rates.axhline(1.0, color="black", linestyle="--", linewidth=1)
    rates.text(
        0.98,
        1.015,
        r"theory $\mu=\|\pi\|\,\|\pi-1/d\|$",
        ha="right",
        transform=rates.get_yaxis_transform(),
    )
    rates.set(
        ylim=(-0.03, 1.12),
        xlabel=r"time $\mu t$",
        ylabel=r"growth rate of $\sigma_1(W_0)$, over $\mu$",
        title="(a) The rate along the flow",
    )
    rates.set_xlim(0, 1.5 * mu * max(row[0].ts[-1] for row in stages))
    rates.legend(loc="center right")

    against_scale(
        orders, scales, errors, 1, r"rate half way: $|\,$rate$/\mu-1|$", COLOURS[0]
    )
    against_scale(orders, scales, tilts, 2, r"direction: $1-\cos(u_1,\pi)$", COLOURS[1])
    orders.set(title="(b) Convergence to theory", ylabel="distance from theory")
    orders.legend(loc="lower right")

    against_scale(frozen, scales, focus, 2, r"$\|\Phi\|$ at the end", COLOURS[2])
    frozen.set(
        title="(c) The attention stays frozen",
        ylabel=r"$\|\Phi\|$ at the end of the stage",
    )
    frozen.legend(loc="lower right")

    span = np.array([0.0, 1.1 * predicted.max()])
    laws.plot(span, span, color="black", linestyle="--", linewidth=1, label="theory")
    worst = np.max(np.abs(obtained / predicted - 1))
    laws.plot(
        predicted,
        obtained,
        "o",
        color=COLOURS[3],
        markerfacecolor="none",
        label=rf"random $\pi$, $\varepsilon=10^{{-6}}$ (largest error {worst:.0e})",
    )
    laws.set(
        xlabel=r"theory $\|\pi\|\,\|\pi-1/d\|$",
        ylabel="rate measured half way",
        title="(d) Other stationary laws",
    )
    laws.legend(loc="upper left")
    return figure


def against_scale(
    ax: Any, scales: Any, values: np.ndarray, power: int, label: str, colour: str
) -> None:
    """Points for the seeds, and the order that theory predicts as a line."""
    e = np.asarray(scales)
    mean = np.exp(np.mean(np.log(values), axis=1))
    constant = np.exp(np.mean(np.log(mean) - power * np.log(e)))
    measured = order(scales, values)
    ax.plot(
        e,
        constant * e**power,
        "--",
        color=colour,
        linewidth=1,
        label=rf"theory $\propto\varepsilon^{power}$ (points: {measured:.3f})",
    )
    ax.plot(
        np.repeat(e, values.shape[1]),
        values.ravel(),
        "o",
        color=colour,
        markerfacecolor="none",
        label=label,
    )
    ax.set(xscale="log", yscale="log", xlabel=r"initial scale $\varepsilon$")


if __name__ == "__main__":
    run(__doc__, measure, draw)
