"""Stages as shaded bands behind whatever is drawn over time."""

import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from ..analysis.stages import Stage
from ._common import COLOURS

# What is named alike looks alike in every figure.
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
"""Of a band's colour on white."""


def stage_colour(name: str) -> tuple[float, float, float]:
    """The colour of a stage's band: light, to lie behind lines. A plateau is white, and
    what has no colour of its own light grey."""
    colour = "white" if name == "plateau" else _colours.get(name, "0.5")
    r, g, b = (1 - STRENGTH * (1 - x) for x in to_rgb(colour))
    return r, g, b


def shade(
    axes: Axes | Iterable[Axes], stages: Sequence[Stage], *, over: bool = False
) -> None:
    """A shaded band for each stage on a time axis, linear or logarithmic, with its name
    above; stages outside the axis's limits are left out, and the limits stay.

    **Arguments:**

    - `axes`: one Axes, or several on top of each other, of which only the first carries
        the names. What they show, and their scales and limits, must be there already.
    - `stages`: from `gradflow.find_stages`, or any sequence of `Stage`.
    - `over`: white lines over the Axes where stages meet, in place of bands beneath:
        for a heat map, which would hide them.
    """
    for stage in stages:
        if not isinstance(stage, Stage):
            raise ValueError(
                "`stages` must be those of `gradflow.find_stages`, got "
                f"{type(stage).__name__} among them."
            )
    every = [axes] if isinstance(axes, Axes) else list(axes)
    for i, ax in enumerate(every):
        _shade(ax, stages, over, named=i == 0)


def _shade(ax: Axes, stages: Sequence[Stage], over: bool, named: bool) -> None:
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
            colour = _colours.get(stage.name, "0.5" if stage.name != "plateau" else "1")
            ax.axvspan(start, end, color=colour, alpha=STRENGTH, linewidth=0, zorder=-1)
            if end < high:  # two of one name would look like one
                ax.axvline(end, color="white", linewidth=1.5, zorder=-0.5)
        elif end < high:
            ax.axvline(end, color="white", linewidth=1, linestyle=":")
    ax.set_xlim(low, high)
    if named and names:
        # Ticks of an axis of its own, and not free text: the title and the layout make
        # room for them, and they cover no data.
        above = ax.secondary_xaxis("top")
        above.set_xticks(middles, names, rotation=45, ha="left", rotation_mode="anchor")
        above.set_xticks([], minor=True)
        above.tick_params(length=0, pad=2, labelsize="x-small")
        above.spines["top"].set_visible(False)
