"""Experiment 12: the approach to the solution of each plateau.

L = ½‖G - Ĝ‖², Ĝ = Σ_k V_k ⊗ s_k, G = Σ_j A_j ⊗ e_j with three orthogonal patterns,
α_j = ‖A_j‖ = r^{1-j}, r = 1.7, at three of T = 40 positions. While k patterns are known
the flow tends to the k-pattern solution G_k = Σ_{j≤k} A_j ⊗ e_j, at a distance
D_k(t) = ‖Ĝ - G_k‖, until pattern k + 1 takes over.

Claim. D_k → C t^{-n} with n = 1 in the replicator geometry and n = ½ in scores. This is
a power of time and not an exponential, because the solution lies at infinity (attention
tends to the known positions, so the scores go to infinity like n·log t).

Derivation. Let S (heads × k) be the attention on the known positions and Q the rest,
which is small. Values relax at rates of order one, so they follow: SᵀV = [A_1 … A_k]ᵀ,
and along an unknown pattern j, V_j = (SSᵀ)⁻¹α_j Q_j. With as many heads as known
patterns, the force on Q_i, the attention of all heads on position i, is g_i = -K_i Q_i,

    K_i = S⁻ᵀ diag(α_m² - β_i²) S⁻¹,

where β_i is ‖A_j‖ if an unknown pattern j sits at position i, and zero otherwise. On
the known positions g is of order Q². Then, to leading order,

    replicator: d log Q_ki/dt = g_ki: Q_i = b_i/t,  K_i b_i = 1;
    scores: d log Q_ki/dt = Q_ki g_ki - Σ_m S_km² g_km, g_km = -Σ_l g_kl (S⁻¹Q_l)_m:
            Q_i = b_i t^{-½} and, with y_i = K_i b_i,
            b_ki y_ki + Σ_m S_km² Σ_l y_kl (S⁻¹b_l)_m = ½,

and in both C² = Σ_i b_iᵀ S⁻ᵀ diag(α_m² + β_i²) S⁻¹ b_i. For the replicator that is,
with σ_m = Σ_k S_km,

    C² = Σ_m σ_m² [ (T-h)/α_m² + Σ_{j>k} (α_m² + α_j²)/(α_m² - α_j²)² ],

and for one head in scores C² = [T - h + Σ_{j>1} (α_1² + α_j²)/(α_1² - α_j²)]/(2T).
This requires that the attention does not run ahead of the values. Where it does, the
replicator's attention is driven down by a factor of up to exp(-α²/2) while the values
still relax, and the law is valid from there on with t + t_0 in place of t: for one head
and ‖A_1‖ = √50, as in experiment 10, D falls to 1e-10 within t = 30. So here ‖A_1‖ = 1.

In terms of quantities that gradflow reports, L - L_k = ½Σ_i Q_iᵀ K_i Q_i is of order
D², and so is the deficit in the shares of known patterns. In scores the powers of the
positions equalise slowly, like t^{-1/T}, and the attention that a head keeps on another
head's position decays like D itself, so that S still moves and C is reached only
roughly.

A student of k heads can know no more than k patterns and stays on its plateau, where
the law can be observed for a long time. In the flow of three heads from ε = 1e-9 it is
valid between two takeovers. A plateau begins late, at a time that is not the origin of
the law, so the law is tested without reference to time,

    -dD/dt = (n/C^{1/n}) D^{1+1/n}:   p = d log(-dD/dt)/d log D = 1 + 1/n,

which is 2 for the replicator and 3 in scores. For a student, p is measured over the
last decade of time. For a plateau, it is measured where p is steadiest (|dp/d log D| is
smallest), before D_k reaches its minimum and once D_k is below the geometric mean of
its first value and its minimum. The power of D in L - L_k is 2.

What fails: not every plateau is long enough. The next pattern's part in D grows like
exp(2(κt)^½) (experiment 11), and on plateau 2, and in the replicator geometry on
plateau 1, D_k reaches its minimum before p has reached its limit. There p is reported
and no claim is made.
"""

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import Claim, Measurement, run, slope
from _factorisation import (
    COLOURS,
    EQUATIONS,
    GEOMETRIES,
    Geometry,
    Target,
    orthogonal_target,
    shade_stages,
)
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from scipy.optimize import root

import gradflow

