"""Experiment 3: the first saddle θ¹, and the focus that the attention leaves it with.

Claims, for infinite context, with γ = gπ/‖π‖, β = c/(g‖π‖), c = log π - mean(log π),
g² = ‖c‖/‖π‖:

1. *The saddle.* From N(0, ε²) the flow comes to rest near W0 = γαᵀ, W1 = αβᵀ, WQ = WK =
   0 (α any unit vector), where L = H(π) and as many directions are unstable as the head
   is wide. `gradflow.find_saddles` searches from the flow's slowest point; what it
   finds is compared with θ¹ by M = W0 W1, which is γβᵀ whatever α and whatever factors
   W0 and W1 exchange, and by the distance to the nearest θ¹ over all α. With s as below
   the flow comes as near as e^{-st} + ε e^{|κ|t} and at best r = ε^{s/(s+|κ|)}. The
   attention is that large then and has moved the embeddings by r² (claim 4), along null
   directions too, which the search leaves alone: M is off by order ε^{2s/(s+|κ|)}.
2. *The rate.* There the attention grows at rate |κ|,
   κ = [Σ_i π_i γ_i ((P - 1πᵀ)β)_i]·Var_π(γ), whatever P with that π: against the lowest
   Hessian eigenvalue at θ¹, k-fold, and against ½ d log‖WQ WKᵀ‖/dt on a flow from ε,
   where it is steadiest while the flow is near θ¹ (|L - H(π)| below 1 % of the fall to
   it, from log d, and of the fall after it, to the entropy rate).
   *How fast it converges.* With s the lowest positive curvature at θ¹ among the
   embeddings, they are still e^{-st} away from it after a time t, and the attention has
   acted back by (ε e^{|κ|t})². The sum is least at e^{(s+2|κ|)t} ~ ε^{-2}: the error is
   of order ε^{2s/(s+2|κ|)}, slow where tokens are rare, as s is at most of order min π.
   The random laws here have all frequencies above 0.01, the lowest of the reference
   law. (One of frequencies down to 0.0002 had s = 0.2 |κ|, and an error of 2.1 % at
   ε = 1e-6.)
3. *The direction.* Φ/‖Φ‖ → sign(κ) ππᵀ/‖ππᵀ‖, for κ < 0 away from frequent tokens. W0
   keeps a part of size ε beside π from its start: 1 - |cos| is at best of order ε².
4. *The response.* Embeddings respond at next order, ‖ΔW0‖ ∝ ‖WQ‖². On a flow from a
   random start this is covered by the embeddings' own relaxation, so here a flow starts
   at the exact θ¹ plus δv, v a unit vector of the unstable eigenspace: then W0 moves
   only as the attention makes it move. To second order θ = θ¹ + a v + a² w with
   a = δ e^{|κ|t}, and θ̇ = -∇L gives

       (∇²L + 2|κ|) w = -½ ∇³L[v, v],

   so that ‖ΔW0‖ = 2‖w_W0‖·‖WQ‖², a line without a free constant, as ‖WQ‖ = a/√2.
"""

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _closed_forms import (
    DistanceToFirstSaddle,
    FirstSaddle,
    first_rate,
    velocity,
)
from _common import (
    REFERENCE_LAW,
    Claim,
    Measurement,
    chain_problem,
    reference_problem,
    run,
    slope,
)
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure

import gradflow
from gradflow.landscape import Spectrum, hessian_spectrum
from gradflow.plotting import COLOURS

FINEST = 1e-6
LEAST_FREQUENCY = 0.01
WIDTH = 10
KICK = 1e-5
"""δ, by which the flow of claim 4 starts beside θ¹."""
RESPONSE_RANGE = (1e-3, 3e-2)
"""Of ‖WQ‖, in which the power is fitted: above what the start left behind, δ², and
below the next order."""


class Focus(NamedTuple):
    """How the attention grew near θ¹, on one flow."""

    flow: gradflow.Flow
    ts: np.ndarray
    """While the flow was near θ¹."""
    rates: np.ndarray
    """½ d log‖WQ WKᵀ‖/dt then."""
    rate: float
    """The steadiest of them."""
    cosine: float
    """Of Φ with ππᵀ, the farthest from zero since the flow came near θ¹."""


