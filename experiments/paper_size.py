"""Experiment 23: students of high-order chains at the paper's size, trained with AdamW
and SGD on sampled sequences.

Setting. x_t ~ softmax(Σ_j A_j Σ_{i∈I(j)} α_i x_{t-i}) with 50 tokens, spans 4, 4, 4 and
2, 2, 2, A_j Gaussian with ‖A_j‖_F = 3·50·1.7^{1-j}; a student with three heads, from
V = 0 and scores of scale 1e-3. There are 50¹² and 50⁶ contexts, too many to list. Each
step draws 64 fresh sequences and predicts causally at nine positions of each. Loss,
ladder and attention are measured over 1,024 contexts drawn once from the chain, with
the exact distribution of the next token in each (standard error of the loss 0.02).

Definitions, as in experiments 13 and 15. D_j = mean KL(T_j ‖ student), where T_j is the
teacher restricted to its j strongest blocks; the rung is the j with the smallest D_j,
and L_j is the time at which rung j is left for the last time. A block is acquired when
the heads together hold half of it. Times are in steps, because the two clocks Σ η
cannot be compared.

For comparison: the exact flow of a chain whose contexts can be listed (5 tokens, spans
1, 1, 1, the paper's ratio, ‖A_1‖_F = 2.5, all 125 contexts: a run of experiment 15), on
its own clock.

Claims. These are the claims of the exact theory, tested where the exact flow cannot be
computed: blocks are acquired in order of importance, the first by all heads together,
and the rungs are left in order.

What fails. By the horizon no run has acquired block 3, the weakest: at these rates and
batch sizes the student stays on rung 2. And with SGD the three heads that take block 1
are not alike: they share out its lags among themselves (overlap below 0.2, compared
with 1.00 for AdamW and along the exact flow), so that in the competitive phase all
heads attend to the block without being equal.

`--quick`: 6 tokens, spans 1, 1, centred A_j of ‖A_1‖_F = 6, SGD with η = 2 only.
"""

from typing import Any, NamedTuple

import numpy as np
import optax
from _common import Claim, Measurement, run
from _students import COLOURS, STYLES, StudentWatch, student_of, teacher
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import gradflow

RATIO, SIZE, SCALE, HEADS = 1.7, 3.0, 1e-3, 3
EXACT_SIZE, EXACT_HORIZON = 0.5, 1e6
HALF = 0.5
LEAST_SHOWN = 1e-4
WATCHED = (
    "ladder",
    "attention",
    "attention_to_blocks",
    "pattern_shares",
    "head_overlap",
)


class Setting(NamedTuple):
    name: str
    vocabulary: int
    spans: tuple[int, ...]
    optimiser: Any
    rate: float
    steps: int


FULL = [
    Setting(f"{name}, spans {', '.join(map(str, spans))}", 50, spans, make, rate, steps)
    for spans in ((4, 4, 4), (2, 2, 2))
    for name, make, rate, steps in (
        ("AdamW", optax.adamw, 1e-2, 8000),
        ("SGD", optax.sgd, 20.0, 15_000),
    )
]
QUICK = [Setting("SGD, spans 1, 1", 6, (1, 1), optax.sgd, 2.0, 2000)]


class Seen(NamedTuple):
    """Measurements on a student over steps or over time."""

    name: str
    clock: str
    ts: np.ndarray
    loss: np.ndarray
    floor: float
    ladder: np.ndarray
    attention: np.ndarray
    """The attention to blocks, by time, head and block."""
    by_lag: np.ndarray
    """The attention to lags."""
    shares: np.ndarray
    overlap: np.ndarray
    """The smallest cosine between two heads."""

    @property
    def rung(self) -> np.ndarray:
        return 1 + np.argmin(self.ladder, axis=1)

    @property
    def left(self) -> list[float | None]:
        """The time at which each rung was left for the last time; None for a rung that
        was never visited, or never left."""
        found: list[float | None] = []
        for j in range(1, 1 + self.ladder.shape[1]):
            on = np.flatnonzero(self.rung == j)
            stays = not len(on) or on[-1] == len(self.ts) - 1
            found.append(None if stays else float(self.ts[on[-1] + 1]))
        return found

    @property
    def acquisitions(self) -> list[dict[str, Any]]:
        total = self.shares.sum(axis=1)
        found = []
        for j in range(total.shape[1]):
            i = int(np.argmax(total[:, j] > HALF))
            if total[i, j] > HALF:
                held = self.shares[i, :, j]
                heads = [1 + int(k) for k in np.flatnonzero(held >= HALF * held.max())]
                found.append(
                    {
                        "block": 1 + j,
                        "t": float(self.ts[i]),
                        "heads": heads,
                        "overlap": float(self.overlap[i]),
                        "attention": self.by_lag[i],
                    }
                )
        return sorted(found, key=lambda a: a["t"])


