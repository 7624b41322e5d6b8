"""plot_embeddings(): the paths of the token embeddings."""

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from .._core.checks import Checked
from ..flows import AbstractTrajectory, check_flow
from ._common import COLOURS, axes_or_new, tokens_of


def plot_embeddings(flow: Checked[AbstractTrajectory], ax: Axes | None = None) -> Axes:
    """The path of each token's embedding, a row of W0, in the plane of the first two
    right singular vectors of the final W0.

    An open circle marks the start of a path and a full circle its end. Both axes have
    the same scale, which preserves lengths and angles, unless the paths stay near a
    line: then the second direction is stretched, at most tenfold, and its label says
    so. At most eight tokens are shown, the most frequent.
    """
    paths = embedding_paths(check_flow(flow))
    tokens = tokens_of(flow, paths.shape[1])
    ax = axes_or_new(ax)
    paths = paths[:, tokens.indices]
    extents = np.ptp(paths, axis=0).max(axis=1)
    for i in range(len(extents)):
        x, y = paths[:, i].T
        # All paths leave the first saddle along one line. Shorter paths are drawn above
        # longer ones, so that none is hidden.
        above = 2 + float(np.mean(extents > extents[i]))
        ax.plot(x, y, color=COLOURS[i], linewidth=1.5, zorder=above)
        ax.plot(x[0], y[0], "o", color="0.3", markerfacecolor="white", zorder=3)
        ax.plot(x[-1], y[-1], "o", color=COLOURS[i], zorder=above + 2)
    ends = ax.lines[2::3]
    # Handles and labels are explicit because matplotlib hides labels that start with an
    # underscore.
    ax.legend(ends, tokens.legend, fontsize="small", handlelength=1)
    ax.margins(0.08)
    # Stretched, the second direction takes half as much room as the first. The limit
    # keeps the noise of a small start from being magnified.
    width, height = np.ptp(paths, axis=(0, 1))
    stretch = round(np.clip(0.5 * width / height, 1, 10)) if height > 0 else 1
    if width > 0:  # the flow moved
        ax.set_aspect(stretch, adjustable="datalim")
    ax.set_xlabel("first principal direction of the final $W_0$")
    stretched = f" (stretched {stretch}×)" if stretch > 1 else ""
    ax.set_ylabel(f"second principal direction{stretched}")
    ax.set_title(f"Token embeddings{tokens.note}", loc="left")
    return ax


def has_embeddings(flow: AbstractTrajectory) -> bool:
    """Whether `plot_embeddings` can draw the flow."""
    return np.ndim(getattr(flow.params, "W0", 0.0)) == 3


def embedding_paths(flow: AbstractTrajectory) -> Float[np.ndarray, "times d 2"]:
    """The coordinates of each row of W0 at each saved time."""
    if not has_embeddings(flow):
        raise ValueError(
            "`plot_embeddings` needs parameters with a matrix W0, one row for each "
            "token, and this flow has none: integrate a `gradflow.Problem` with a "
            "`OneLayerTransformer`."
        )
    W0 = np.asarray(flow.params.W0)
    _, _, Vt = np.linalg.svd(W0[-1], full_matrices=True)
    directions = np.zeros((W0.shape[2], 2))  # the second is zero where m = 1
    directions[:, : len(Vt[:2])] = Vt[:2].T
    paths = W0 @ directions
    # The sign of a singular vector is arbitrary: make its largest final coordinate
    # positive.
    final = paths[-1]
    largest = final[np.abs(final).argmax(axis=0), [0, 1]]
    return paths * np.where(largest < 0, -1.0, 1.0)
