"""Who attends to whom."""

from collections.abc import Callable, Sequence

import jax
import matplotlib
import numpy as np
from jaxtyping import Array, Float, PyTree
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties

from ..analysis.stages import Stage
from ..flows._flow import Flow
from ._common import Tokens, axes_or_new, logarithmic_clock, shown_times, tokens_of
from ._stages import shade

SMALLEST_ROW = 5.5
"""Points of height below which a row of the heat map gets no label of its own."""


def plot_attention(
    flow: Flow, ax: Axes | None = None, *, stages: Sequence[Stage] | None = None
) -> Axes:
    """The attention matrix over logarithmic time: a heat map with one row for each
    query → key pair, a block of rows for each query.

    Of more than eight tokens it shows the most frequent. Where `stages` meet there is
    a line.
    """
    shown = shown_times(flow)
    tokens = attention_tokens(flow)
    attention = attention_rows(flow, tokens)
    count = len(tokens.labels)
    ax = axes_or_new(ax, (5.2, comfortable_height(count)))
    mesh = ax.pcolormesh(
        _cell_edges(flow.ts[shown]),
        np.arange(count**2 + 1) - 0.5,
        attention[shown].T,
        vmin=0,
        vmax=1,
        cmap="viridis",
        rasterized=True,
    )
    for block in range(1, count):
        ax.axhline(block * count - 0.5, color="white", linewidth=1.5)
    ax.set_ylim(count**2 - 0.5, -0.5)
    _label_rows(ax, tokens.labels)
    logarithmic_clock(ax, flow.ts[shown])
    ax.set_title(f"Attention{tokens.note}", loc="left")
    if stages is not None:
        shade(ax, stages, over=True)
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=30)
    bar.set_label("attention")
    return ax


def comfortable_height(tokens: int) -> float:
    """Inches of figure in which each row of so many tokens has room for its label."""
    return float(np.clip(1.0 + 0.115 * tokens**2, 4.0, 7.0))


def has_attention(flow: Flow) -> bool:
    if "attention" in flow.observables:
        shape = np.shape(flow.observables["attention"])
        return len(shape) == 3 and shape[1] == shape[2]
    return "attention" in getattr(flow.problem, "observables", {})


def attention_tokens(flow: Flow) -> Tokens:
    """The tokens whose attention is shown."""
    if not has_attention(flow):
        raise ValueError(
            "`plot_attention` needs the observable 'attention', a square matrix at "
            "each time, or a problem to compute it by, and this flow has neither: "
            "integrate a `gradflow.Problem`, or pass a function of that name as "
            "`integrate(..., observables=...)`."
        )
    if "attention" in flow.observables:
        return tokens_of(flow, flow.observables["attention"].shape[1])
    return tokens_of(flow, jax.eval_shape(_attention_of(flow), flow.final).shape[0])


def attention_rows(flow: Flow, tokens: Tokens) -> Float[np.ndarray, "times rows"]:
    """The attention of each query among `tokens` to each key among them, queries
    outermost; as observed or else computed from the parameters."""
    block = np.ix_(tokens.indices, tokens.indices)
    if "attention" in flow.observables:
        chosen = flow.observables["attention"][:, *block]
    else:
        attention = _attention_of(flow)
        # Only what is shown is kept of each time's matrix: of a large vocabulary, all
        # of them together would not fit in memory.
        if flow.stored_ts is None:
            chosen = jax.lax.map(lambda params: attention(params)[block], flow.params)
        else:
            chosen = flow.observe(lambda params: attention(params)[block], flow.ts)
    return np.asarray(chosen).reshape(len(flow.ts), -1)


def _attention_of(flow: Flow) -> Callable[[PyTree], Float[Array, "d d"]]:
    return getattr(flow.problem, "observables", {})["attention"]


def _cell_edges(ts: Float[np.ndarray, " shown"]) -> Float[np.ndarray, " shown+1"]:
    """Each time in the middle of its cell, on the logarithmic clock."""
    logs = np.log(ts)
    middles = (logs[1:] + logs[:-1]) / 2
    first, last = 2 * logs[:1] - middles[:1], 2 * logs[-1:] - middles[-1:]
    return np.exp(np.concatenate([first, middles, last]))


def _label_rows(ax: Axes, labels: list[str]) -> None:
    count = len(labels)
    inches = ax.get_window_extent().height / ax.figure.dpi
    points = 72 * inches / count**2
    if points >= SMALLEST_ROW:
        default = FontProperties(size=matplotlib.rcParams["ytick.labelsize"])
        size = min(default.get_size_in_points(), points)
        pairs = [f"{query} → {key}" for query in labels for key in labels]
        ax.set_yticks(range(count**2), pairs, fontsize=size)
        ax.set_ylabel("query → key")
    else:
        ax.set_yticks(np.arange(count) * count + (count - 1) / 2, labels)
        ax.set_ylabel("query (keys in the same order)")