def measure(quick: bool) -> Measurement:
    trained = [_train(setting, quick) for setting in (QUICK if quick else FULL)]
    exact = _exact((1, 1) if quick else (1, 1, 1))
    claims = []
    for seen in [*trained, exact]:
        got = seen.acquisitions
        in_order = sorted(a["block"] for a in got)
        claims.append(
            Claim(
                f"{seen.name}: acquired blocks that are in order",
                float(len(got)),
                float(sum(a["block"] == b for a, b in zip(got, in_order, strict=True))),
                0.0,
            )
        )
        claims.append(
            Claim(
                f"{seen.name}: heads that take block 1",
                float(seen.shares.shape[1]),
                float(len(got[0]["heads"])) if got else 0.0,
                0.0,
            )
        )
        left = [t for t in seen.left if t is not None]
        claims.append(
            Claim(
                f"{seen.name}: rungs left that are in order",
                float(len(left)),
                float(sum(a == b for a, b in zip(left, sorted(left), strict=True))),
                0.0,
            )
        )
    numbers = {
        "runs": [
            {
                "name": seen.name,
                "clock": seen.clock,
                "end": float(seen.ts[-1]),
                "acquisitions": seen.acquisitions,
                "left": seen.left,
                "final_rung": int(seen.rung[-1]),
                "first_loss": float(seen.loss[0]),
                "final_loss": float(seen.loss[-1]),
                "floor": seen.floor,
                "final_attention_to_blocks": seen.attention[-1],
                "final_shares": seen.shares[-1],
                "final_overlap": float(seen.overlap[-1]),
                "ladder": seen.ladder[-1],
            }
            for seen in [*trained, exact]
        ]
    }
    return Measurement(claims, numbers, [*trained, exact], _table([*trained, exact]))


def _train(setting: Setting, quick: bool) -> Seen:
    d, spans = setting.vocabulary, setting.spans
    if quick:  # few tokens: see `teacher`
        chain = teacher(d, spans, ratio=RATIO, seed=0, size=1.0)
    else:
        chain = gradflow.HighOrderChain.random(d, spans, RATIO, seed=0, scale=SIZE)
    model = gradflow.PositionalHeads(d, chain.lags, min(HEADS, len(spans)))
    problem = gradflow.Problem(model, gradflow.DrawnContexts(chain, 1024))
    sampler = gradflow.SequenceSampler(chain, chain.lags + 8, 64, positions="all")
    training = gradflow.train(
        problem,
        problem.init(seed=0, scale=SCALE),
        setting.optimiser,
        setting.steps,
        learning_rate=setting.rate,
        sampler=sampler,
        saved=np.unique(np.geomspace(1, setting.steps, 120).round()),
        observables=WATCHED,
        progress=True,
    )
    seen = training.observables
    return Seen(
        setting.name,
        "steps",
        training.ts / setting.rate,
        training.loss,
        problem.floor,
        seen["ladder"],
        seen["attention_to_blocks"],
        seen["attention"],
        seen["pattern_shares"],
        seen["head_overlap"].min(axis=(1, 2)),
    )


def _exact(spans: tuple[int, ...]) -> Seen:
    chain = teacher(5, spans, ratio=RATIO, seed=0, size=EXACT_SIZE)
    problem = student_of(chain)
    start = problem.init(seed=0, scale=SCALE)
    flow = gradflow.integrate(problem, start, EXACT_HORIZON, observables=())
    ts = np.geomspace(1.0, EXACT_HORIZON, 256)
    seen = flow.observe(StudentWatch(problem), ts)
    return Seen(
        f"exact flow, spans {', '.join(map(str, spans))}",
        "time $t$",
        ts,
        seen["loss"],
        problem.floor,
        seen["ladder"],
        seen["attention_to_blocks"],
        seen["attention"],
        seen["pattern_shares"],
        seen["head_overlap"].min(axis=(1, 2)),
    )