POSITIONS, PATTERNS, SIZE = 40, 3, 1.0
SCALE = 1e-9
HORIZON = 1e5
RTOL = 1e-10
"""Attention of size 1/(α²t) is driven by a force of the same size, which errors in the
values, of size rtol·‖V‖, must not hide: at 1e-8 the replicator's law ends early."""
POWER = {"scores": 0.5, "replicator": 1.0}
LONG_PLATEAUS = {"scores": (1, 3), "replicator": (3,)}
"""The plateaus on which the law is reached before the next pattern interferes."""


class Approach(eqx.Module):
    """Measurements at parameters θ: D_k and dD_k/dt for each k, the loss, and the
    shares of the patterns."""

    problem: gradflow.TensorFactorisation
    solutions: Float[np.ndarray, "patterns features positions"]

    def __call__(self, params: Any) -> dict[str, Array]:
        gradient = jax.grad(self.problem)(params)
        velocity = self.problem.velocity(params, gradient)

        def distances(params: Any) -> Float[Array, " patterns"]:
            found = params.V.T @ self.problem.attention(params)
            return jnp.sqrt(jnp.sum((found - self.solutions) ** 2, axis=(1, 2)))

        distance, rate = jax.jvp(distances, (params,), (velocity,))
        shares = self.problem.observables["pattern_shares"](params)
        return {
            "distance": distance,
            "rate": rate,
            "loss": jnp.asarray(self.problem(params)),
            "shares": jnp.sum(jnp.asarray(shares), axis=0),
        }


class Run(NamedTuple):
    """A flow, and an `Approach` at the times `ts`."""

    problem: gradflow.TensorFactorisation
    flow: gradflow.Flow
    solutions: Float[np.ndarray, "patterns features positions"]
    """G_1, G_2, G_3."""
    ts: Float[np.ndarray, " times"]
    seen: dict[str, np.ndarray]


def _follow(target: Target, geometry: Geometry, heads: int, until: float) -> Run:
    problem = target.problem(geometry, heads)
    start = problem.init(seed=0, scale=SCALE)
    flow = gradflow.integrate(problem, start, until, rtol=RTOL, observables=())
    solutions = np.stack([target.known(k) for k in range(1, PATTERNS + 1)])
    ts = np.geomspace(0.3, until, 1000)
    seen = flow.observe(Approach(problem, solutions), ts)
    return Run(problem, flow, solutions, ts, seen)


def prefactor(target: Target, S: Float[np.ndarray, "k k"], geometry: Geometry) -> float:
    """C of the law, given the attention S on the known positions."""
    k, inverse, size = len(S), np.linalg.inv(S), target.sizes
    beta = np.append(0.0, size[k:])
    count = np.append(target.positions - PATTERNS, np.ones(PATTERNS - k))
    squares = size[:k] ** 2
    K = np.stack([inverse.T @ np.diag(squares - x**2) @ inverse for x in beta])
    if geometry == "replicator":
        b = np.stack([np.linalg.solve(Ki, np.ones(k)) for Ki in K])
    else:

        def unbalanced(x: np.ndarray) -> np.ndarray:
            b = x.reshape(len(beta), k)
            y = np.einsum("ikl,il->ik", K, b)
            pull = np.einsum("km,i,ik,im->k", S**2, count, y, b @ inverse.T)
            return (b * y + pull - 0.5).ravel()

        alike = np.diag(1 / np.sqrt(2 * (target.positions - k + 1) * squares))
        guess = np.tile(S @ alike @ np.ones(k), len(beta))
        solved = root(unbalanced, guess, tol=1e-13)
        assert solved.success, solved.message
        b = solved.x.reshape(len(beta), k)
    held = b @ inverse.T  # S⁻¹ b_i, row by row
    weights = squares[None, :] + beta[:, None] ** 2
    return float(np.sqrt(np.sum(count[:, None] * weights * held**2)))


class Law(NamedTuple):
    """Measurements on a student of k heads over the last decade of time."""

    power: float
    """p."""
    excess_power: float
    """d log(L - L_k)/d log D."""
    C: float
    """C from D and dD/dt at the end."""
    C_theory: float
    S: Float[np.ndarray, "k k"]


class Plateau(NamedTuple):
    """D_k in the flow of three heads, from the acquisition of pattern k to the next."""

    start: float
    end: float
    lowest: float
    """The time at which D_k is smallest; from then on pattern k + 1 takes over."""
    least: float
    """D_k at that time."""
    power: float
    """p where it is steadiest."""
    read: float
    """The time at which p is steadiest."""


