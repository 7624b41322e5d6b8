"""plot_stages(): stages as shaded bands behind a figure over time."""

import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from .._core.checks import Checked
from ..analysis.stages import Stage
from ._common import COLOURS

# A stage has the same colour in every figure.
_colours = {
    "condensation": COLOURS[6],
    "focus": COLOURS[1],
    "anti-focus": COLOURS[3],
    "dilution": COLOURS[5],
    "new direction": COLOURS[2],
    "transition": COLOURS[4],
    "competitive": COLOURS[4],
    "cooperative": COLOURS[5],
}
STRENGTH = 0.17
"""The opacity of a band."""


def stage_colour(name: str) -> tuple[float, float, float]:
    """The colour of the band of a stage, light enough to lie behind lines. A plateau is
    white, and a stage without a colour of its own is light grey."""
    r, g, b = (1 - STRENGTH * (1 - x) for x in to_rgb(_strong_colour(name)))
    return r, g, b


def _strong_colour(name: str) -> str:
    return "white" if name == "plateau" else _colours.get(name, "0.5")


def plot_stages(
    stages: Checked[Sequence[Stage]],
    axes: Axes | Iterable[Axes],
    *,
    over: bool = False,
) -> None:
    """A shaded band for each stage on a time axis, linear or logarithmic, with its name
    above. Stages outside the limits of the axis are left out; the limits do not change.

    **Arguments:**

    - `stages`: a result of `gradflow.find_stages`, or any sequence of `Stage`.
    - `axes`: one Axes, or several on top of each other, of which the first carries the
        names. Their contents, scales and limits must be final.
    - `over`: draw white lines over the Axes where stages meet instead of bands beneath,
        for a heat map, which would hide them.
    """
    for stage in stages:
        if not isinstance(stage, Stage):
            raise ValueError(
                "`stages` must be a result of `gradflow.find_stages`, got a sequence "
                f"with a {type(stage).__name__}."
            )
    every = [axes] if isinstance(axes, Axes) else list(axes)
    for i, ax in enumerate(every):
        _draw(ax, stages, over, named=i == 0)


def _draw(ax: Axes, stages: Sequence[Stage], over: bool, named: bool) -> None:
    low, high = ax.get_xlim()
    names, middles = [], []
    for stage in stages:
        start, end = max(stage.start, low), min(stage.end, high)
        if not start < end:
            continue
        names.append(stage.name)
        logarithmic = ax.get_xscale() == "log"
        middles.append(math.sqrt(start * end) if logarithmic else (start + end) / 2)
        if not over:
            colour = _strong_colour(stage.name)
            ax.axvspan(start, end, color=colour, alpha=STRENGTH, linewidth=0, zorder=-1)
            if end < high:  # separates two stages of the same name
                ax.axvline(end, color="white", linewidth=1.5, zorder=-0.5)
        elif end < high:
            ax.axvline(end, color="white", linewidth=1, linestyle=":")
    ax.set_xlim(low, high)
    if named and names:
        # The names are ticks of a secondary axis, not free text: the title and the
        # layout make room for ticks, and they cover no data.
        above = ax.secondary_xaxis("top")
        above.set_xticks(middles, names, rotation=45, ha="left", rotation_mode="anchor")
        above.set_xticks([], minor=True)
        above.tick_params(length=0, pad=2, labelsize="x-small")
        above.spines["top"].set_visible(False)
