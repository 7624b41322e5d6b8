"""Experiment 1: the four stages and two cycles of *Focus and Dilution*.

Claim. The gradient flow θ̇ = -∇L(θ) of the one-layer Transformer on the reference chain,
π = (0.75, 0.19, 0.05, 0.01), P = I/2 + 1πᵀ/2, from entries N(0, ε²), goes through
condensation and then repeatedly through focus, dilution and a new direction:

- condensation: W0 grows along παᵀ at rate ‖π‖·‖π - 1/d‖, and the flow comes to rest
  near θ¹, where L = H(π) = -Σ π_i log π_i;
- focus: WQ and WK grow along α at rate κ = λ·Cov_π(γ, β)·Var_π(γ), γ = gπ/‖π‖,
  β = c/(g‖π‖), c = log π - mean(log π), g² = ‖c‖/‖π‖;
- dilution: the other queries' attention leaves the frequent token again;
- new direction: one more singular value of W0 grows, and the next cycle starts;
- the loss ends at the entropy rate, -Σ_i π_i Σ_j P_ij log P_ij.

Stages are those of `gradflow.find_stages`, with the definitions given there. The figure
shows ε = 1e-3. Rates and the loss on the plateau, which theory gives for ε → 0, are
measured at ε = 1e-6. With s and σ the leading singular values of W0 and WQ WKᵀ, the
rate of condensation is the largest d log s/dt, and the rate of focus is d log √σ/dt
where it is steadiest as the flow leaves the plateau of θ¹.
"""

from typing import Any

import numpy as np
from _common import Claim, Measurement, reference_problem, run
from _watch import follow
from matplotlib.figure import Figure

from gradflow import plotting

CYCLE = ("focus", "dilution", "new direction")
SCALE, HORIZON = 1e-3, 1e4
SMALL_SCALE, UNTIL_FOCUS = 1e-6, 300.0
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def measure(quick: bool) -> Measurement:
    # The quick version differs in the accuracy of the flow.
    rtol = 1e-7 if quick else 1e-9
    problem = reference_problem()
    chain: Any = problem.population.chain
    origin, theta1 = problem.known_saddles
    ts = np.append(0.0, np.geomspace(1.0, HORIZON, 400))
    watched = follow(problem, scale=SCALE, t1=HORIZON, rtol=rtol, ts=ts)
    flow, stages = watched.flow, watched.stages
    small = follow(problem, scale=SMALL_SCALE, t1=UNTIL_FOCUS, rtol=rtol)
    cycles = max((s.cycle for s in stages), default=0)
    expected = ("condensation", *CYCLE * 2)
    in_order = sum(a == b for a, b in zip(stages.names, expected, strict=False))

    # Three quarters of the way through a stage its character is clear.
    times = np.array([s.start + 0.75 * (s.end - s.start) for s in stages])
    attention = flow.observe(problem.observables["attention"], times)
    embeddings = np.asarray(flow.at(times).W0) @ _plane(flow)
    first_cycle = [stage for stage in stages if stage.cycle == 1]
    during = np.linspace(watched.focus.start, first_cycle[-1].end, 2000)
    to_frequent = flow.observe(problem.observables["attention"], during)[:, :, 0]
    final = float(flow.loss[-1])
    inside = small.within(small.focus.start, small.focus.end)
    plateau = small.rest
    assert plateau is not None
    claims = [
        Claim("cycles (at least)", 2, cycles, 0),
        Claim("stages in the predicted order", len(expected), in_order, 0),
        Claim("loss on the plateau of θ¹, H(π)", theta1.loss, plateau.loss, 1e-5),
        Claim("rate of condensation", origin.rate, small.condensation_rate, 1e-3),
        Claim("rate of focus, κ", theta1.rate, small.focus_rate, 5e-3),
        Claim("W0 ∥ παᵀ on that plateau", 1.0, small.at_rest("condensation"), 1e-4),
        Claim("Φ ∥ ππᵀ in focus", 1.0, np.max(small.seen["phi"][inside]), 1e-4),
        Claim("final loss, entropy rate", chain.entropy_rate, final, 1e-6),
    ]
    numbers = {
        "scale": SCALE,
        "horizon": HORIZON,
        "names": stages.names,
        "cycles": cycles,
        "boundaries": stages.boundaries,
        "times": times,
        "attention": attention,
        "peak_attention_to_frequent": to_frequent.max(axis=0),
        "plateau_losses": [p.loss for p in stages.plateaus],
        "final_loss": final,
        "small_scale": {
            "scale": SMALL_SCALE,
            "names": small.stages.names,
            "boundaries": small.stages.boundaries,
            "plateau_loss": plateau.loss,
            "condensation_rate": small.condensation_rate,
            "focus_rate": small.focus_rate,
        },
    }
    data = (watched, times, attention, embeddings)
    return Measurement(claims, numbers, data, str(stages))


