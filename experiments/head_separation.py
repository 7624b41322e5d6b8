"""Experiment 11: how long nearly equal heads stay together.

Claim. Heads that start equal stay equal, and all take the strongest pattern. From
scores a_k = ε·N(0, 1) they separate at a time that is predicted by the linearisation
about the *symmetric trajectory* θ_sym(t),

    δ̇ = Df(θ_sym(t)) δ,   f = -∇L in scores: δ̇ = -∇²L(θ_sym(t)) δ,

and not by a rate at a saddle: the symmetric solution lies at infinity, where all
attention is on one position, and the growth rate decays on the way there.

L = ½‖G - Σ_k V_k ⊗ s_k‖², G = Σ_j A_j ⊗ e_j with three orthogonal patterns,
‖A_j‖ = √d r^{1-j}, d = 50, r = 1.7, T = 40 positions, h = 3 heads, V(0) = 0. θ_sym is
the flow from the start of the mean head, in the quotient `gradflow.SymmetricHeads`. The
distance between the heads is

    δ = max_k |z_k|,   z_k = log s_k[2] - mean_k log s_k[2],

where s_k[2] is the attention of head k on the position of pattern 2, the next to be
learned. Heads are *separate* when δ reaches 1/4: some head then attends to that
position about a quarter more or less than the mean. This is large compared with ε and
small enough for a linear theory. Another measure is not: when V_k ⊗ s_k deviates from
the mean by a tenth, z_k is of order 4 in the replicator geometry, because s_k[2] itself
is small by then, and the flow gets there 6 to 7 % earlier than the linearisation (1 to
3 % later in scores).

Growth rates. Once all heads attend to pattern 1, let q be their attention on another
position, c = ‖A_1‖² for a position without a pattern, and c_j = ‖A_1‖² - ‖A_j‖² for
that of pattern j. Values follow at once, and (experiment 12)

    q̇ = -c q²/h (replicator), so that q → h/(c t);
    q̇ = -q (c q² + Σ c q²)/h (scores), so that q → (h/(2 T c t))^½, slowly.

Deviations z_k, and x_k of V_k along A_2, with Σ_k x_k = Σ_k z_k = 0, do not change Ĝ.
In the replicator geometry ẋ = ‖A_2‖q₂ z and ż = ‖A_2‖ x. In scores, with w_j = ‖A_j‖q_j
and deviations y_j of a[j] and y_1 of a[1], ẋ_j = w_j(y_j - y_1), ẏ_j = w_j x_j and
ẏ_1 = -Σ_j w_j x_j, because G - Ĝ is -Σ_j q_jA_j at position 1: patterns 2 and 3 act
together. The growth rates are

    ‖A_2‖ √q₂ → (κ/t)^½ with κ = h/(r² - 1) (replicator),
    λ² = w₂² + w₃² + ((w₂² - w₃²)² + w₂²w₃²)^½ → κ/t with w_j² → h‖A_j‖²/(2T c_j t)
    (scores),

so deviations grow like exp(2(κt)^½), and t_sep → (log 1/ε)²/(4κ): it grows with the
square of log(1/ε), and √t_sep grows by 1/(2√κ) with each e-fold of 1/ε. In scores the
lowest eigenvalue of ∇²L along the symmetric flow is -λ, up to a relative error of the
order of the attention that is not on position 1.

Heads that start exactly equal separate only through rounding, if at all (in scores,
where the solver mixes them; in the replicator geometry the solver keeps them equal to
the last bit). In the quotient they cannot separate, and it goes on to the best that
equal heads can do. Their overlap, the smallest cosine of V_j ⊗ s_j and V_k ⊗ s_k, is
one to within 1e-9 until t = 1e3 for ‖A_1‖ = 1. For ‖A_1‖ = √50 in scores it is at the
edge of that: by then rounding has grown to a 1 - overlap of 0.9e-9 or 1.6e-9, depending
on the horizon and hence on the steps, so no claim is made for that case.
"""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from _common import Claim, Measurement, run
from _factorisation import (
    COLOURS,
    EQUATIONS,
    GEOMETRIES,
    RATIO,
    Geometry,
    Target,
    orthogonal_target,
)
from jaxtyping import Array, Float
from matplotlib.figure import Figure

