"""An ensemble as bands about its median."""

from typing import Any

import jax
import numpy as np
from matplotlib.axes import Axes

from .._ensemble import Ensemble
from ._common import COLOURS, axes_or_new, logarithmic_clock

BANDS = {0.9: 0.18, 0.5: 0.35}
"""The share of the members that a band holds, and how dark it is."""


def plot_band(
    ensemble: Ensemble,
    name: str = "loss",
    ax: Axes | None = None,
    *,
    component: int | tuple[int, ...] = (),
    colour: str = COLOURS[0],
    label: str | None = None,
) -> Axes:
    """The median over an ensemble's members, with the bands that hold the middle half
    and nine tenths of them, over logarithmic time.

    `name` is `loss`, `speed` or an observable; of one that is an array, `component` is
    the index of the number that is shown.
    """
    values = ensemble.values(name)
    chosen = component if isinstance(component, tuple) else (component,)
    shapes = [np.shape(x)[2:] for x in jax.tree.leaves(values)]
    if len(shapes) != 1 or len(chosen) != len(shapes[0]):
        what = f"of shape {shapes[0]}" if len(shapes) == 1 else "several arrays"
        raise ValueError(
            f"`component` must pick one number of {name!r}, which is {what}, got "
            f"{component!r}."
        )
    if not all(-n <= i < n for i, n in zip(chosen, shapes[0], strict=True)):
        raise ValueError(
            f"`component` must lie within {name!r}, of shape {shapes[0]}, got "
            f"{component!r}."
        )

    def quantile(q: float) -> Any:
        reduced = jax.tree.leaves(ensemble.quantiles(q, name))[0]
        return reduced[(..., *chosen)][shown]

    shown = np.flatnonzero(ensemble.ts > 0)
    if len(shown) < 2:
        raise ValueError(
            "a figure over logarithmic time needs at least two saved times after 0, "
            f"but this ensemble has {len(shown)}."
        )
    ts = ensemble.ts[shown]
    ax = axes_or_new(ax)
    for share, dark in BANDS.items():
        low, high = quantile(0.5 - share / 2), quantile(0.5 + share / 2)
        ax.fill_between(ts, low, high, color=colour, alpha=dark, linewidth=0)
    ax.plot(ts, quantile(0.5), color=colour, linewidth=2, label=label)
    logarithmic_clock(ax, ts)
    index = f"[{', '.join(map(str, chosen))}]" if chosen else ""
    ax.set_ylabel(name.replace("_", " ") + index)
    ax.set_title(f"Median of {len(ensemble):,} flows, 50 % and 90 % bands", loc="left")
    return ax
