"""plot_band(): an ensemble as bands around its median."""

import jax
import numpy as np
from matplotlib.axes import Axes

from .._core.checks import Checked
from ..flows import Ensemble, check_ensemble
from ._common import COLOURS, axes_or_new, logarithmic_clock

BANDS = {0.9: 0.18, 0.5: 0.35}
"""The share of the members in each band, and its opacity."""


def plot_band(
    ensemble: Checked[Ensemble],
    name: str = "loss",
    ax: Axes | None = None,
    *,
    component: int | tuple[int, ...] = (),
    colour: str = COLOURS[0],
    label: str | None = None,
) -> Axes:
    """The median over the members of an ensemble over logarithmic time, with bands that
    contain the middle 50 % and 90 % of them. Members that failed are left out. Once
    some members have ended by an event, the median of the others is dashed.

    **Arguments:**

    - `ensemble`: a result of `gradflow.integrate_ensemble`.
    - `name`: `"loss"`, `"speed"` or an observable.
    - `ax`: the Axes to draw in. By default a new pyplot figure.
    - `component`: for an observable that is an array, the index of the number to show.
        The label of the axis includes it unless `label` is given.
    - `colour`: the colour of the median and the bands.
    - `label`: the name of the median in a legend.
    """
    ensemble = check_ensemble(ensemble)
    values = ensemble.values(name)
    chosen = component if isinstance(component, tuple) else (component,)
    shapes = [np.shape(x)[2:] for x in jax.tree.leaves(values)]
    if len(shapes) != 1 or len(chosen) != len(shapes[0]):
        what = f"of shape {shapes[0]}" if len(shapes) == 1 else "several arrays"
        raise ValueError(
            f"`component` must select one number of {name!r}, which is {what}, got "
            f"{component!r}."
        )
    if not all(-n <= i < n for i, n in zip(chosen, shapes[0], strict=True)):
        raise ValueError(
            f"`component` must lie within {name!r}, of shape {shapes[0]}, got "
            f"{component!r}."
        )

    kept = [i for i in range(len(ensemble)) if i not in ensemble.failed]
    numbers = jax.tree.leaves(values)[0][(slice(None), slice(None), *chosen)][kept]
    shown = (ensemble.ts > 0) & ~np.all(np.isnan(numbers), axis=0)
    if np.sum(shown) < 2:
        raise ValueError(
            "a figure over logarithmic time needs at least two saved times after 0 of "
            f"members that did not fail, but this ensemble has {np.sum(shown)}."
        )
    ts, numbers = ensemble.ts[shown], numbers[:, shown]
    ax = axes_or_new(ax)
    for share, dark in BANDS.items():
        low, high = np.nanquantile(numbers, [0.5 - share / 2, 0.5 + share / 2], axis=0)
        ax.fill_between(ts, low, high, color=colour, alpha=dark, linewidth=0)
    median = np.nanmedian(numbers, axis=0)
    # Members end one after another, so that the times of all members come first.
    whole = int(np.sum(~np.any(np.isnan(numbers), axis=0)))
    ax.plot(ts[:whole], median[:whole], color=colour, linewidth=2, label=label)
    remarks = [f"{len(ensemble.failed):,} failed"] if ensemble.failed else []
    if whole < len(ts):
        rest = slice(max(whole - 1, 0), None)
        ax.plot(ts[rest], median[rest], color=colour, linewidth=2, linestyle="--")
        remarks.append("dashed: members that have not ended")
    logarithmic_clock(ax, ts)
    index = f"[{', '.join(map(str, chosen))}]" if chosen and label is None else ""
    ax.set_ylabel(name.replace("_", " ") + index)
    title = f"Median of {len(kept):,} flows, 50 % and 90 % bands"
    below = f"\n({'; '.join(remarks)})" if remarks else ""
    ax.set_title(title + below, loc="left")
    return ax
