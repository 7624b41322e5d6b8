"""Experiment 10: heads learn sparse attention patterns one after another.

This is the published gradient-flow simulation of *Incremental Learning of Sparse
Attention Patterns in Transformers*: L = ½‖G - Ĝ‖², Ĝ = Σ_k V_k ⊗ s_k, with h = 3 heads,
T = 40 positions, and a target G = Σ_j A_j ⊗ e_j of three patterns at one position each.
A_j is a random d × d matrix, d = 50, with entries N(0, 1/d) times r^{1-j}, r = 1.7; the
three are made orthogonal to each other. With g_k = ⟨V_k, G - Ĝ⟩ and
J(s) = diag(s) - ssᵀ, the flow is

    V̇_k = (G - Ĝ)s_k,   ṡ_k = J(s_k)²g_k (gradient flow in scores, s_k = softmax(a_k))
                    or  ṡ_k = J(s_k)g_k (replicator),

from V = 0 and scores N(0, ε²), ε = 1e-3, to t = 1e5.

Claims, in both geometries.

- Patterns are acquired in order of their importance ‖A_j‖: the first by all heads,
  which are still alike (competitive), each of the others by one head (cooperative).
  Stages and acquisitions are those of `gradflow.find_stages`.
- Between two acquisitions there is a plateau: where the flow is slowest, the loss is
  L_k = ½Σ_{j>k}‖A_j‖², which remains when k patterns are known. The initial loss is
  L_0.
- As V(0) = 0 and V̇ = (G - Ĝ)s, the values stay in the span of the A_j. In coordinates
  of an orthonormal basis B of that span, V = WBᵀ, the flow is that of the target BᵀG.
  This is an exact reduction from d² features to three, and everything here is
  integrated in it (the full form takes over ten minutes). We compare the velocity with
  that of the full form along the flow and (not with `--quick`) both flows at d = 10.
- The energy balances: L(0) - L(t) = ∫ -⟨∇L, θ̇⟩.

What fails:

- It is not true that each head ends with one pattern to itself. Once k heads know k
  patterns, any attention on their positions is compatible with Ĝ = G_k for suitable
  values, and in the replicator geometry nothing drives it further. `purity` is the
  final attention, on the position of pattern j, of the head that acquired it.
- Random matrices that are not made orthogonal do not always behave in this way. Their
  cosines c_1j are small, about 1/d. But heads that all hold pattern 1 are pushed
  towards or away from position j by g = c_1j ‖A_1‖‖A_j‖/h. If c_1j < 0, the
  replicator's attention there decays like exp(gt), and that pattern may come late, out
  of order, or never. `random_seeds` has, for several seeds, the order in which patterns
  are acquired by t = 1e5 (not with `--quick`).
"""

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import Claim, Measurement, run
from _factorisation import (
    COLOURS,
    EQUATIONS,
    GEOMETRIES,
    Geometry,
    Target,
    random_target,
    reduced,
    shade_stages,
)
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import gradflow

D, POSITIONS, HEADS, PATTERNS = 50, 40, 3, 3
SCALE, HORIZON = 1e-3, 1e5
SEEDS = (0, 1, 2, 3, 4, 5)
NAMES = ("competitive", "cooperative", "cooperative")
STYLES = ("-", "--", ":")


class Simulation(NamedTuple):
    target: Target
    flow: gradflow.Flow
    stages: gradflow.Stages
    plateau_losses: list[float]
    """The loss where the flow is slowest after each acquisition except the last."""
    field_error: float
    """The largest difference between the velocities of both forms, relative to the
    final ‖V‖."""
    flow_error: float
    """The largest difference between both flows at d = 10, in V relative to its largest
    entry, in s absolute; NaN if they were not integrated."""


def measure(quick: bool) -> Measurement:
    # The quick version leaves out the flow of the full form.
    target = random_target(D, POSITIONS)
    found = {g: _simulate(target, g, quick) for g in GEOMETRIES}
    seeds = () if quick else SEEDS
    levels = [target.plateau_loss(k) for k in range(PATTERNS + 1)]
    claims = []
    for geometry, simulation in found.items():
        claims += _claims(geometry, simulation, levels)
    numbers = {
        "d": D,
        "sizes": target.sizes,
        "cosines": _cosines(target),
        "levels": levels,
        "random_seeds": {g: [_acquired(g, i) for i in seeds] for g in GEOMETRIES},
        "geometries": {g: _numbers(s) for g, s in found.items()},
    }
    text = "\n".join(
        f"{geometry} ({s.flow.stats['run_seconds']:.1f} s, {s.flow.stats['solver']})\n"
        f"{s.stages}"
        for geometry, s in found.items()
    )
    for geometry, rows in numbers["random_seeds"].items():
        for row in rows:
            c = ", ".join(f"{x:+.3f}" for x in row["cosines"])
            order = [1 + j for j in row["acquired"]]
            text += f"\nnot orthogonal, {geometry}, cosines {c}: patterns {order}"
    return Measurement(claims, numbers, found, text)


