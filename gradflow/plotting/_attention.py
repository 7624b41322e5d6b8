"""plot_attention(): the attention of queries to keys, or of heads to lags."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jaxtyping import Array, Float, Int, PyTree
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties

from .._core.checks import Checked
from .._core.compiled import jit
from ..analysis.stages import Stage
from ..flows import AbstractTrajectory
from ._common import axes_or_new, logarithmic_clock, shown_times, tokens_of
from ._stages import plot_stages

SMALLEST_ROW = 5.5
"""The height of a row of the heat map, in points, below which it has no label."""
MOST_HEADS = 8
"""The largest number of heads that are shown."""
MOST_PLACES = 16
"""The largest number of lags or positions that are shown for each head."""


def plot_attention(
    flow: Checked[AbstractTrajectory],
    ax: Axes | None = None,
    *,
    stages: Sequence[Stage] | None = None,
) -> Axes:
    """The attention over logarithmic time as a heat map: one row for each query → key
    pair, with a block of rows for each query. For a model of heads that attend to lags
    or positions, one row for each head → lag pair, with a block for each head.

    At most eight tokens are shown, the most frequent, and at most eight heads with 16
    lags each. Lines separate `stages`.
    """
    shown = shown_times(flow)
    rows = attention_rows(flow)
    attention = attention_values(flow, rows)
    ax = axes_or_new(ax, (5.2, comfortable_height(rows.number)))
    mesh = ax.pcolormesh(
        _cell_edges(flow.ts[shown]),
        np.arange(rows.number + 1) - 0.5,
        attention[shown].T,
        vmin=0,
        vmax=1,
        cmap="viridis",
        rasterized=True,
    )
    for block in range(1, len(rows.sources)):
        ax.axhline(block * len(rows.targets) - 0.5, color="white", linewidth=1.5)
    ax.set_ylim(rows.number - 0.5, -0.5)
    _label_rows(ax, rows)
    logarithmic_clock(ax, flow.ts[shown])
    ax.set_title(f"Attention{rows.note}", loc="left")
    if stages is not None:
        plot_stages(stages, ax, over=True)
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=30)
    bar.set_label("attention")
    return ax


def comfortable_height(rows: int) -> float:
    """The height of a figure, in inches, in which each row has room for its label."""
    return float(np.clip(1.0 + 0.115 * rows, 4.0, 7.0))


class Rows(NamedTuple):
    """The rows of the heat map: each source (a query or a head) with each target (a
    key, a lag or a position), sources outermost."""

    axes: tuple[str, str]
    """What sources and targets are."""
    sources: Int[np.ndarray, " sources"]
    targets: Int[np.ndarray, " targets"]
    source_labels: list[str]
    target_labels: list[str]
    note: str
    """A remark for the title if some rows are not shown, otherwise empty."""

    @property
    def number(self) -> int:
        """The number of rows."""
        return len(self.sources) * len(self.targets)


def has_attention(flow: AbstractTrajectory) -> bool:
    """Whether `plot_attention` can draw the flow."""
    return _attention_axes(flow) is not None


def attention_rows(flow: AbstractTrajectory) -> Rows:
    """The rows that are shown."""
    axes = _attention_axes(flow)
    if axes is None:
        raise ValueError(
            "`plot_attention` needs the observable 'attention', a matrix at each time, "
            "or a problem to compute it from, and this flow has neither: integrate a "
            "`gradflow.Problem`, or pass a function of that name as "
            "`integrate(..., observables=...)`."
        )
    sizes = _attention_shape(flow)
    if axes == ("query", "key"):
        tokens = tokens_of(flow, sizes[0])
        indices, labels = tokens.indices, tokens.labels
        return Rows(axes, indices, indices, labels, labels, tokens.note)
    sources = np.arange(min(sizes[0], MOST_HEADS))
    targets = np.arange(min(sizes[1], MOST_PLACES))
    cut = [
        f"{len(some)} of {size:,} {name}s"
        for some, size, name in zip((sources, targets), sizes, axes, strict=True)
        if len(some) < size
    ]
    return Rows(
        axes,
        sources,
        targets,
        [str(1 + i) for i in sources],
        [str(1 + i) for i in targets],
        f" (first {' and '.join(cut)})" if cut else "",
    )


def attention_values(
    flow: AbstractTrajectory, rows: Rows
) -> Float[np.ndarray, "times rows"]:
    """The attention in each row at each saved time, as observed or, if it was not,
    computed from the parameters."""
    block = np.ix_(rows.sources, rows.targets)
    if "attention" in flow.observables:
        chosen = flow.observables["attention"][:, *block]
    else:
        # Only the block that is shown is kept of each matrix: for a large vocabulary
        # the matrices at all times would not fit in memory.
        attention = _Block(_attention_of(flow), jax.tree.map(jnp.asarray, block))
        if len(flow.params_ts) == len(flow.ts):
            chosen = _at_all_times(attention, flow.params)
        else:
            chosen = flow.observe(attention, flow.ts)
    return np.asarray(chosen).reshape(len(flow.ts), -1)


def _attention_axes(flow: AbstractTrajectory) -> tuple[str, str] | None:
    """The names of the two axes of the attention, or None if the flow has no attention
    that is a matrix. A square matrix of unknown axes, as of a user's own observable, is
    taken to be that of queries and keys."""
    shape = _attention_shape(flow)
    if len(shape) != 2:
        return None
    known = flow.knowledge.axes.get("attention")
    if known is None:
        return ("query", "key") if shape[0] == shape[1] else None
    return (known[0], known[1]) if len(known) == 2 else None


def _attention_shape(flow: AbstractTrajectory) -> tuple[int, ...]:
    """The shape of the attention at one time; empty if there is none."""
    if "attention" in flow.observables:
        return np.shape(flow.observables["attention"])[1:]
    if "attention" in flow.knowledge.observables:
        return jax.eval_shape(_attention_of(flow), flow.final).shape
    return ()


def _attention_of(
    flow: AbstractTrajectory,
) -> Callable[[PyTree], Float[Array, "sources targets"]]:
    return flow.observable("attention")


class _Block(eqx.Module):
    """Some rows and columns of the attention."""

    attention: Callable[[PyTree], Float[Array, "sources targets"]]
    block: tuple[Int[Array, "rows 1"], Int[Array, "1 columns"]]

    def __call__(self, params: PyTree) -> Float[Array, "rows columns"]:
        return self.attention(params)[self.block]


@jit
def _at_all_times(
    attention: _Block, params: PyTree
) -> Float[Array, "times rows columns"]:
    return jax.lax.map(attention, params)


def _cell_edges(ts: Float[np.ndarray, " shown"]) -> Float[np.ndarray, " shown+1"]:
    """The edges of cells with each time in the middle, on the logarithmic clock."""
    logs = np.log(ts)
    middles = (logs[1:] + logs[:-1]) / 2
    first, last = 2 * logs[:1] - middles[:1], 2 * logs[-1:] - middles[-1:]
    return np.exp(np.concatenate([first, middles, last]))


def _label_rows(ax: Axes, rows: Rows) -> None:
    """Label each row or, if there is no room for that, each block of rows."""
    source, target = rows.axes
    inches = ax.get_window_extent().height / ax.figure.dpi
    points = 72 * inches / rows.number
    if points >= SMALLEST_ROW:
        default = FontProperties(size=matplotlib.rcParams["ytick.labelsize"])
        size = min(default.get_size_in_points(), points)
        pairs = [f"{a} → {b}" for a in rows.source_labels for b in rows.target_labels]
        ax.set_yticks(range(rows.number), pairs, fontsize=size)
        ax.set_ylabel(f"{source} → {target}")
    else:
        count = len(rows.targets)
        middles = np.arange(len(rows.sources)) * count + (count - 1) / 2
        ax.set_yticks(middles, rows.source_labels)
        order = "in the same order" if source == "query" else "from the top"
        ax.set_ylabel(f"{source} ({target}s {order})")
