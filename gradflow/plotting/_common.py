"""Parts that the figures share: Axes, the logarithmic clock, tokens and colours."""

import io
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullFormatter

from ..flows import AbstractTrajectory, check_flow

# The colours of Okabe and Ito, which the colour-blind can tell apart, without the
# yellow that is lost on white. Black is the boldest and comes last: few figures need
# eight colours.
COLOURS = (
    "#0072B2",  # blue
    "#D55E00",  # vermillion
    "#009E73",  # bluish green
    "#CC79A7",  # reddish purple
    "#E69F00",  # orange
    "#56B4E9",  # sky blue
    "#8C8C8C",  # grey
    "#000000",
)
"""Colours for curves, in the order in which the figures use them."""

MOST_TOKENS = len(COLOURS)
"""The largest number of tokens that a figure shows."""
LONGEST_LABEL = 12
"""The largest number of characters of a token's label."""


def axes_or_new(ax: Axes | None, figsize: tuple[float, float] = (5.2, 4.0)) -> Axes:
    """`ax`, or the Axes of a new pyplot figure."""
    if ax is not None:
        return ax
    # A caller who passes no Axes is at a prompt or in a notebook, which only show
    # figures that pyplot knows. Those figures live until `plt.close`; a program that
    # draws many passes Axes, or calls `plot_overview`, which does not use pyplot. The
    # import is local so that only such a call loads pyplot.
    import matplotlib.pyplot as plt

    _, new = plt.subplots(figsize=figsize, layout="constrained")
    return new


class NotebookFigure(Figure):
    """A figure that a notebook displays without pyplot."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()


def new_figure(
    width: float, height: float, *, w_pad: float = 0.1, h_pad: float | None = None
) -> NotebookFigure:
    """A figure outside pyplot with a constrained layout."""
    layout = ConstrainedLayoutEngine(w_pad=w_pad, h_pad=h_pad)
    return NotebookFigure(figsize=(width, height), layout=layout)


def shown_times(flow: AbstractTrajectory) -> Int[np.ndarray, " shown"]:
    """The indices of the saved times of a flow that a logarithmic axis can show."""
    return after_zero(check_flow(flow).ts, "saved times", "flow")


def after_zero(
    ts: Float[np.ndarray, " times"], kind: str, owner: str
) -> Int[np.ndarray, " shown"]:
    """The indices of the times after 0, of which there must be two."""
    shown = np.flatnonzero(ts > 0)
    if len(shown) < 2:
        raise ValueError(
            f"a figure over logarithmic time needs at least two {kind} after 0, but "
            f"this {owner} has {len(shown)}."
        )
    return shown


def logarithmic_clock(ax: Axes, ts: Float[np.ndarray, " shown"]) -> None:
    """Make the horizontal axis logarithmic time, from the first to the last of `ts`."""
    start, end = float(ts[0]), float(ts[-1])
    ax.set_xscale("log")
    ax.set_xlim(start, end)
    if end < 100 * start:
        # Over less than two decades matplotlib's labels 3×10² and 4×10² overlap.
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("time $t$")


def loss_label(flow: AbstractTrajectory) -> str:
    """The label of an axis that shows the loss. A loss that is compared with predictors
    is a cross-entropy, in nats."""
    return "loss $L$ (nats)" if flow.knowledge.baselines else "loss $L$"


class Tokens(NamedTuple):
    """The tokens that a figure shows."""

    indices: Int[np.ndarray, " shown"]
    labels: list[str]
    frequencies: Float[np.ndarray, " shown"] | None
    """π of each token, where the loss knows it."""
    note: str
    """A remark for the title if some tokens are not shown, otherwise empty."""

    @property
    def legend(self) -> list[str]:
        """The label of each token with its frequency, where it is known."""
        if self.frequencies is None:
            return self.labels
        return [
            rf"{label}  ($\pi$ = {frequency:.3g})"
            for label, frequency in zip(self.labels, self.frequencies, strict=True)
        ]


def tokens_of(flow: AbstractTrajectory, size: int) -> Tokens:
    """All `size` tokens in order or, if there are many, the most frequent first."""
    shown = min(size, MOST_TOKENS)
    indices, which = np.arange(shown), "first"
    names, pi = flow.knowledge.token_labels, flow.knowledge.token_frequencies
    if pi is not None and len(pi) != size:
        pi = None
    if pi is not None and shown < size:
        indices, which = np.argsort(-pi, kind="stable")[:shown], "most frequent"
    if names is None or len(names) != size:
        labels = [str(i) for i in indices]
    else:
        labels = [displayed(names[i]) for i in indices]
    note = f" ({shown} {which} of {size:,})" if shown < size else ""
    return Tokens(indices, labels, None if pi is None else pi[indices], note)


def displayed(label: str) -> str:
    """A token's label as a figure shows it: blanks visible, not too long, and without
    dollar signs that would start mathematics."""
    name = label if label and label.isprintable() and label == label.strip() else ""
    name = name or repr(label)
    if len(name) > LONGEST_LABEL:
        name = name[: LONGEST_LABEL - 1] + "…"
    return name.replace("$", r"\$")