def _table(every: list[Seen]) -> str:
    lines = []
    for seen in every:
        got = [
            f"block {a['block']} at {a['t']:.4g} by heads "
            f"{', '.join(map(str, a['heads']))} (overlap {a['overlap']:.2f})"
            for a in seen.acquisitions
        ]
        blocks = seen.shares.shape[2]
        missing = blocks - len(got)
        left = ", ".join("-" if t is None else f"{t:.4g}" for t in seen.left)
        attention = "; ".join(
            ", ".join(f"{x:.2f}" for x in row) for row in seen.attention[-1]
        )
        lines += [
            f"{seen.name}: loss {seen.loss[0]:.4f} → {seen.loss[-1]:.4f} "
            f"(floor {seen.floor:.4f})",
            f"  acquired: {'; '.join(got) or 'none'}"
            + (f"; {missing} not acquired by the horizon" if missing else ""),
            f"  rungs left for the last time at {left}; ends on {seen.rung[-1]}",
            f"  final attention of each head to the blocks: {attention}",
        ]
    return "\n".join(lines)


def draw(measurement: Measurement) -> Figure:
    every: list[Seen] = measurement.data
    columns = len(every)
    figure = Figure(figsize=(1.5 + 3.1 * columns, 8.4), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.08)  # pyright: ignore
    axes = figure.subplots(3, columns, squeeze=False)
    for column, seen in enumerate(every):
        _draw_loss(axes[0, column], seen)
        _draw_ladder(axes[1, column], seen)
        _draw_attention(axes[2, column], seen)
        letter = "abcdef"[column]
        axes[0, column].set_title(f"({letter}) {seen.name}", loc="left", fontsize=10)
        for ax in axes[:, column]:
            ax.set_xscale("log")
            ax.set_xlim(float(seen.ts[0]), float(seen.ts[-1]))
        axes[2, column].set_xlabel(seen.clock)
    axes[0, 0].set_ylabel("loss $L$ (nats)")
    axes[1, 0].set_ylabel("ladder $D_j$ (nats)")
    axes[2, 0].set_ylabel("attention of a head to block $j$")
    figure.legend(
        *axes[2, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        fontsize="small",
    )
    return figure


def _draw_loss(ax: Axes, seen: Seen) -> None:
    ax.plot(seen.ts, seen.loss, color="black", linewidth=1.5)
    ax.axhline(seen.floor, color="0.35", linewidth=1, linestyle="-.")
    ax.annotate(
        f"entropy rate {seen.floor:.3f}",
        (0.03, seen.floor),
        xycoords=ax.get_yaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize="small",
        color="0.25",
    )
    for a in seen.acquisitions:
        ax.axvline(a["t"], color=COLOURS[a["block"] - 1], linewidth=1.2, linestyle=":")


def _draw_ladder(ax: Axes, seen: Seen) -> None:
    for j in range(seen.ladder.shape[1]):
        # Points far below the axes would affect the layout of the figure.
        D = np.maximum(seen.ladder[:, j], LEAST_SHOWN / 2)
        ax.plot(seen.ts, D, color=COLOURS[j])
    ax.set_yscale("log")
    least = max(LEAST_SHOWN, seen.ladder.min() / 1.5)
    ax.set_ylim(least, 1.5 * seen.ladder.max())


def _draw_attention(ax: Axes, seen: Seen) -> None:
    _, heads, blocks = seen.attention.shape
    for j in range(blocks):
        for k in range(heads):
            ax.plot(
                seen.ts,
                seen.attention[:, k, j],
                color=COLOURS[j],
                linestyle=STYLES[k],
                linewidth=1.3,
                label=f"block {1 + j}, and $D_{1 + j}$" if k == 0 else None,
            )
    for k in range(heads):
        ax.plot([], [], color="0.3", linestyle=STYLES[k], label=f"head {1 + k}")
    ax.set_ylim(-0.03, 1.03)


if __name__ == "__main__":
    run(__doc__, measure, draw)