class _Watch(eqx.Module):
    problem: gradflow.Problem

    def __call__(self, params: Any) -> dict[str, Any]:
        law = jnp.asarray(self.problem.population.chain.stationary)
        moves = velocity(self.problem, params)
        product = params.WQ @ params.WK.T
        change = moves.WQ @ params.WK.T + params.WQ @ moves.WK.T
        Phi = params.W0 @ product @ params.W0.T
        return {
            "rate": 0.5 * jnp.sum(product * change) / jnp.sum(product**2),
            "cosine": law @ Phi @ law / (jnp.linalg.norm(Phi) * law @ law),
            "loss": self.problem(params),
        }


def focus(problem: gradflow.Problem, scale: float, seed: int = 0) -> Focus:
    """A flow from entries N(0, scale²) until after it left θ¹."""
    chain = problem.population.chain
    saddle, mu = FirstSaddle.of(chain), first_rate(chain.stationary)
    kappa = abs(saddle.kappa)
    horizon = np.log(1 / scale) * (1 / mu + 1 / kappa) + 5 / kappa
    start = problem.init(seed=seed, scale=scale)
    flow = gradflow.integrate(problem, start, horizon, ts=[0.0], observables=())
    seen = flow.observe(_Watch(problem), flow.mesh)
    arrived = saddle.loss + 0.01 * (np.log(chain.size) - saddle.loss)
    left = saddle.loss - 0.01 * (saddle.loss - chain.entropy_rate)
    since = seen["loss"] < arrived
    near = since & (seen["loss"] > left)
    ts, rates, cosines = flow.mesh[near], seen["rate"][near], seen["cosine"][since]
    cosine = float(cosines[np.argmax(np.abs(cosines))])
    return Focus(flow, ts, rates, steadiest(ts, rates), cosine)


def steadiest(ts: np.ndarray, rates: np.ndarray) -> float:
    """The rate where it changes least in the time in which it makes a difference."""
    change = np.abs(np.gradient(rates, ts))
    return float(rates[np.argmin(change / rates**2 + np.where(rates > 0, 0, np.inf))])


def chains(quick: bool) -> dict[str, gradflow.MarkovChain]:
    """Ten random sticky ones; of general P with the reference law, of either sign."""
    rng, found = np.random.default_rng(0), {}
    while len(found) < (2 if quick else 10):
        law, stickiness = rng.dirichlet(np.ones(4)), rng.uniform(0.1, 0.9)
        if law.min() > LEAST_FREQUENCY:
            name = f"sticky {len(found)}"
            found[name] = gradflow.MarkovChain.sticky(law, stickiness)
    for sign in (1, -1):
        seeds = (seed for seed in range(1000) if sign * _kappa_of(seed) > 0)
        for seed in itertools.islice(seeds, 1 if quick else 3):
            name = f"not reversible {seed}"
            found[name] = gradflow.MarkovChain.random(REFERENCE_LAW, seed=seed)
    found["Metropolis"] = gradflow.MarkovChain.metropolis(REFERENCE_LAW)
    return found


def _kappa_of(seed: int) -> float:
    return FirstSaddle.of(gradflow.MarkovChain.random(REFERENCE_LAW, seed=seed)).kappa


def slowest_relaxation(spectrum: Spectrum) -> float:
    """s: the lowest positive eigenvalue with an eigenvector among the embeddings."""
    for i in np.flatnonzero(spectrum.eigenvalues > 1e-9):
        v = spectrum.direction(int(i))
        if np.sum(np.square(v.WQ)) + np.sum(np.square(v.WK)) < 0.5:
            return float(spectrum.eigenvalues[i])
    raise RuntimeError("θ¹ has no stable direction among the embeddings.")


class Response(NamedTuple):
    attention: np.ndarray
    """‖WQ‖."""
    moved: np.ndarray
    """‖ΔW0‖."""
    coefficient: float
    """Of ‖ΔW0‖ over ‖WQ‖², by theory."""


