"""plot_comparison(): a training run and the flow that it follows."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure, SubFigure

from ..analysis import Comparison
from ..analysis.stages import Stage
from ._common import COLOURS, after_zero, logarithmic_clock, loss_label, new_figure
from ._stages import plot_stages


def plot_comparison(
    compared: Comparison,
    figure: Figure | SubFigure | None = None,
    *,
    stages: Sequence[Stage] | None = None,
) -> Figure | SubFigure:
    """A training run and a flow over logarithmic time: the losses of both, and their
    distance. The `stages` of the flow are shown as bands.

    By default a new figure is made outside pyplot, as by `plot_overview`.
    """
    shown = after_zero(compared.ts, "times", "comparison")
    if figure is None:
        figure = new_figure(10.4, 4.2)
    losses, distances = figure.subplots(1, 2)
    ts = compared.ts[shown]
    losses.plot(
        ts, compared.flow_loss[shown], color=COLOURS[0], linewidth=2.5, label="flow"
    )
    losses.plot(
        ts,
        compared.training_loss[shown],
        color="black",
        linewidth=1.2,
        linestyle=(0, (4, 3)),
        label=compared.training.stats.solver,
    )
    losses.set_ylabel(loss_label(compared.flow))
    losses.set_title("(a) Loss", loc="left")
    # A falling loss leaves the upper right free.
    losses.legend(fontsize="small", loc="upper right")

    for values, colour, style, label in (
        (compared.distance, COLOURS[1], "-", r"$\|\theta - \theta_{\rm flow}\|$"),
        (compared.relative, COLOURS[2], "--", r"relative to $\|\theta_{\rm flow}\|$"),
    ):
        positive = np.where(values[shown] > 0, values[shown], np.nan)
        distances.plot(ts, positive, color=colour, linestyle=style, label=label)
    distances.set_yscale("log")
    distances.set_ylabel("distance")
    distances.set_title("(b) Distance", loc="left")
    distances.legend(fontsize="small", loc="best")
    for ax in (losses, distances):
        logarithmic_clock(ax, ts)
        if stages is not None:
            plot_stages(stages, ax)
    return figure
