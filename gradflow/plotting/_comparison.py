"""A training beside the flow that it follows."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure, SubFigure

from ..analysis._compare import Comparison
from ..analysis.stages import Stage
from ._common import COLOURS, NotebookFigure, chain_of, logarithmic_clock
from ._stages import shade


def comparison(
    compared: Comparison,
    figure: Figure | SubFigure | None = None,
    *,
    stages: Sequence[Stage] | None = None,
) -> Figure | SubFigure:
    """A training and a flow: the loss of both, and their distance, over logarithmic
    time. `stages`, of the flow, are shown as bands.

    Without a `figure` to draw in it makes one, which is not pyplot's: see `overview`.
    """
    shown = np.flatnonzero(compared.ts > 0)
    if len(shown) < 2:
        raise ValueError(
            "a figure over logarithmic time needs at least two times after 0, but "
            f"this comparison has {len(shown)}."
        )
    if figure is None:
        figure = NotebookFigure(figsize=(10.4, 4.2), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1)  # pyright: ignore
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
        label=compared.training.stats["solver"],
    )
    losses.set_ylabel(
        "loss $L$ (nats)" if chain_of(compared.flow) is not None else "loss $L$"
    )
    losses.set_title("(a) Loss", loc="left")
    # Upper right, which a falling loss leaves free.
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
            shade(ax, stages)
    return figure
