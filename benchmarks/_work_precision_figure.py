"""The figure of a work-precision benchmark."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which stay apart for colour-blind readers; no yellow.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX<>*hd8p"


def draw(rows: Sequence[Mapping[str, Any]], title: str, stem: Path) -> None:
    """Time against error, a line a solver, as PNG and PDF. gradflow's lines are whole
    and thick, the others' thin and broken."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    solvers = list(dict.fromkeys(row["solver"] for row in rows))
    solvers.sort(key=lambda name: not _ours(rows, name))
    fig, ax = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for i, name in enumerate(solvers):
        points = [row for row in rows if row["solver"] == name]
        ours = _ours(rows, name)
        ax.loglog(
            [row["error"] for row in points],
            [row["seconds"] for row in points],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle="-" if ours else (0, (4, 1.5)),
            linewidth=2.2 if ours else 1.0,
            markersize=6.5 if ours else 5,
            markerfacecolor=None if ours else "white",
            zorder=3 if ours else 2,
            label=name,
        )
    ax.invert_xaxis()
    ax.set(
        title=title,
        xlabel="error: max |y - y_ref| over 200 saved times (smaller to the right)",
        ylabel="time of a solve [s]",
    )
    ax.grid(which="major", color="0.88", linewidth=0.6)
    fig.legend(loc="outside right upper", frameon=False)
    stem.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".pdf"):
        fig.savefig(stem.with_suffix(suffix), dpi=200)
    plt.close(fig)


def _ours(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return next(row["ours"] for row in rows if row["solver"] == name)