import gradflow
from gradflow import landscape

POSITIONS, HEADS, SIZE = 40, 3, np.sqrt(50.0)
APART = 0.25
LONGEST = {"scores": 2e4, "replicator": 1e3}
SYMMETRIC_HORIZON = 1e5
TOGETHER_UNTIL = 1e3


def rate(w2: float, w3: float) -> float:
    """λ."""
    a, b = w2**2, w3**2
    return float(np.sqrt(a + b + np.sqrt((a - b) ** 2 + a * b)))


_limits = [np.sqrt(HEADS / (2 * POSITIONS * (RATIO**p - 1))) for p in (2, 4)]
KAPPA = {
    "scores": rate(*_limits) ** 2,
    "replicator": HEADS / (RATIO**2 - 1),
}


class Deviation(eqx.Module):
    """δ."""

    problem: gradflow.TensorFactorisation

    def __call__(self, params: Any) -> Float[Array, ""]:
        return _largest(_log_attention(self.problem, params))


class Excess(eqx.Module):
    """δ minus its value at separation."""

    problem: gradflow.TensorFactorisation

    def __call__(self, params: Any) -> Float[Array, ""]:
        return Deviation(self.problem)(params) - APART


def _log_attention(
    problem: gradflow.TensorFactorisation, params: Any
) -> Float[Array, " heads"]:
    """The log attention of each head on the position of pattern 2."""
    return jnp.log(problem.attention(params)[:, 1])


def _largest(z: Float[Array, " heads"]) -> Float[Array, ""]:
    return jnp.max(jnp.abs(z - jnp.mean(z)))


@eqx.filter_jit
def _linear_deviation(
    problem: gradflow.TensorFactorisation, params: Any, delta: Any
) -> Float[Array, " times"]:
    """δ of the linearisation at each time."""

    def of_one(params: Any, delta: Any) -> Float[Array, ""]:
        log_attention = partial(_log_attention, problem)
        return _largest(jax.jvp(log_attention, (params,), (delta,))[1])

    return jax.vmap(of_one)(params, delta)


class Separation(NamedTuple):
    scale: float
    time: float
    """The time at which the heads of the flow separate."""
    predicted: float
    """The time at which those of the linearisation separate."""
    ts: Float[np.ndarray, " times"]
    flow: Float[np.ndarray, " times"]
    """δ of the flow."""
    linear: Float[np.ndarray, " times"]
    """δ of the linearisation."""


class Symmetric(NamedTuple):
    """Heads that start exactly equal, and their quotient."""

    ts: Float[np.ndarray, " times"]
    overlap_gap: float
    """The largest |1 - overlap| up to `TOGETHER_UNTIL`."""
    separates: float
    """The time at which rounding separates the heads of the full flow; infinite if it
    never does."""
    apart: Float[np.ndarray, " times"]
    loss: Float[np.ndarray, " times"]
    quotient_loss: Float[np.ndarray, " times"]


