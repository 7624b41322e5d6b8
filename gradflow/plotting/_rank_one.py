"""plot_rank_one(): a flow and its rank-one reduction."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from ..analysis import RankOneComparison
from ..analysis.stages import Stage
from ._common import (
    COLOURS,
    Tokens,
    after_zero,
    logarithmic_clock,
    loss_label,
    new_figure,
    tokens_of,
)
from ._stages import plot_stages

# The reduced flow is drawn over the full flow: where they agree, its dashes lie on the
# solid line.
FULL: dict[str, Any] = {"linewidth": 2.5}
REDUCED: dict[str, Any] = {
    "color": "black",
    "linewidth": 1.2,
    "linestyle": (0, (4, 3)),
}
APART: dict[str, Any] = {"color": "0.6", "linewidth": 1, "linestyle": ":", "zorder": 0}


def plot_rank_one(
    comparison: RankOneComparison,
    figure: Figure | SubFigure | None = None,
    *,
    stages: Sequence[Stage] | None = None,
) -> Figure | SubFigure:
    """A flow of the one-layer Transformer and its rank-one reduction: the losses of
    both, their distance and the distance of the full flow from rank one, the embeddings
    γ_j along α, and the attention of each query to the most frequent token.

    Solid lines are the full flow, dashed lines the reduction. Dotted vertical lines, in
    all four panels, are the times at which they have parted by 1 % and 10 %. At most
    eight tokens are shown, the most frequent. The `stages` of the full flow are shown
    as bands.

    By default a new figure is made outside pyplot, as by `plot_overview`.
    """
    shown = after_zero(comparison.times, "times", "comparison")
    tokens = tokens_of(comparison.full, comparison.full_gamma.shape[1])
    if figure is None:
        figure = new_figure(11.2, 8.0, h_pad=0.1)
    axes = figure.subplots(2, 2, squeeze=False)
    for letter, plot, ax in zip("abcd", _panels, axes.flat, strict=True):
        plot(comparison, shown, tokens, ax)
        for time in comparison.parted.values():
            if time is not None:
                ax.axvline(time, **APART)
        logarithmic_clock(ax, comparison.times[shown])
        ax.set_title(f"({letter}) {ax.get_title(loc='left')}", loc="left")
        if stages is not None:
            plot_stages(stages, ax)
    _legend(comparison, tokens, figure, axes[1, 1])
    return figure


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
    ax.set_ylabel(loss_label(comparison.full))
    ax.set_title("Loss", loc="left")
    # A falling loss leaves the upper right free.
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
    ax.set_ylabel(f"attention of each query to token {frequent}")
    ax.set_title(f"Attention{tokens.note}", loc="left")


def _legend(
    comparison: RankOneComparison,
    tokens: Tokens,
    figure: Figure | SubFigure,
    last: Axes,
) -> None:
    """One legend for all panels, below them: the curves leave no room inside. If the
    layout of the figure makes no room there, it is in the last panel."""
    lines = {
        name: Line2D([], [], color=colour, **FULL)
        for colour, name in zip(COLOURS, tokens.legend, strict=False)
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
    """For each token a solid line and a dashed line over it, in black or, over a black
    line, in grey."""
    for colour, token in zip(COLOURS, tokens.indices, strict=False):
        ax.plot(ts, full[:, token], color=colour, **FULL)
        ax.plot(ts, reduced[:, token], **REDUCED)
        if colour == COLOURS[-1]:
            ax.lines[-1].set_color("0.8")


_panels = (_plot_losses, _plot_distances, _plot_embeddings, _plot_attention)