def measure(quick: bool) -> Measurement:
    target = orthogonal_target(SIZE, POSITIONS)
    # The quick version keeps only the student of one head.
    students = (1,) if quick else (1, 2, 3)
    runs: dict[str, dict[int, Run]] = {}
    laws: dict[str, dict[int, Law]] = {}
    stages: dict[str, gradflow.Stages] = {}
    plateaus: dict[str, list[Plateau]] = {}
    for geometry in GEOMETRIES:
        runs[geometry] = {
            k: _follow(target, geometry, k, HORIZON) for k in {*students, PATTERNS}
        }
        laws[geometry] = {
            k: _law(target, geometry, student) for k, student in runs[geometry].items()
        }
        whole = runs[geometry][PATTERNS]
        stages[geometry] = gradflow.find_stages(whole.flow)
        plateaus[geometry] = _plateaus(whole, stages[geometry])
    claims = []
    for geometry in GEOMETRIES:
        claims += _claims(geometry, laws[geometry], plateaus[geometry])
    numbers = {
        "sizes": target.sizes,
        "geometries": {
            g: {
                "laws": {k: law._asdict() for k, law in laws[g].items()},
                "plateaus": [p._asdict() for p in plateaus[g]],
            }
            for g in GEOMETRIES
        },
    }
    return Measurement(
        claims, numbers, (runs, laws, stages, plateaus), _table(laws, plateaus)
    )


def _law(target: Target, geometry: Geometry, run: Run) -> Law:
    problem = run.problem
    k, n = problem.heads, POWER[geometry]
    S = np.asarray(problem.attention(run.flow.final))[:, :k]
    late = run.ts >= 0.1 * run.ts[-1]
    D, rate = (run.seen[name][late, k - 1] for name in ("distance", "rate"))
    excess = run.seen["loss"][late] - target.plateau_loss(k)
    return Law(
        power=slope(D, -rate),
        excess_power=slope(D, np.abs(excess)),
        C=float((n * D[-1] ** (1 + 1 / n) / -rate[-1]) ** n),
        C_theory=prefactor(target, S, geometry),
        S=S,
    )


def _plateaus(run: Run, stages: gradflow.Stages) -> list[Plateau]:
    times = [*(a.t for a in stages.acquisitions), float(run.ts[-1])]
    return [
        _plateau(run, k, start, end)
        for k, (start, end) in enumerate(itertools.pairwise(times))
    ]


def _plateau(run: Run, k: int, start: float, end: float) -> Plateau:
    watch = Approach(run.problem, run.solutions)
    ts = np.geomspace(start, end, 400)
    seen = run.flow.observe(watch, ts)
    least = int(np.argmin(seen["distance"][:, k]))
    D = seen["distance"][:, k]
    falls = (np.arange(len(ts)) < least) & (seen["rate"][:, k] < 0)
    falls &= np.sqrt(D[0] * D[least]) > D
    log_D = np.log(seen["distance"][falls, k])
    power = np.gradient(np.log(-seen["rate"][falls, k]), log_D)
    steadiest = int(np.argmin(np.abs(np.gradient(power, log_D))))
    return Plateau(
        start,
        end,
        float(ts[least]),
        float(seen["distance"][least, k]),
        float(power[steadiest]),
        float(ts[falls][steadiest]),
    )


def _claims(
    geometry: Geometry, laws: dict[int, Law], plateaus: list[Plateau]
) -> list[Claim]:
    power, claims = 1 + 1 / POWER[geometry], []
    for k, law in laws.items():
        first = f"{geometry}, {k} head{'s' * (k > 1)}: "
        claims += [
            Claim(first + f"-dD_{k}/dt ∝ D^p, p", power, law.power, 0.01),
            Claim(first + f"C, D_{k} → C/t^n", law.C_theory, law.C, 0.1),
        ]
        if k < PATTERNS:  # if all are known, it is ½D² by definition
            claims.append(
                Claim(first + f"power of D_{k} in L - L_{k}", 2, law.excess_power, 0.01)
            )
    return [
        *claims,
        *(
            Claim(
                f"{geometry}, three heads, plateau {k}: p",
                power,
                plateaus[k - 1].power,
                0.02,
            )
            for k in LONG_PLATEAUS[geometry]
        ),
    ]


def _table(laws: dict[str, dict[int, Law]], plateaus: dict[str, list[Plateau]]) -> str:
    lines = []
    for geometry, found in plateaus.items():
        for k, p in enumerate(found, start=1):
            lines.append(
                f"{geometry:<10} plateau {k}: t = {p.start:.4g} to {p.end:.4g}, D_{k} "
                f"smallest ({p.least:.2e}) at {p.lowest:.4g}; p = {p.power:.3f} at "
                f"t = {p.read:.4g}"
            )
        for k, law in laws[geometry].items():
            lines.append(f"{geometry:<10} {k} heads, S = {np.round(law.S, 3).tolist()}")
    return "\n".join(lines)