def response(problem: gradflow.Problem, spectrum: Spectrum, kappa: float) -> Response:
    at, v = spectrum.params, spectrum.direction(0)
    start = jax.tree.map(lambda x, dx: x + KICK * jnp.asarray(dx), at, v)
    horizon = np.log(1 / KICK) / kappa
    ts = np.linspace(0.0, horizon, 201)
    flow = gradflow.integrate(
        problem, start, horizon, ts=ts, rtol=1e-12, observables=()
    )

    flat, unravel = ravel_pytree(at)
    along = jnp.asarray(spectrum.eigenvectors[:, 0])

    def slope_along(f: Any) -> Any:
        return lambda y: jax.jvp(f, (y,), (along,))[1]

    gradient = jax.grad(lambda y: problem(unravel(y)))
    third = np.asarray(jax.jit(slope_along(slope_along(gradient)))(flat))
    V, values = spectrum.eigenvectors, spectrum.eigenvalues
    w = unravel(jnp.asarray(-0.5 * V @ ((V.T @ third) / (values + 2 * kappa))))
    return Response(
        attention=np.linalg.norm(flow.params.WQ, axis=(1, 2)),
        moved=np.linalg.norm(flow.params.W0 - np.asarray(at.W0)[None], axis=(1, 2)),
        coefficient=float(2 * jnp.linalg.norm(w.W0)),
    )


def measure(quick: bool) -> Measurement:
    scales = [1e-3, 1e-4, FINEST] if quick else [1e-3, 1e-4, 1e-5, FINEST]
    problem = reference_problem()
    chain = problem.population.chain
    theory = FirstSaddle.of(chain)
    spectrum = hessian_spectrum(problem, theory.params(WIDTH, WIDTH))
    s = slowest_relaxation(spectrum)

    runs = [focus(problem, e) for e in scales]
    visited = [at_first_saddle(run.flow) for run in runs]
    distance = DistanceToFirstSaddle.to(theory)
    distances = [float(distance(v.params)) for v in visited]
    M = np.outer(theory.gamma, theory.beta)
    misses = [
        float(np.linalg.norm(v.params.W0 @ v.params.W1 - M)) / theory.g**2
        for v in visited
    ]
    errors = [abs(r.rate / theory.kappa - 1) for r in runs]
    others, rows = other_chains(chains(quick), [1e-4, FINEST] if quick else scales)
    moved = response(problem, spectrum, theory.kappa)
    low, high = RESPONSE_RANGE
    fitted = (moved.attention > low) & (moved.attention < high)
    power = slope(moved.attention[fitted], moved.moved[fitted])
    coefficient = moved.moved[fitted] / moved.attention[fitted] ** 2

    tilts = [1 - r.cosine for r in runs]
    finest_size = np.linalg.norm(visited[-1].params.W0 @ visited[-1].params.W1, ord=2)
    finest, at = visited[-1], scales.index(1e-4)
    rate_order = 2 * s / (s + 2 * theory.kappa)
    saddle_order = 2 * s / (s + theory.kappa)
    claims = [
        Claim("loss at the saddle visited (ε = 1e-6)", theory.loss, finest.loss, 1e-9),
        Claim("its index, the head's width", WIDTH, finest.index, 0.0),
        Claim("σ₁(M) there, g²", theory.g**2, float(finest_size), 1e-5),
        Claim("order in ε of ‖M - γβᵀ‖", saddle_order, slope(scales, misses), 0.05),
        Claim("lowest eigenvalue at θ¹", -theory.kappa, spectrum.eigenvalues[0], 1e-9),
        Claim("rate on the flow, ε = 1e-6", theory.kappa, runs[-1].rate, 0.01),
        Claim("order in ε of its error", rate_order, slope(scales, errors), 0.05),
        Claim("cos(Φ, ππᵀ), ε = 1e-4", 1.0, runs[at].cosine, 1e-3),
        Claim("order in ε of 1 - cos", 2.0, slope(scales, tilts), 0.05),
        *_claims_of(others, rows),
        Claim("power of ‖WQ‖ in ‖ΔW0‖", 2.0, power, 0.05),
        Claim("‖ΔW0‖/‖WQ‖²", moved.coefficient, float(np.median(coefficient)), 0.05),
    ]
    numbers = {
        "scales": scales,
        "saddles": [
            {
                "loss": v.loss,
                "index": v.index,
                "miss_of_M": miss,
                "distance": d,
                "singular_values_W0": np.linalg.svd(v.params.W0, compute_uv=False),
                "singular_values_W1": np.linalg.svd(v.params.W1, compute_uv=False),
                "attention": float(np.linalg.norm(v.params.WQ)),
            }
            for v, d, miss in zip(visited, distances, misses, strict=True)
        ],
        "saddle_W0": finest.params.W0,
        "saddle_W1": finest.params.W1,
        "eigenvalues": spectrum.eigenvalues,
        "slowest_relaxation": s,
        "rates": [r.rate for r in runs],
        "cosines": [r.cosine for r in runs],
        "chains": rows,
        "response": {
            "attention": moved.attention[fitted],
            "moved": moved.moved[fitted],
            "power": power,
            "coefficient": moved.coefficient,
        },
    }
    data = (
        theory,
        scales,
        misses,
        distances,
        runs,
        errors,
        (saddle_order, rate_order),
        others,
        rows,
        moved,
    )
    return Measurement(claims, numbers, data)


