"""Experiment 13: on an exact chain, heads acquire one block of lags after another.

Claim. The teacher x_t ~ softmax(Σ_j A_j Σ_{i∈I(j)} α_i x_{t-i}) has blocks I(j) of
adjacent lags, α uniform in each, and ‖A_j‖ ∝ r^{-j}. The student has as many heads as
there are blocks and logits Σ_k V_k Σ_i s_k[i] x_{t-i}, s_k = softmax(a_k). It follows
the gradient flow of the population loss over all contexts, under the chain's stationary
distribution, from V = 0 and a ~ N(0, ε²), where L = log d. Then

- competition: all heads take the strongest block first, while they are still alike;
- cooperation: they then separate and take the other blocks, strongest first, one per
  stage, and the loss rests on a plateau in between;
- on the plateau after j blocks the loss is near L_j, the smallest loss of logits linear
  in the mean tokens of the j strongest blocks (a logistic regression, which is convex;
  solved here by Newton's method, independently of the flow);
- in the end L is the entropy rate, which is L_h: h heads are enough. This does not
  require one block per head: any h attention patterns that span those of the blocks do,
  with matching values. The heads' final attention is reported, but nothing is claimed
  about it;
- Σ_i a_k[i] and Σ_y V_k[y, x] are conserved, and L(0) - L(t) = ∫‖∇L‖².

Definitions. The share of a head in a block is its contribution to the coefficient of
A_j ⊗ α_j in Σ_k V_k ⊗ s_k; a block is acquired when its shares together pass one half.
Value coordinates are ⟨V_k, A_j⟩/‖A_j‖² of the centred matrices, without the parts that
the loss does not depend on. The loss of a block is the amount by which L would fall if
the contribution from its lags were correct. Stages are those of `gradflow.find_stages`.
The ladder is D_j = Σ_c w_c KL(T_j[c] ‖ student[c]), where T_j is the teacher with its j
strongest blocks.

Instance. d = 5 tokens, spans 2, 2, 2: 15,625 contexts; r = 1.7, entries of A_1 of size
1, matrices centred along rows and columns (see `_students.teacher`), ε = 1e-3.
`--quick`: spans 1, 1, 1: 125 contexts.
"""

from typing import Any

import numpy as np
from _common import Claim, Measurement, run
from _students import COLOURS, follow, linear_optimum, student_of, teacher
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradflow import plotting

RATIO, STRENGTH = 1.7, 1.0
SCALE, HORIZON = 1e-3, 1e5


def measure(quick: bool) -> Measurement:
    d, spans = (5, (1, 1, 1)) if quick else (5, (2, 2, 2))
    chain = teacher(d, spans, size=STRENGTH, ratio=RATIO)
    problem = student_of(chain)
    followed = follow(problem, scale=SCALE, t1=HORIZON)
    flow, stages, seen = followed.flow, followed.stages, followed.seen
    h = chain.blocks
    importance = [1 + int(j) for j in chain.importance]
    optima = [linear_optimum(chain, k) for k in range(h + 1)]
    rests = _rests(stages)
    names = list(stages.names)
    expected = ["competitive"] + ["cooperative"] * (h - 1)
    to_blocks = seen["attention_to_blocks"][-1]
    shares = seen["pattern_shares"][-1].sum(axis=0)
    certificate = flow.certificate
    claims = [
        Claim("initial loss, log d", np.log(d), float(flow.loss[0]), 1e-12),
        Claim(
            "blocks acquired in order of importance",
            h,
            sum(a == b for a, b in zip(followed.order, importance, strict=False)),
            0,
        ),
        Claim(
            "stages named as in theory",
            h,
            sum(a == b for a, b in zip(names, expected, strict=False)),
            0,
        ),
        Claim(
            "heads that take the first block",
            h,
            len(stages.acquisitions[0].heads),
            0,
        ),
        *(
            Claim(f"learned share of block {1 + j}", 1.0, float(share), 0.02)
            for j, share in enumerate(shares)
        ),
        *(
            Claim(f"loss on plateau {1 + j}, L_{1 + j}", optimum, rest, 5e-3)
            for j, (optimum, rest) in enumerate(zip(optima[1:], rests, strict=False))
        ),
        Claim("L_h, entropy rate", chain.entropy_rate, optima[-1], 1e-9),
        Claim(
            "final loss, entropy rate",
            chain.entropy_rate,
            float(flow.loss[-1]),
            1e-3,
        ),
        Claim("drift of Σ a_k", 0, certificate.drift["score_sum"], 1e-9),
        Claim("drift of Σ_y V_k[y, x]", 0, certificate.drift["value_sum"], 1e-9),
        Claim("energy imbalance", 0, certificate.energy_imbalance, 1e-6),
    ]
    numbers: dict[str, Any] = {
        "vocabulary": d,
        "spans": spans,
        "contexts": chain.num_contexts,
        "matrices": chain.matrices if quick else None,
        "strength": STRENGTH,
        "scale": SCALE,
        "horizon": HORIZON,
        "names": names,
        "boundaries": stages.boundaries,
        "acquisitions": followed.acquisitions,
        "plateau_losses": rests,
        "optima": optima,
        "entropy_rate": chain.entropy_rate,
        "final_loss": float(flow.loss[-1]),
        "final_attention_to_blocks": to_blocks,
        "final_shares": seen["pattern_shares"][-1],
        "final_ladder": seen["ladder"][-1],
        "drift": certificate.drift,
        "energy_imbalance": certificate.energy_imbalance,
    }
    return Measurement(claims, numbers, (followed, optima), str(stages))


