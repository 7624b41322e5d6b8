"""A flow beside its rank-one reduction."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from ..analysis._rank_one_comparison import RankOneComparison
from ..analysis.stages import Stage
from ._common import COLOURS, NotebookFigure, Tokens, logarithmic_clock, tokens_of
from ._stages import shade

# The reduced flow is drawn over the full one: where both agree, its dashes lie on the
# other's line.
FULL: dict[str, Any] = {"linewidth": 2.5}
REDUCED: dict[str, Any] = {
    "color": "black",
    "linewidth": 1.2,
    "linestyle": (0, (4, 3)),
}
APART: dict[str, Any] = {"color": "0.6", "linewidth": 1, "linestyle": ":", "zorder": 0}


def rank_one(
    comparison: RankOneComparison,
    figure: Figure | SubFigure | None = None,
    *,
    stages: Sequence[Stage] | None = None,
) -> Figure | SubFigure:
    """A flow of the one-layer Transformer and its rank-one reduction: the loss of both,
    their distance and that of the full flow from rank one, the embeddings γ_j along α,
    and the attention of each query on the most frequent token.

    Solid lines are the full flow, dashed ones the reduction; dotted verticals, in all
    four panels, are the times at which they have parted by 1 % and 10 %. Of more than
    eight tokens it shows the most frequent. `stages`, of the full flow, are
    shown as bands.

    Without a `figure` to draw in it makes one, which is not pyplot's: see `overview`.
    """
    shown = _shown(comparison)
    tokens = tokens_of(comparison.full, comparison.full_gamma.shape[1])
    if figure is None:
        figure = NotebookFigure(figsize=(11.2, 8.0), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # pyright: ignore
    axes = figure.subplots(2, 2, squeeze=False)
    for letter, plot, ax in zip("abcd", _panels, axes.flat, strict=True):
        plot(comparison, shown, tokens, ax)
        for time in comparison.parted.values():
            if time is not None:
                ax.axvline(time, **APART)
        logarithmic_clock(ax, comparison.times[shown])
        ax.set_title(f"({letter}) {ax.get_title(loc='left')}", loc="left")
        if stages is not None:
            shade(ax, stages)
    _legend(comparison, tokens, figure, axes[1, 1])
    return figure


def _shown(comparison: RankOneComparison) -> Int[np.ndarray, " shown"]:
    shown = np.flatnonzero(comparison.times > 0)
    if len(shown) < 2:
        raise ValueError(
            "a figure over logarithmic time needs at least two times after 0, but "
            f"this comparison has {len(shown)}."
        )
    return shown


def _plot_losses(
    comparison: RankOneComparison,
    shown: Int[np.ndarray, " shown"],
    tokens: Tokens,
    ax: Axes,
) -> None:
    ts = comparison.times[shown]
    ax.plot(
        ts, comparison.full_loss[shown], color=COLOURS[0], label="full flow", **FULL
    )
    ax.plot(ts, comparison.reduced_loss[shown], label="rank-one reduction", **REDUCED)
    ax.set_ylabel("loss $L$ (nats)")
    ax.set_title("Loss", loc="left")
    # Upper right, which a falling loss leaves free.
    ax.legend(fontsize="small", loc="upper right")


def _plot_distances(
    comparison: RankOneComparison,
    shown: Int[np.ndarray, " shown"],
    tokens: Tokens,
    ax: Axes,
) -> None:
    ts = comparison.times[shown]
    ax.plot(
        ts,
        comparison.distance[shown],
        color=COLOURS[1],
        linewidth=2.5,
        label="full flow from its reduction",
    )
    ax.plot(
        ts,
        comparison.off_manifold[shown],
        color=COLOURS[2],
        linestyle=(0, (4, 3)),
        label="full flow from rank one",
    )
    ax.set_yscale("log")
    for threshold, time in comparison.parted.items():
        if time is not None:
            ax.annotate(
                f"{100 * threshold:g} %",
                (time, threshold),
                xytext=(-4, 2),
                textcoords="offset points",
                ha="right",
                va="bottom",
                fontsize="small",
            )
            ax.plot(time, threshold, "o", color=COLOURS[1], markersize=4)
    ax.set_ylabel(r"relative distance of $\theta$")
    ax.set_title("Distance", loc="left")
    ax.legend(fontsize="small", loc="lower right")


def _plot_embeddings(
    comparison: RankOneComparison,
    shown: Int[np.ndarray, " shown"],
    tokens: Tokens,
    ax: Axes,
) -> None:
    _plot_pairs(
        ax,
        comparison.times[shown],
        comparison.full_gamma[shown],
        comparison.reduced_gamma[shown],
        tokens,
    )
    ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    ax.set_ylabel(r"$\gamma_j$, the embedding along $\alpha$")
    ax.set_title(f"Embeddings{tokens.note}", loc="left")


def _plot_attention(
    comparison: RankOneComparison,
    shown: Int[np.ndarray, " shown"],
    tokens: Tokens,
    ax: Axes,
) -> None:
    _plot_pairs(
        ax,
        comparison.times[shown],
        comparison.full_attention[shown],
        comparison.reduced_attention[shown],
        tokens,
    )
    frequent = tokens.labels[list(tokens.indices).index(comparison.frequent)]
    ax.set_ylim(-0.03, 1.03)
    ax.set_ylabel(f"attention of each query on token {frequent}")
    ax.set_title(f"Attention{tokens.note}", loc="left")


def _legend(
    comparison: RankOneComparison,
    tokens: Tokens,
    figure: Figure | SubFigure,
    last: Axes,
) -> None:
    """One for all panels, below them, as the curves leave no room inside; without a
    layout that makes room there, in the last panel."""
    assert tokens.frequencies is not None  # a comparison's problem has a chain
    lines = {
        rf"{name}  ($\pi$ = {frequency:.3g})": Line2D([], [], color=colour, **FULL)
        for colour, name, frequency in zip(
            COLOURS, tokens.labels, tokens.frequencies, strict=False
        )
    }
    lines["rank-one reduction"] = Line2D([], [], **REDUCED)
    if any(time is not None for time in comparison.parted.values()):
        lines["apart by 1 %, 10 %"] = Line2D([], [], **APART)
    handles, names = list(lines.values()), list(lines)
    if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        columns = len(lines) if len(lines) <= 6 else (len(lines) + 1) // 2
        figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=columns,
            fontsize="small",
        )
    else:
        last.legend(handles, names, fontsize="small")


def _plot_pairs(
    ax: Axes,
    ts: Float[np.ndarray, " shown"],
    full: Float[np.ndarray, "shown d"],
    reduced: Float[np.ndarray, "shown d"],
    tokens: Tokens,
) -> None:
    """For each token a solid line, and a dashed one over it: in black, or in grey
    over a black one."""
    for colour, token in zip(COLOURS, tokens.indices, strict=False):
        ax.plot(ts, full[:, token], color=colour, **FULL)
        ax.plot(ts, reduced[:, token], **REDUCED)
        if colour == COLOURS[-1]:
            ax.lines[-1].set_color("0.8")


_panels = (_plot_losses, _plot_distances, _plot_embeddings, _plot_attention)