def draw(measurement: Measurement) -> Figure:
    runs, laws, stages, plateaus = measurement.data
    figure = Figure(figsize=(11.5, 11.5), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)  # pyright: ignore
    axes: Any = figure.subplots(3, 2, sharey="row")
    for column, geometry in enumerate(GEOMETRIES):
        alone, together, law = axes[:, column]
        _draw_students(alone, geometry, runs[geometry], laws[geometry])
        whole = runs[geometry][PATTERNS]
        _draw_plateaus(together, whole, stages[geometry], plateaus[geometry])
        _draw_law(law, geometry, whole, plateaus[geometry])
        alone.set_title(
            f"({'ab'[column]}) Students of $k$ heads: {EQUATIONS[geometry]}", loc="left"
        )
        together.set_title(f"({'cd'[column]}) Three heads", loc="left", pad=26)
        law.set_title(f"({'ef'[column]}) Three heads, independent of time", loc="left")
    return figure


def _draw_students(
    ax: Any, geometry: Geometry, runs: dict[int, Run], laws: dict[int, Law]
) -> None:
    n = POWER[geometry]
    for k, student in sorted(runs.items()):
        ax.plot(
            student.ts,
            student.seen["distance"][:, k - 1],
            color=COLOURS[k - 1],
            label=f"$D_{k}$, {k} head{'s' * (k > 1)}",
        )
        ts = student.ts[student.ts >= 0.01 * student.ts[-1]]
        ax.plot(
            ts,
            laws[k].C_theory * ts**-n,
            color="black",
            linewidth=1,
            linestyle=(0, (3, 3)),
            label="theory $C\\,t^{-n}$" if k == max(runs) else None,
        )
    ax.set(xscale="log", yscale="log", xlabel="time $t$")
    ax.set_ylabel(r"$D_k=\|\hat G-G_k\|$")
    ax.legend(fontsize="small", loc="lower left")


def _draw_plateaus(
    ax: Any, run: Run, stages: gradflow.Stages, plateaus: list[Plateau]
) -> None:
    for k, plateau in enumerate(plateaus):
        D = run.seen["distance"][:, k]
        inside = (run.ts >= plateau.start) & (run.ts <= plateau.end)
        ax.plot(run.ts, D, color=COLOURS[k], linewidth=0.8, alpha=0.6)
        ax.plot(
            run.ts[inside],
            D[inside],
            color=COLOURS[k],
            linewidth=2.2,
            label=f"$D_{k + 1}$",
        )
        ax.plot(plateau.lowest, plateau.least, "o", color=COLOURS[k], markersize=4)
    ax.set(xscale="log", yscale="log", xlabel="time $t$")
    ax.set_ylabel(r"$D_k=\|\hat G-G_k\|$")
    ax.set_xlim(run.ts[0], run.ts[-1])
    shade_stages([ax], stages, named=ax)
    ax.legend(fontsize="small", loc="lower left")


def _draw_law(ax: Any, geometry: Geometry, run: Run, plateaus: list[Plateau]) -> None:
    power = 1 + 1 / POWER[geometry]
    for k, plateau in enumerate(plateaus):
        inside = (run.ts >= plateau.start) & (run.ts <= plateau.lowest)
        D, rate = run.seen["distance"][inside, k], -run.seen["rate"][inside, k]
        ax.plot(
            D,
            np.where(rate > 0, rate, np.nan),
            color=COLOURS[k],
            label=f"plateau {k + 1}",
        )
        if k + 1 not in LONG_PLATEAUS[geometry]:
            continue
        at = int(np.searchsorted(run.ts[inside], plateau.read))
        near = (D[at] / 2.5 < D) & (D[at] * 2.5 > D)
        ax.plot(
            D[near],
            1.6 * rate[at] * (D[near] / D[at]) ** power,
            color="black",
            linewidth=1,
            linestyle=(0, (3, 3)),
            label=f"$D^{power:g}$" if k == PATTERNS - 1 else None,
        )
    ax.set(xscale="log", yscale="log", xlabel="$D_k$", ylabel="$-dD_k/dt$")
    ax.legend(fontsize="small", loc="lower right")


if __name__ == "__main__":
    run(__doc__, measure, draw)
