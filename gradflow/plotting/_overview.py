"""plot_overview(): all figures of one flow together."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .._core.checks import Checked
from ..analysis.stages import Stage
from ..flows import AbstractTrajectory, check_flow
from ._attention import (
    attention_rows,
    comfortable_height,
    has_attention,
    plot_attention,
)
from ._common import new_figure
from ._embeddings import has_embeddings, plot_embeddings
from ._loss import plot_loss
from ._singular_values import has_singular_values, plot_singular_values


def plot_overview(
    flow: Checked[AbstractTrajectory], *, stages: Sequence[Stage] | None = None
) -> Figure:
    """Loss, singular values, attention and embeddings in one figure, as far as they
    apply to the flow. `stages` are shown in all panels except the embeddings.

    The figure is made outside pyplot, which does not keep it alive: save it with
    `plot_overview(flow).savefig(path)` or, in a notebook, make it the value of a cell.
    """
    flow = check_flow(flow)
    panels: list[Callable[..., Axes]] = [plot_loss]
    height = 4.0
    if has_singular_values(flow):
        panels.append(plot_singular_values)
    if has_attention(flow):
        panels.append(plot_attention)
        height = comfortable_height(attention_rows(flow).number)
    if has_embeddings(flow):
        panels.append(plot_embeddings)
    rows, columns = (2, 2) if len(panels) == 4 else (1, len(panels))
    heights = [4.0] * (rows - 1) + [height]
    figure = new_figure(5.6 * columns, sum(heights), h_pad=0.1)
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
    for letter, plot, ax in zip("abcd", panels, axes.flat, strict=False):
        over_time = {} if plot is plot_embeddings else {"stages": stages}
        plot(flow, ax, **over_time)
        if len(panels) > 1:
            ax.set_title(f"({letter}) {ax.get_title(loc='left')}", loc="left")
    return figure
