"""The work-precision figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INK, RED, BLUE, GREEN, PURPLE, ORANGE, SKY, GREY = (
    # Okabe and Ito's colours, which colour-blind readers can tell apart.
    *("#000000", "#D55E00", "#0072B2", "#009E73"),
    *("#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C"),
)
STYLES = {
    "auto": (INK, "o"),
    "integrate(auto)": (INK, "*"),
    "ndf": (RED, "s"),
    "rock4": (GREEN, "D"),
    "kvaerno5": (BLUE, "^"),
    "kvaerno3": (SKY, "v"),
    "tsit5": (PURPLE, "p"),
    "dopri5": (ORANGE, ">"),
    "dopri8": (ORANGE, "<"),
    "rk4": (GREY, "P"),
    "euler": (GREY, "X"),
    "LSODA": (BLUE, "o"),
    "BDF": (SKY, "s"),
    "Radau": (GREEN, "^"),
    "DOP853": (PURPLE, "p"),
    "CVODE dense": (RED, "v"),
    "CVODE GMRES": (ORANGE, "D"),
    "SSV2stab": (INK, "d"),
    "fixed RK4": (GREY, "P"),
    "fixed Euler": (GREY, "X"),
}
"""A solver looks the same in every figure. Among gradflow's solvers, and among the
others, no two share both colour and marker; gradflow's markers are filled, the others'
open."""


def draw(rows: Sequence[Mapping[str, Any]], title: str, stem: Path) -> None:
    """Plot time against error, one line per solver, as PNG and PDF. gradflow's lines
    are thick and solid, the others' thin and dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogFormatterSciNotation

    solvers = list(dict.fromkeys(row["solver"] for row in rows))
    fig, ax = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for name in solvers:
        points = [row for row in rows if row["solver"] == name]
        ours = points[0]["ours"]
        colour, marker = STYLES.get(name, (GREY, "."))
        ax.loglog(
            [row["error"] for row in points],
            [row["seconds"] for row in points],
            color=colour,
            marker=marker,
            linestyle="-" if ours else (0, (4, 1.5)),
            linewidth=2.2 if ours else 1.0,
            markersize=(9 if marker == "*" else 6.5) if ours else 5,
            markerfacecolor=colour if ours else "white",
            markeredgecolor="white" if ours else colour,
            markeredgewidth=0.6 if ours else 1.0,
            zorder=3 if ours else 2,
            label=name,
        )
    ax.invert_xaxis()
    ax.set(
        title=title,
        xlabel="error: max |y - y_ref| over 200 saved times (smaller to the right)",
        ylabel="time per solve [s]",
    )
    ax.grid(which="major", color="0.88", linewidth=0.6)
    ax.yaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(3, 1)))
    # One legend for both groups, each under its heading, outside the data.
    handles, labels = [], []
    for heading, ours in (("gradflow", True), ("others", False)):
        names = {row["solver"] for row in rows if row["ours"] is ours}
        handles.append(Line2D([], [], linestyle="none"))
        labels.append(f"$\\bf{{{heading}}}$")
        handles += [line for line in ax.get_lines() if line.get_label() in names]
        labels += [str(x.get_label()) for x in ax.get_lines() if x.get_label() in names]
    fig.legend(
        handles, labels, loc="outside right upper", frameon=False, fontsize="small"
    )
    stem.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".pdf"):
        fig.savefig(stem.with_suffix(suffix), dpi=200)
    plt.close(fig)
