"""plot_loss(): the loss over time, and the levels at which it rests."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from .._core.checks import Checked
from ..analysis.stages import Stage
from ..flows import AbstractTrajectory, Flow
from ._common import COLOURS, axes_or_new, logarithmic_clock, loss_label, shown_times
from ._levels import draw_levels, drawn_levels, label_levels, levels_of
from ._stages import plot_stages

CURVE = "gradflow:loss"
"""The beginning of the group id of loss curves, by which a later call recognises them.
The rest is the first loss of the flow, at time 0, which has no place on the Axes."""
FINEST = 0.01
"""The change of the loss between two drawn times, relative to its range, above which
times between them are added."""
MOST_ADDED = 400
"""The largest number of times that are added to the saved ones."""
ROUNDS = 3
"""The number of times that a curve is refined."""


def plot_loss(
    flow: Checked[AbstractTrajectory],
    ax: Axes | None = None,
    *,
    label: str | None = None,
    stages: Sequence[Stage] | None = None,
) -> Axes:
    """The loss over logarithmic time, without time 0.

    Horizontal lines show the floor of the loss and the losses of simple predictors
    (`flow.problem.baselines`), except the uniform one, at which a flow from a small
    start begins. Each level is drawn once.

    Several flows may share the same Axes: each takes the next colour, and the limits
    grow to include all of them. A loss that rises far, as in a training run that
    diverges, leaves the Axes at the top and does not flatten the rest: the Axes end at
    h + (h - l)/2 if a loss exceeds that, where l is the lowest loss or reference line
    and h the largest of the reference lines, the first losses and the upper quartiles.
    The quartile of a loss that ends above its first value is taken up to the last time
    at which it was not.

    Where the loss changes fast between saved times, the curve is refined on the flow's
    dense output, if that was kept.

    **Arguments:**

    - `flow`: a flow or a training run.
    - `ax`: the Axes to draw in. By default a new pyplot figure.
    - `label`: the name of this flow. The Axes have a legend once a flow has one.
    - `stages`: stages to show as bands, as by `plot_stages`.
    """
    ts, loss = loss_curve(flow)
    ax = axes_or_new(ax)
    earlier = drawn_curves(ax)
    colour = COLOURS[len(earlier) % len(COLOURS)]
    gid = f"{CURVE}:{float(flow.loss[0])!r}"
    (line,) = ax.plot(ts, loss, color=colour, linewidth=2, zorder=3, gid=gid)
    curves = [*earlier, line]
    draw_levels(ax, levels_of(flow))
    _set_limits(ax, curves)
    if not earlier:
        ax.set_ylabel(loss_label(flow))
        ax.set_title("Loss", loc="left")
    elif ax.get_ylabel() != loss_label(flow):
        ax.set_ylabel("loss $L$")  # not all of them are in nats
    label_levels(ax, curves)
    if label is not None:
        line.set_label(label)
    _draw_legend(ax, curves)
    if stages is not None:
        plot_stages(stages, ax)
    return ax


def drawn_curves(ax: Axes) -> list[Line2D]:
    """The loss curves that are on the Axes."""
    return [line for line in ax.lines if str(line.get_gid()).startswith(CURVE)]


def loss_curve(
    flow: AbstractTrajectory,
) -> tuple[Float[np.ndarray, " times"], Float[np.ndarray, " times"]]:
    """The loss at the saved times after 0 and, where it changes fast, at times between
    them for which there is dense output."""
    shown = shown_times(flow)
    ts, loss = flow.ts[shown], flow.loss[shown]
    until = _dense_until(flow)
    for _ in range(ROUNDS):
        left = MOST_ADDED - (len(ts) - len(shown))
        added = _times_between(ts, loss, until)[:left]
        if not added.size:
            break
        values = np.asarray(flow.observe(flow.knowledge, added), dtype=float)
        order = np.argsort(np.append(ts, added), kind="stable")
        ts, loss = np.append(ts, added)[order], np.append(loss, values)[order]
    return ts, loss


def _dense_until(flow: AbstractTrajectory) -> float:
    """The time until which the flow is known between its saved times. A training run
    is known at its iterates only."""
    if not isinstance(flow, Flow) or flow.dense is None or flow.problem is None:
        return 0.0
    return flow.dense.until


def _times_between(
    ts: Float[np.ndarray, " times"], loss: Float[np.ndarray, " times"], until: float
) -> Float[np.ndarray, " added"]:
    """Geometrically spaced times between those from one to the next of which the loss
    changes by more than `FINEST` of its range."""
    change = np.abs(np.diff(loss))
    allowed = FINEST * np.ptp(loss)
    refined = np.flatnonzero((change > allowed) & (ts[1:] <= until))
    pieces = [
        np.geomspace(ts[i], ts[i + 1], int(np.ceil(change[i] / allowed)) + 1)[1:-1]
        for i in refined
    ]
    return np.concatenate([np.empty(0), *pieces])


def _set_limits(ax: Axes, curves: Sequence[Line2D]) -> None:
    """Include every curve and reference line, except losses that rise far above."""
    times = [np.asarray(line.get_xdata(), dtype=float) for line in curves]
    logarithmic_clock(ax, np.sort(np.concatenate(times)))
    losses = [_finite_losses(line) for line in curves]
    levels = [float(np.asarray(line.get_ydata())[0]) for line in drawn_levels(ax)]
    low = min([loss.min() for loss in losses] + levels)
    usual = max([_usual_height(loss) for loss in losses] + levels)
    highest = max([loss.max() for loss in losses] + levels)
    top = usual + 0.5 * (usual - low)
    is_cut = low < usual and highest > top
    if is_cut or (len(curves) > 1 and not ax.get_autoscaley_on()):
        high = min(highest, top) if is_cut else highest
        margin = 0.1 * (high - low)
        ax.set_ylim(low - margin, high + (0.0 if is_cut else margin))
    else:
        ax.margins(y=0.1)


def _finite_losses(line: Line2D) -> Float[np.ndarray, " times"]:
    """The losses of a curve, from the loss at time 0 on."""
    first = float(str(line.get_gid()).removeprefix(f"{CURVE}:"))
    losses = np.append(first, np.asarray(line.get_ydata(), dtype=float))
    return losses[np.isfinite(losses)]


def _usual_height(loss: Float[np.ndarray, " times"]) -> float:
    """The height of a loss, apart from rare spikes and from a final divergence."""
    before = loss[: 1 + np.flatnonzero(loss <= loss[0])[-1]]
    return float(max(loss[0], np.quantile(before, 0.75)))


def _draw_legend(ax: Axes, curves: Sequence[Line2D]) -> None:
    """A legend of the curves that have a label."""
    labels = [str(line.get_label()) for line in curves]
    # matplotlib gives a curve without a label a name such as _child0.
    labelled = [i for i, text in enumerate(labels) if not text.startswith("_child")]
    if labelled:
        # Handles and labels are explicit because matplotlib hides labels that start
        # with an underscore.
        handles, names = [curves[i] for i in labelled], [labels[i] for i in labelled]
        ax.legend(handles, names, fontsize="small", loc="best")