def _simulate(target: Target, geometry: Geometry, quick: bool) -> Simulation:
    small, basis = reduced(target)
    flow = _flow(small, geometry)
    stages = gradflow.find_stages(flow)
    return Simulation(
        target,
        flow,
        stages,
        _plateau_losses(stages),
        _field_error(target.problem(geometry, HEADS), flow, basis),
        float("nan") if quick else _flow_error(geometry),
    )


def _flow(target: Target, geometry: Geometry) -> gradflow.Flow:
    problem = target.problem(geometry, HEADS)
    # The start has the same attention for any number of features.
    start = problem.init(seed=0, scale=SCALE)
    return gradflow.integrate(
        problem,
        start,
        HORIZON,
        ts=np.append(0.0, np.geomspace(0.1, HORIZON, 400)),
        observables=("attention", "value_coordinates", "position_loss"),
    )


def _field_error(
    whole: gradflow.TensorFactorisation, flow: gradflow.Flow, basis: np.ndarray
) -> float:
    """The difference between the velocities of both forms, at some states of the
    flow."""

    @eqx.filter_jit
    def velocity(problem: gradflow.AbstractLoss, params: Any) -> Any:
        return problem.velocity(params, jax.grad(problem)(params))

    def lifted(params: Any) -> Any:
        return eqx.tree_at(lambda p: p.V, params, params.V @ basis.T)

    errors = []
    for i in range(0, len(flow.ts), 20):
        here = jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), flow.params)
        short, full = velocity(flow.knowledge, here), velocity(whole, lifted(here))
        a, b = (ravel_pytree(v)[0] for v in (lifted(short), full))
        errors.append(float(jnp.linalg.norm(a - b)))
    return max(errors) / float(np.linalg.norm(flow.final.V))


def _flow_error(geometry: Geometry) -> float:
    target = random_target(10, POSITIONS)
    small, basis = reduced(target)
    whole, short = (_flow(t, geometry) for t in (target, small))
    V = np.asarray(whole.params.V)
    values = np.abs(V - np.asarray(short.params.V) @ basis.T) / np.max(np.abs(V))
    moved = whole.observables["attention"] - short.observables["attention"]
    return float(max(np.max(values), np.max(np.abs(moved))))


def _plateau_losses(stages: gradflow.Stages) -> list[float]:
    """The losses where the flow is slowest between one acquisition and the next."""
    times = [a.t for a in stages.acquisitions]
    losses = []
    for before, after in itertools.pairwise(times):
        rests = [p for p in stages.plateaus if before < p.slowest < after]
        if rests:
            losses.append(min(rests, key=lambda p: p.speed).loss)
    return losses


def _cosines(target: Target) -> np.ndarray:
    unit = target.patterns / target.sizes[:, None]
    return (unit @ unit.T)[np.triu_indices(PATTERNS, 1)]


def _acquired(geometry: Geometry, seed: int) -> dict[str, Any]:
    """The patterns acquired with random matrices that are not orthogonal, and when."""
    target = random_target(D, POSITIONS, seed, orthogonal=False)
    flow = _flow(reduced(target)[0], geometry)
    found = gradflow.find_stages(flow).acquisitions
    return {
        "seed": seed,
        "cosines": _cosines(target),
        "acquired": [a.pattern for a in found],
        "times": [a.t for a in found],
    }


def _claims(geometry: str, simulation: Simulation, levels: list[float]) -> list[Claim]:
    stages, flow = simulation.stages, simulation.flow
    acquired = [a.pattern for a in stages.acquisitions]
    in_order = sum(a == b for a, b in enumerate(acquired))
    named = sum(a == b for a, b in zip(stages.names, NAMES, strict=False))
    by = [len(a.heads) for a in stages.acquisitions] + [0] * PATTERNS
    energy = flow.certificate.energy_imbalance / flow.certificate.energy_released
    first = f"{geometry}: "
    claims = [
        Claim(first + "patterns acquired in order", PATTERNS, in_order, 0),
        Claim(first + "stages named as in theory", len(NAMES), named, 0),
        Claim(first + "heads that take pattern 1", HEADS, by[0], 0),
        Claim(first + "heads that take pattern 2", 1, by[1], 0),
        Claim(first + "heads that take pattern 3", 1, by[2], 0),
        Claim(first + "initial loss, L_0", levels[0], float(flow.loss[0]), 1e-12),
    ]
    claims += [
        Claim(first + f"loss on plateau {k}, L_{k}", levels[k], loss, 0.002)
        for k, loss in enumerate(simulation.plateau_losses, start=1)
    ]
    return [
        *claims,
        Claim(
            first + "final loss relative to L_0",
            0.0,
            float(flow.loss[-1]) / levels[0],
            1e-5,
        ),
        Claim(first + "error of velocity", 0.0, simulation.field_error, 1e-12),
        *(
            [
                Claim(
                    first + "d = 10: error of flow",
                    0.0,
                    simulation.flow_error,
                    1e-5,
                )
            ]
            if np.isfinite(simulation.flow_error)
            else []
        ),
        Claim(first + "relative energy imbalance", 0.0, energy, 1e-6),
    ]


