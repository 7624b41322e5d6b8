"""The loss and the levels it stops at."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from matplotlib.axes import Axes

from ..analysis.stages import Stage
from ..flows._flow import Flow
from ._common import COLOURS, axes_or_new, chain_of, logarithmic_clock, shown_times
from ._stages import shade


def plot_loss(
    flow: Flow, ax: Axes | None = None, *, stages: Sequence[Stage] | None = None
) -> Axes:
    """The loss over logarithmic time (time 0 has no place on it).

    If the flow's problem has a chain, horizontal lines show its unigram entropy, where
    the loss of the best predictor without context lies, and its entropy rate, the loss
    of the best predictor of all. A problem's floor is shown where it is another.
    `stages` are shown as bands.
    """
    shown = shown_times(flow)
    ax = axes_or_new(ax)
    ax.plot(flow.ts[shown], flow.loss[shown], color=COLOURS[0], linewidth=2, zorder=3)
    for level in _levels(flow):
        ax.axhline(
            level.height, color="0.35", linewidth=1, linestyle=level.style, zorder=1
        )
        ax.annotate(
            f"{level.name} {level.height + 0.0:.4f}",  # and not -0.0000
            (0.02 if level.side == "left" else 0.98, level.height),
            xycoords=ax.get_yaxis_transform(),
            xytext=(0, 2 if level.above else -2),
            textcoords="offset points",
            ha=level.side,
            va="bottom" if level.above else "top",
            color="0.25",
            fontsize="small",
        )
    ax.margins(y=0.1)
    logarithmic_clock(ax, flow.ts[shown])
    ax.set_ylabel("loss $L$ (nats)" if chain_of(flow) is not None else "loss $L$")
    ax.set_title("Loss", loc="left")
    if stages is not None:
        shade(ax, stages)
    return ax


class _Level(NamedTuple):
    """A horizontal line and where its label stands."""

    name: str
    height: float
    style: str
    side: Literal["left", "right"]
    above: bool


def _levels(flow: Flow) -> list[_Level]:
    chain = chain_of(flow)
    floor = getattr(flow.problem, "floor", None)
    if chain is None:
        return [] if floor is None else [_Level("floor", floor, ":", "right", False)]
    # The labels stand on the left, where the loss is still high, the upper level's
    # above and the lower one's below its line: they cannot meet.
    H, rate = chain.unigram_entropy, chain.entropy_rate
    levels = [
        _Level("unigram entropy", H, "--", "left", True),
        _Level("entropy rate", rate, "-.", "left", False),
    ]
    if floor is not None and abs(floor - rate) > 1e-3 * rate:
        levels.append(_Level("floor", floor, ":", "right", floor > rate))
    return levels