def _rests(stages: Any) -> list[float]:
    """The losses where the flow is slowest between two stages."""
    return [
        min(stages.plateaus, key=lambda p, t=t: abs(p.slowest - t)).loss
        for t in stages.boundaries
    ]


def draw(measurement: Measurement) -> Figure:
    followed, optima = measurement.data
    _, stages, ts, seen = followed
    h = seen["ladder"].shape[1]
    figure = Figure(figsize=(12.0, 8.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)  # pyright: ignore
    axes: Any = figure.subplots(3, 3, sharex=True)
    loss, blocks, ladder = axes[:, 0]
    loss.plot(ts, seen["loss"], color="black")
    for j, optimum in enumerate(optima[1:]):
        loss.axhline(optimum, color=COLOURS[j], linestyle="--", linewidth=1)
        loss.annotate(
            f"$L_{1 + j}$" + (" = entropy rate" if j == h - 1 else ""),
            (0.02, optimum),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            color=COLOURS[j],
            fontsize="small",
        )
    loss.set_ylabel("loss (nats)")
    loss.set_title("(a) Loss", loc="left")
    for j in range(h):
        blocks.plot(ts, seen["block_loss"][:, j], color=COLOURS[j], label=f"{1 + j}")
        ladder.plot(ts, seen["ladder"][:, j], color=COLOURS[j], label=f"{1 + j}")
    blocks.set_ylabel("loss of a block (nats)")
    blocks.set_title("(b) Loss by block", loc="left")
    blocks.legend(title="block", fontsize="small", loc="upper right")
    ladder.set(yscale="log", ylabel="$D_j$ (nats)", xlabel="time $t$")
    ladder.set_title("(c) KL from the teacher with $j$ blocks", loc="left")
    ladder.legend(title="$j$", fontsize="small", loc="lower left")
    for k in range(seen["values"].shape[1]):
        _head(axes[k, 1], ts, seen["attention_to_blocks"][:, k])
        axes[k, 1].set_title(f"({'dfh'[k]}) Head {1 + k}: attention", loc="left")
        axes[k, 1].set_ylabel("attention to block")
        axes[k, 1].set_ylim(-0.03, 1.03)
        _head(axes[k, 2], ts, seen["values"][:, k])
        axes[k, 2].set_title(f"({'egi'[k]}) Head {1 + k}: values", loc="left")
        axes[k, 2].set_ylabel(r"$\langle V_k, A_j\rangle / \|A_j\|^2$")
    for ax in axes[:, 1:].flat:
        ax.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    for ax in axes[-1]:
        ax.set_xlabel("time $t$")
    for column in axes.T:
        for ax in column:
            ax.set_xscale("log")
            ax.set_xlim(ts[0], ts[-1])
            for t in stages.boundaries:
                ax.axvline(t, color="0.5", linewidth=0.7)
        plotting.plot_stages(stages, list(column))
    return figure


def _head(ax: Axes, ts: Any, values: Any) -> None:
    for j in range(values.shape[1]):
        ax.plot(ts, values[:, j], color=COLOURS[j], label=f"block {1 + j}")


if __name__ == "__main__":
    run(__doc__, measure, draw)