def measure(quick: bool) -> Measurement:
    exponents = (-3, -5, -7) if quick else (-2, -3, -4, -5, -6, -7)
    target = orthogonal_target(SIZE, POSITIONS)
    found: dict[str, list[Separation]] = {}
    symmetric: dict[str, Symmetric] = {}
    unit: dict[str, float] = {}
    for geometry in GEOMETRIES:
        found[geometry] = [
            _separation(target, geometry, 10.0**e, 40 if quick else 120)
            for e in exponents
        ]
        until = TOGETHER_UNTIL if quick else SYMMETRIC_HORIZON
        symmetric[geometry] = _symmetric(target, geometry, until)
        small = orthogonal_target(1.0, POSITIONS)
        unit[geometry] = _symmetric(small, geometry, TOGETHER_UNTIL).overlap_gap
    times = np.geomspace(30.0, 1e4, 6 if quick else 25)
    eigenvalues, predicted = _lowest_eigenvalues(target, times)
    claims = []
    for geometry in GEOMETRIES:
        claims += _claims(geometry, found[geometry], unit[geometry])
    claims.append(
        Claim(
            f"lowest eigenvalue of ∇²L at t = {times[-1]:.3g}, -λ",
            float(predicted[-1]),
            float(eigenvalues[-1]),
            0.02,
        )
    )
    numbers = {
        "kappa": KAPPA,
        "geometries": {
            g: {
                "scales": [row.scale for row in rows],
                "times": [row.time for row in rows],
                "predicted": [row.predicted for row in rows],
                "root_slope": _root_slope(rows),
                "root_slope_theory": 1 / (2 * np.sqrt(KAPPA[g])),
                "overlap_gap": symmetric[g].overlap_gap,
                "unit_overlap_gap": unit[g],
                "exactly_equal_separate": symmetric[g].separates,
                "exactly_equal_until": float(symmetric[g].ts[-1]),
                "quotient_loss": float(symmetric[g].quotient_loss[-1]),
            }
            for g, rows in found.items()
        },
        "eigenvalue_times": times,
        "lowest_eigenvalues": eigenvalues,
        "predicted_eigenvalues": predicted,
        "one_pattern_loss": target.plateau_loss(1),
    }
    data = (found, symmetric, times, eigenvalues, predicted, target)
    return Measurement(claims, numbers, data, _table(found, symmetric))


def _separation(
    target: Target, geometry: Geometry, scale: float, points: int
) -> Separation:
    problem = target.problem(geometry, HEADS)
    one = gradflow.SymmetricHeads(problem)
    start = problem.init(seed=0, scale=scale)
    until = LONGEST[geometry]
    flow = gradflow.integrate(problem, start, until, observables=())
    rising = [e for e in gradflow.find_events(flow, Excess(problem)) if e.rising]
    separated = rising[0].t

    middle = one.average(start)
    reference = gradflow.integrate(one, middle, until, observables=())
    delta0 = jax.tree.map(lambda a, b: a - b, start, one.expand(middle))
    ts = np.geomspace(0.1, 1.3 * separated, points)
    delta = landscape.linearised_along(
        problem, lambda t: one.expand(reference.at(t)), delta0, ts
    )
    linear = np.asarray(
        _linear_deviation(
            problem, one.expand(reference.at(ts)), jax.tree.map(jnp.asarray, delta)
        )
    )
    seen = flow.observe(Deviation(problem), ts)
    return Separation(scale, separated, _reaches(ts, linear), ts, seen, linear)


def _reaches(ts: np.ndarray, size: np.ndarray) -> float:
    """The time at which a growing size reaches `APART`, interpolated by a power law."""
    i = int(np.argmax(size >= APART))
    if i == 0:
        return float("nan")
    x, y = np.log(ts[i - 1 : i + 1]), np.log(size[i - 1 : i + 1])
    return float(np.exp(np.interp(np.log(APART), y, x)))


def _symmetric(target: Target, geometry: Geometry, until: float) -> Symmetric:
    problem = target.problem(geometry, HEADS)
    one = gradflow.SymmetricHeads(problem)
    start = one.init(seed=0, scale=1e-3)
    ts = np.append(0.0, np.geomspace(0.1, until, 200))
    flow = gradflow.integrate(
        problem, one.expand(start), until, ts=ts, observables=("head_overlap",)
    )
    quotient = gradflow.integrate(one, start, until, ts=ts, observables=())
    early = ts <= TOGETHER_UNTIL
    gap = np.max(np.abs(flow.observables["head_overlap"][early] - 1))
    rising = [e.t for e in gradflow.find_events(flow, Excess(problem)) if e.rising]
    seen = flow.observe(Deviation(problem), ts[1:])
    return Symmetric(
        ts[1:],
        float(gap),
        rising[0] if rising else float("inf"),
        seen,
        flow.loss[1:],
        quotient.loss[1:],
    )