def at_first_saddle(flow: gradflow.Flow) -> gradflow.Saddle:
    """The last saddle before the flow's end, of those that it visited."""
    visited = gradflow.find_saddles(flow)
    if len(visited) < 2:
        raise RuntimeError(f"The flow visited no second saddle:\n{visited}")
    return visited[1]


def other_chains(
    several: dict[str, gradflow.MarkovChain], scales: list[float]
) -> tuple[list[FirstSaddle], list[dict[str, Any]]]:
    theories, rows = [], []
    for name, chain in several.items():
        problem, theory = chain_problem(chain), FirstSaddle.of(chain)
        spectrum = hessian_spectrum(problem, theory.params(WIDTH, WIDTH))
        runs = [focus(problem, e) for e in scales]
        theories.append(theory)
        rows.append(
            {
                "name": name,
                "transition": chain.transition,
                "eigenvalues": spectrum.eigenvalues[: WIDTH + 1],
                "slowest_relaxation": slowest_relaxation(spectrum),
                "scales": scales,
                "rates": [r.rate for r in runs],
                "cosines": [r.cosine for r in runs],
            }
        )
    return theories, rows


def _claims_of(theories: list[FirstSaddle], rows: list[dict[str, Any]]) -> list[Claim]:
    kappas = np.array([abs(t.kappa) for t in theories])
    signs = np.array([np.sign(t.kappa) for t in theories])
    at = rows[0]["scales"].index(1e-4)
    lowest = np.array([-row["eigenvalues"][0] for row in rows]) / kappas
    rates = np.array([row["rates"][-1] for row in rows]) / kappas
    cosines = np.array([row["cosines"][at] for row in rows]) * signs
    of = f"{len(rows)} other chains, {np.sum(signs < 0)} with κ < 0"

    def farthest(ratios: np.ndarray) -> float:
        return float(ratios[np.argmax(np.abs(ratios - 1))])

    return [
        Claim(f"{of}: eigenvalue/-|κ|", 1.0, farthest(lowest), 1e-9),
        Claim("  rate on the flow/|κ|, ε = 1e-6, farthest", 1.0, farthest(rates), 0.01),
        Claim("  cos(Φ, sign(κ)ππᵀ), ε = 1e-4, least", 1.0, cosines.min(), 1e-3),
    ]


