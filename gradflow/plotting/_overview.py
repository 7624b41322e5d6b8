"""The four figures in one."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from ..analysis.stages import Stage
from ..flows._flow import Flow
from ._attention import (
    attention_tokens,
    comfortable_height,
    has_attention,
    plot_attention,
)
from ._common import NotebookFigure
from ._embeddings import has_embeddings, plot_embeddings
from ._loss import plot_loss
from ._singular_values import has_singular_values, plot_singular_values


def overview(flow: Flow, *, stages: Sequence[Stage] | None = None) -> Figure:
    """Loss, singular values, attention and embeddings in one figure; of a user's own
    loss, those that apply. `stages` are shown in all but the last.

    The figure is not pyplot's: nothing keeps it alive but the caller, who saves it
    (`overview(flow).savefig(path)`) or, in a notebook, makes it the value of a cell.
    """
    panels: list[Any] = [plot_loss]
    height = 4.0
    if has_singular_values(flow):
        panels.append(plot_singular_values)
    if has_attention(flow):
        panels.append(plot_attention)
        height = comfortable_height(len(attention_tokens(flow).labels))
    if has_embeddings(flow):
        panels.append(plot_embeddings)
    rows, columns = (2, 2) if len(panels) == 4 else (1, len(panels))
    heights = [4.0] * (rows - 1) + [height]
    figure = NotebookFigure(figsize=(5.6 * columns, sum(heights)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # pyright: ignore
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
    for letter, plot, ax in zip("abcd", panels, axes.flat, strict=False):
        over_time = {} if plot is plot_embeddings else {"stages": stages}
        plot(flow, ax, **over_time)
        if len(panels) > 1:
            ax.set_title(f"({letter}) {ax.get_title(loc='left')}", loc="left")
    return figure