def _lowest_eigenvalues(
    target: Target, times: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The lowest eigenvalues of ∇²L along the symmetric flow in scores, and -λ."""
    problem = target.problem("scores", HEADS)
    one = gradflow.SymmetricHeads(problem)
    reference = gradflow.integrate(
        one, one.init(seed=0, scale=0.0), float(times[-1]), observables=()
    )
    lowest, predicted = [], []
    for t in times:
        params = one.expand(reference.at(float(t)))
        lowest.append(landscape.hessian_spectrum(problem, params).eigenvalues[0])
        w = target.sizes * np.asarray(problem.attention(params))[0, : len(target.sizes)]
        predicted.append(-rate(w[1], w[2]))
    return np.array(lowest), np.array(predicted)


def _root_slope(rows: list[Separation]) -> float:
    """d√t_sep/d log(1/ε) between the two smallest ε."""
    a, b = rows[-2:]
    return float((np.sqrt(b.time) - np.sqrt(a.time)) / np.log(a.scale / b.scale))


def _claims(geometry: str, rows: list[Separation], gap: float) -> list[Claim]:
    first = f"{geometry}: "
    steps = np.diff([row.time for row in rows])
    claims = [
        Claim(
            first + f"separation at ε = {row.scale:.0e}, linearisation",
            row.predicted,
            row.time,
            0.05,
        )
        for row in rows
    ]
    return [
        *claims,
        Claim(
            first + "factors of 1/ε that take longer than the one before",
            len(steps) - 1,
            int(np.sum(np.diff(steps) > 0)),
            0,
        ),
        Claim(
            first + "d√t/d log(1/ε) at the smallest ε, 1/(2√κ)",
            1 / (2 * np.sqrt(KAPPA[geometry])),
            _root_slope(rows),
            0.2,
        ),
        Claim(
            first + "‖A_1‖ = 1, equal heads: |1 - overlap| to t = 1e3",
            0.0,
            gap,
            1e-9,
        ),
    ]


def _table(found: dict[str, list[Separation]], symmetric: dict[str, Symmetric]) -> str:
    lines = [f"{'geometry':<12} {'ε':>8} {'t_sep':>10} {'linearised':>10} {'off':>8}"]
    for geometry, rows in found.items():
        for row in rows:
            off = row.time / row.predicted - 1
            lines.append(
                f"{geometry:<12} {row.scale:>8.0e} {row.time:>10.5g} "
                f"{row.predicted:>10.5g} {off:>+8.2%}"
            )
        s = symmetric[geometry]
        lines.append(
            f"{geometry:<12} {'equal':>8} {s.separates:>10.5g}  "
            f"(followed to t = {s.ts[-1]:g})"
        )
    return "\n".join(lines)


def draw(measurement: Measurement) -> Figure:
    found, symmetric, times, eigenvalues, predicted, target = measurement.data
    figure = Figure(figsize=(11.5, 11.0), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)  # pyright: ignore
    axes: Any = figure.subplots(3, 2)
    for ax, (geometry, rows) in zip(axes[0], found.items(), strict=True):
        _draw_growth(ax, rows)
        ax.set_title(
            f"({'ab'[geometry == 'replicator']}) {EQUATIONS[geometry]}", loc="left"
        )
    _draw_times(axes[1, 0], found)
    _draw_eigenvalues(axes[1, 1], times, eigenvalues, predicted)
    for letter, ax, (geometry, s) in zip("ef", axes[2], symmetric.items(), strict=True):
        _draw_symmetric(ax, s, target)
        ax.set_title(f"({letter}) Exactly equal heads, {geometry}", loc="left")
    return figure


def _draw_growth(ax: Any, rows: list[Separation]) -> None:
    shades = np.linspace(0.15, 0.85, len(rows))
    for row, shade in zip(rows, shades, strict=True):
        colour = matplotlib.colormaps["viridis"](shade)
        exponent = round(np.log10(row.scale))
        ax.plot(row.ts, row.flow, color=colour, label=rf"$10^{{{exponent}}}$")
        ax.plot(row.ts, row.linear, color="black", linewidth=1, linestyle=(0, (3, 3)))
    ax.axhline(APART, color="0.5", linewidth=1, linestyle=":")
    ax.set(xscale="log", yscale="log", xlabel="time $t$")
    ax.set_ylim(1e-9, 3)
    ax.set_ylabel(r"deviation $\delta$ of the heads")
    ax.legend(title=r"$\varepsilon$ (dashed: linearised)", fontsize="small", ncols=2)


def _draw_times(ax: Any, found: dict[str, list[Separation]]) -> None:
    for colour, (geometry, rows) in zip(COLOURS, found.items(), strict=False):
        x = np.array([row.scale for row in rows])
        y = np.sqrt([row.time for row in rows])
        ax.plot(x, y, "o", color=colour, label=f"{geometry}, flow")
        ax.plot(
            x,
            np.sqrt([row.predicted for row in rows]),
            "x",
            color="black",
            label="linearised along $\\theta_{sym}$" if geometry == "scores" else None,
        )
        slope = 1 / (2 * np.sqrt(KAPPA[geometry]))
        line = y[-1] + slope * np.log(x[-1] / x)
        ax.plot(
            x,
            line,
            color=colour,
            linewidth=1,
            linestyle="--",
            label=rf"slope $1/(2\sqrt{{\kappa}})$ = {slope:.3g}",
        )
    ax.set(xscale="log", xlabel=r"initial asymmetry $\varepsilon$")
    ax.invert_xaxis()
    ax.set_ylim(bottom=0)
    ax.set_ylabel(r"$\sqrt{t_{sep}}$")
    ax.set_title(
        r"(c) Separation: $\sqrt{t}$ grows like $\log 1/\varepsilon$", loc="left"
    )
    ax.legend(fontsize="small")


def _draw_eigenvalues(
    ax: Any, times: np.ndarray, eigenvalues: np.ndarray, predicted: np.ndarray
) -> None:
    ax.plot(
        times,
        -eigenvalues,
        "o",
        color=COLOURS[0],
        label=r"$-\lambda_{min}(\nabla^2 L)$",
    )
    ax.plot(
        times,
        -predicted,
        color="black",
        linewidth=1,
        label=r"$\lambda(t)$, theory",
    )
    ax.plot(
        times,
        np.sqrt(KAPPA["scores"] / times),
        color="0.5",
        linestyle="--",
        label=r"$\sqrt{\kappa/t}$",
    )
    ax.set(xscale="log", yscale="log", xlabel="time $t$", ylabel="growth rate")
    ax.set_title("(d) Rate along the symmetric flow, scores", loc="left")
    ax.legend(fontsize="small")


def _draw_symmetric(ax: Any, s: Symmetric, target: Target) -> None:
    ax.plot(s.ts, s.loss, color=COLOURS[0], label="all heads")
    ax.plot(
        s.ts,
        s.quotient_loss,
        color=COLOURS[1],
        linestyle="--",
        label="quotient: one head",
    )
    ax.axhline(
        target.plateau_loss(1), color="0.4", linewidth=1, linestyle=":", label="$L_1$"
    )
    ax.set(xscale="log", yscale="log", xlabel="time $t$", ylabel="loss $L$")
    ax.set_ylim(1e-6, 200)
    other = ax.twinx()
    other.plot(s.ts, np.maximum(s.apart, 1e-16), color="0.6", linewidth=1)
    other.set_yscale("log")
    other.set_ylim(1e-17, 1e3)
    other.set_ylabel(r"deviation $\delta$ (grey)", color="0.4")
    ax.legend(fontsize="small", loc="center left")


if __name__ == "__main__":
    run(__doc__, measure, draw)