def _numbers(simulation: Simulation) -> dict[str, Any]:
    stages, flow = simulation.stages, simulation.flow
    return {
        "names": stages.names,
        "boundaries": stages.boundaries,
        "acquired": [a.pattern for a in stages.acquisitions],
        "heads": [a.heads for a in stages.acquisitions],
        "times": [a.t for a in stages.acquisitions],
        "overlaps": [a.overlap for a in stages.acquisitions],
        "plateau_losses": simulation.plateau_losses,
        "final_loss": float(flow.loss[-1]),
        "field_error": simulation.field_error,
        "flow_error": simulation.flow_error,
        "purity": [
            float(flow.observables["attention"][-1][a.heads[0], a.pattern])
            for a in stages.acquisitions
        ],
        "energy_imbalance": flow.certificate.energy_imbalance,
        "attention": flow.observables["attention"][-1][:, :PATTERNS],
        "run_seconds": flow.stats["run_seconds"],
        "solver": flow.stats["solver"],
    }


def draw(measurement: Measurement) -> Figure:
    found = measurement.data
    figure = Figure(figsize=(11.5, 12.0), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.05, w_pad=0.06)  # pyright: ignore
    axes: Any = figure.subplots(5, 2, sharex=True, sharey="row")
    for column, (geometry, simulation) in enumerate(found.items()):
        _draw_column(axes[:, column], simulation)
        axes[0, column].set_title(EQUATIONS[geometry], pad=28)
    for letter, ax in zip("acegibdfhj", axes.T.flat, strict=True):
        ax.annotate(
            f"({letter})",
            (1, 1),
            xycoords="axes fraction",
            xytext=(-5, -5),
            textcoords="offset points",
            ha="right",
            va="top",
        )
    for k in range(HEADS):
        axes[k, 0].set_ylabel(f"head {k + 1}:\nattention, value")
    axes[3, 0].set_ylabel("loss of a pattern\n" + r"$\frac{1}{2}\|(G-\hat G)e_j\|^2$")
    axes[4, 0].set_ylabel("loss $L$")
    for ax in axes[-1]:
        ax.set_xlabel("time $t$")
    handles = [
        Line2D([], [], color=COLOURS[j], label=f"pattern {j + 1}")
        for j in range(PATTERNS)
    ]
    handles += [
        Line2D([], [], color="0.3", label="attention $s_k[j]$"),
        Line2D(
            [],
            [],
            color="0.3",
            linestyle="--",
            label=r"value $\langle V_k,A_j\rangle/\|A_j\|^2$",
        ),
        Line2D(
            [],
            [],
            color="0.3",
            linestyle=":",
            linewidth=1,
            label=r"$L_k=\frac{1}{2}\sum_{j>k}\|A_j\|^2$",
        ),
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=6, fontsize="small"
    )
    return figure


def _draw_column(axes: Any, simulation: Simulation) -> None:
    flow, target = simulation.flow, simulation.target
    ts, seen = flow.ts[1:], flow.observables
    for k in range(HEADS):
        for j in range(PATTERNS):
            axes[k].plot(ts, seen["attention"][1:, k, j], color=COLOURS[j])
            axes[k].plot(
                ts,
                seen["value_coordinates"][1:, k, j],
                color=COLOURS[j],
                linestyle=(0, (4, 2)),
                linewidth=1.2,
            )
    for j in range(PATTERNS):
        axes[3].plot(ts, seen["position_loss"][1:, j], color=COLOURS[j])
    axes[4].plot(ts, flow.loss[1:], color="0.1")
    for k in range(PATTERNS):
        axes[4].axhline(target.plateau_loss(k), color="0.3", linestyle=":", linewidth=1)
    for ax in axes:
        ax.set_xscale("log")
        ax.set_xlim(ts[0], ts[-1])
    for ax in axes[:HEADS]:
        ax.margins(y=0.2)  # leave room for the letter above a value of one
    axes[3].set_yscale("log")
    axes[3].set_ylim(1e-10 * target.sizes[0] ** 2, 3 * target.sizes[0] ** 2)
    shade_stages(axes, simulation.stages, named=axes[0])


if __name__ == "__main__":
    run(__doc__, measure, draw)