def _plane(flow: Any) -> np.ndarray:
    """The first two principal directions of the final W0, with signs such that the
    longest embedding along each is positive."""
    W0 = np.asarray(flow.final.W0)
    V = np.linalg.svd(W0)[2][:2].T
    along = W0 @ V
    return V * np.sign(along[np.abs(along).argmax(axis=0), [0, 1]])


def draw(measurement: Measurement) -> Figure:
    watched, times, attention, embeddings = measurement.data
    flow, stages = watched.flow, watched.stages
    figure = Figure(figsize=(11.5, 10.0), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.06, w_pad=0.04)  # pyright: ignore
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.75, 1.0])
    above, below = parts
    loss, values = above.subplots(2, 1, sharex=True)
    plotting.plot_loss(flow, loss)
    plotting.plot_singular_values(flow, values)
    plotting.plot_stages(stages, [loss, values])
    loss.set_xlabel("")
    values.legend(fontsize="small", loc="upper left")
    for i, t in enumerate(times):
        for ax in (loss, values):
            ax.axvline(t, color="0.25", linewidth=0.8, linestyle=(0, (2, 2)))
        loss.annotate(
            "cdefghi"[i],
            (t, 0.93),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 0),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize="small",
        )
    for letter, ax in zip("ab", (loss, values), strict=True):
        ax.set_title(f"({letter}) {ax.get_title(loc='left')}", loc="left")

    maps, clouds = below.subplots(2, len(times), height_ratios=[1, 1.1])
    labels = flow.problem.population.chain.labels
    tokens = range(len(labels))
    images = [
        ax.imshow(weights, vmin=0, vmax=1, cmap="viridis")
        for ax, weights in zip(maps, attention, strict=True)
    ]
    for i, stage in enumerate(stages):
        cycle = f" {stage.cycle}" if stage.cycle else ""
        maps[i].set_title(
            f"({'cdefghi'[i]}) {stage.name}{cycle}\n$t$ = {times[i]:.0f}", fontsize=9
        )
        maps[i].set_xticks(tokens, labels, fontsize="x-small")
        maps[i].set_yticks(tokens, labels if i == 0 else [], fontsize="x-small")
        maps[i].set_xlabel("key", fontsize="small", labelpad=1)
        for token in tokens:
            x, y = embeddings[i][token]
            clouds[i].plot([0, x], [0, y], color=COLOURS[token], linewidth=1)
            clouds[i].plot(
                x, y, "o", markersize=5, color=COLOURS[token], label=labels[token]
            )
        clouds[i].tick_params(labelsize="x-small")
        clouds[i].set_xlim(-1.6, 4.0)
        clouds[i].set_ylim(-1.6, 2.8)
        clouds[i].axhline(0, color="0.85", linewidth=0.8, zorder=0)
        clouds[i].axvline(0, color="0.85", linewidth=0.8, zorder=0)
        if i:
            clouds[i].set_yticklabels([])
    maps[0].set_ylabel("query", fontsize="small")
    clouds[0].set_ylabel("second direction", fontsize="small")
    clouds[len(times) // 2].set_xlabel(
        "embeddings: first principal direction of the final $W_0$", fontsize="small"
    )
    below.colorbar(images[-1], ax=list(maps), pad=0.01, aspect=12, label="attention")
    below.legend(
        *clouds[0].get_legend_handles_labels(),
        title="token",
        loc="outside right lower",
        fontsize="small",
        title_fontsize="small",
    )
    return figure


if __name__ == "__main__":
    run(__doc__, measure, draw)