def draw(found: Measurement) -> Figure:
    theory, scales, misses, distances, runs, errors, orders, others, rows, moved = (
        found.data
    )
    figure = Figure(figsize=(10.5, 8.0), layout="constrained")
    (saddle, rate), (several, after) = figure.subplots(2, 2)
    e = np.asarray(scales)

    _with_order(
        saddle, e, misses, orders[0], r"saddle: $\|M-\gamma\beta^\top\|/g^2$", 0
    )
    saddle.plot(
        e,
        distances,
        "^",
        color=COLOURS[3],
        markerfacecolor="none",
        label=r"saddle: distance to the nearest $\theta^1$",
    )
    tilts = [1 - r.cosine for r in runs]
    _with_order(saddle, e, tilts, 2.0, r"focus: $1-\cos(\Phi,\pi\pi^\top)$", 1)
    _with_order(saddle, e, errors, orders[1], r"focus: |rate$/\kappa-1|$", 2)
    saddle.set(
        xscale="log",
        yscale="log",
        xlabel=r"initial scale $\varepsilon$",
        ylabel="distance from theory",
        title=r"(a) Saddle visited, and focus, against closed form",
    )
    saddle.set_ylim(bottom=saddle.get_ylim()[0] * 1e-8)
    saddle.legend(loc="lower right", fontsize="small")

    for r, scale, colour in zip(runs, scales, COLOURS, strict=False):
        clock = theory.kappa * (r.ts - r.ts[0])
        rate.plot(
            clock,
            r.rates / theory.kappa,
            color=colour,
            label=rf"$\varepsilon = 10^{{{np.log10(scale):.0f}}}$",
        )
    rate.axhline(
        1.0, color="black", linestyle="--", linewidth=1, label=r"theory $\kappa$"
    )
    rate.set(
        xlabel=r"time since arrival at $\theta^1$, $\kappa(t-t_1)$",
        ylabel=r"growth rate of the attention, over $\kappa$",
        ylim=(0.5, 1.05),
        title="(b) The rate along the flow, reference chain",
    )
    rate.legend(loc="lower center", ncols=2)

    _scatter(several, others, rows)

    a = np.array([moved.attention[1], moved.attention[-1]])
    after.plot(
        a,
        moved.coefficient * a**2,
        "k--",
        linewidth=1,
        label=r"theory $2\|w_{W_0}\|\,\|W_Q\|^2$",
    )
    after.plot(
        moved.attention[1::4],
        moved.moved[1::4],
        "o",
        color=COLOURS[0],
        markerfacecolor="none",
        markersize=4,
        label="flow from $\\theta^1+\\delta v$",
    )
    after.axvspan(
        *RESPONSE_RANGE,
        color="0.92",
        zorder=0,
        label=f"fitted: power {found.numbers['response']['power']:.4f}",
    )
    after.set(
        xscale="log",
        yscale="log",
        xlabel=r"$\|W_Q\|$",
        ylabel=r"$\|\Delta W_0\|$",
        title="(d) The embeddings' response",
    )
    after.legend(loc="upper left")
    return figure


def _with_order(
    ax: Any, e: np.ndarray, values: Any, power: float, label: str, colour: int
) -> None:
    values = np.asarray(values)
    constant = np.exp(np.mean(np.log(values) - power * np.log(e)))
    ax.plot(
        e,
        constant * e**power,
        "--",
        color=COLOURS[colour],
        linewidth=1,
        label=rf"theory $\propto\varepsilon^{{{power:.3g}}}$ "
        f"(points: {slope(e, values):.3f})",
    )
    ax.plot(e, values, "o", color=COLOURS[colour], markerfacecolor="none", label=label)


def _scatter(ax: Any, theories: list[FirstSaddle], rows: list[dict[str, Any]]) -> None:
    """A line for each chain, as far right as ε is small."""
    styles = {"sticky": ("D", 0), "not reversible": ("s", 1), "Metropolis": ("o", 2)}
    labelled = set()
    for theory, row in zip(theories, rows, strict=True):
        kind = row["name"].rstrip("0123456789 ")
        marker, colour = styles[kind]
        sign = r"$\kappa>0$" if theory.kappa > 0 else r"$\kappa<0$"
        label = f"{kind}, {sign}"
        ax.plot(
            row["scales"],
            np.abs(np.array(row["rates"]) / abs(theory.kappa) - 1),
            marker=marker,
            linewidth=0.6,
            color=COLOURS[colour],
            markerfacecolor="none" if theory.kappa > 0 else COLOURS[colour],
            label=None if label in labelled else label,
        )
        labelled.add(label)
    ax.axhline(0.01, color="black", linestyle="--", linewidth=1)
    ax.text(0.02, 0.011, "1 %", va="bottom", transform=ax.get_yaxis_transform())
    ax.set(
        xscale="log",
        yscale="log",
        xlabel=r"initial scale $\varepsilon$",
        ylabel=r"|rate on the flow$/|\kappa|-1|$",
        title=f"(c) The rate for {len(rows)} other chains",
    )
    ax.legend(loc="lower right", fontsize="small")


if __name__ == "__main__":
    run(__doc__, measure, draw)
