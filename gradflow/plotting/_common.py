"""What the figures share: Axes, the logarithmic clock, tokens and their colours."""

import io
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ..flows._flow import Flow

# Okabe and Ito's colours, told apart also by the colour-blind, without the yellow that
# is lost on white. Black comes last: it is the boldest, and few figures need eight.
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
MOST_TOKENS = len(COLOURS)
"""How many tokens a figure shows."""
LONGEST_LABEL = 12


def axes_or_new(ax: Axes | None, figsize: tuple[float, float] = (5.2, 4.0)) -> Axes:
    if ax is not None:
        return ax
    # By pyplot and not by a bare Figure: who passes no Axes and gets one back is at a
    # prompt or in a notebook, where only figures that pyplot knows are shown. The price
    # is that they live until `plt.close`; whoever draws many passes Axes, or calls
    # `overview`, which stays out of pyplot. Imported here for the same reason.
    import matplotlib.pyplot as plt

    _, new = plt.subplots(figsize=figsize, layout="constrained")
    return new


class NotebookFigure(Figure):
    """A figure that a notebook shows without pyplot's help."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()


def shown_times(flow: Flow) -> Int[np.ndarray, " shown"]:
    """The indices of the times that a logarithmic axis can show: all but zero."""
    if not isinstance(flow, Flow):
        raise ValueError(f"`flow` must be a Flow, got {type(flow).__name__}.")
    shown = np.flatnonzero(flow.ts > 0)
    if len(shown) < 2:
        raise ValueError(
            "a figure over logarithmic time needs at least two saved times after 0, "
            f"but this flow has {len(shown)}."
        )
    return shown


def logarithmic_clock(ax: Axes, ts: Float[np.ndarray, " shown"]) -> None:
    ax.set_xscale("log")
    ax.set_xlim(float(ts[0]), float(ts[-1]))
    if ts[-1] < 100 * ts[0]:
        # So few decades leave matplotlib to label 3×10² and 4×10² over each other.
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("time $t$")


def chain_of(flow: Flow) -> Any:
    """The chain behind a flow, or None for a loss without one."""
    return getattr(getattr(flow.problem, "population", None), "chain", None)


class Tokens(NamedTuple):
    """The tokens that a figure shows."""

    indices: Int[np.ndarray, " shown"]
    labels: list[str]
    frequencies: Float[np.ndarray, " shown"] | None
    """π of each, where the flow's problem has a chain."""
    note: str
    """What to add to the title where not all tokens are shown, else empty."""


def tokens_of(flow: Flow, size: int) -> Tokens:
    """All `size` tokens in their order or, of many, the most frequent first."""
    chain = chain_of(flow)
    shown = min(size, MOST_TOKENS)
    indices = np.arange(shown)
    if chain is None or chain.size != size:
        labels, frequencies, which = [str(i) for i in indices], None, "first"
    else:
        if shown < size:
            indices = np.argsort(-chain.stationary, kind="stable")[:shown]
        labels = [as_shown(chain.labels[i]) for i in indices]
        frequencies, which = chain.stationary[indices], "most frequent"
    note = f" ({shown} {which} of {size:,})" if shown < size else ""
    return Tokens(indices, labels, frequencies, note)


def as_shown(label: str) -> str:
    """A token's name in a figure: blanks visible, not too long, and its dollar signs
    no mathematics."""
    name = label if label and label.isprintable() and label == label.strip() else ""
    name = name or repr(label)
    if len(name) > LONGEST_LABEL:
        name = name[: LONGEST_LABEL - 1] + "…"
    return name.replace("$", r"\$")
