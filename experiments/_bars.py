"""Draw the stages of several flows as bars over one logarithmic clock."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gradflow import plotting


def draw_stages(ax: Axes, flows: dict[str, Any], start: float, end: float) -> None:
    """Draw one row per flow, from the top, with the stages that `find_stages` found
    between the times `start` and `end`. The legend below names the stages."""
    names = dict.fromkeys(stage.name for stages in flows.values() for stage in stages)
    for row, stages in enumerate(flows.values()):
        for stage in stages:
            left = max(stage.start, start)
            ax.barh(
                row,
                max(stage.end - left, 0.0),
                left=left,
                height=0.8,
                color=plotting.stage_colour(stage.name),
                edgecolor="0.5",
                linewidth=0.6,
            )
    ax.set_yticks(range(len(flows)), list(flows))
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlim(start, end)
    ax.set_xlabel("time $t$")
    ax.set_title("Stages", loc="left")
    ax.legend(
        handles=[
            Patch(facecolor=plotting.stage_colour(n), edgecolor="0.5", label=n)
            for n in names
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        ncols=min(len(names), 5),
        fontsize="x-small",
        handlelength=1.2,
        columnspacing=1.0,
    )
