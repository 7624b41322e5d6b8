"""Reference lines of a loss: its floor and the losses of simple predictors."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D

from ..flows import AbstractTrajectory

LEVEL = "gradflow:level"
"""The group id of reference lines, by which a later call recognises them."""
SAME_LEVEL = 1e-3
"""The largest relative difference between two levels that are drawn as one."""
LEFT_OUT = "uniform"
"""The predictor without a line: a flow from a small start begins at its loss."""


def levels_of(flow: AbstractTrajectory) -> dict[str, float]:
    """The heights of the reference lines by name. A predictor whose loss is the floor,
    or that of another predictor, shares its line."""
    floor, baselines = flow.knowledge.floor, flow.knowledge.baselines
    known = {} if floor is None else {"floor": floor}
    known |= {name: loss for name, loss in baselines.items() if name != LEFT_OUT}
    groups: list[tuple[list[str], float]] = []
    for name, height in known.items():
        for names, other in groups:
            if _are_same(height, other):
                names.append(name)
                break
        else:
            groups.append(([name], height))
    # Two names fit beside each other; a third would not.
    return {" = ".join(names[:2]): height for names, height in groups}


def draw_levels(ax: Axes, levels: dict[str, float]) -> None:
    """Draw the reference lines that the Axes do not have yet."""
    for name, height in levels.items():
        if any(_are_same(height, _height(line)) for line in drawn_levels(ax)):
            continue
        line = ax.axhline(
            height,
            color="0.35",
            linewidth=1,
            linestyle=":" if name.startswith("floor") else "--",
            zorder=1,
            gid=LEVEL,
        )
        # The underscore keeps it out of legends; adding zero turns -0.0 into 0.0.
        line.set_label(f"_{name} {height + 0.0:.4f}")


def drawn_levels(ax: Axes) -> list[Line2D]:
    """The reference lines that are on the Axes."""
    return [line for line in ax.lines if line.get_gid() == LEVEL]


def label_levels(ax: Axes, curves: Sequence[Line2D]) -> None:
    """Label every reference line of the Axes, at that end and on that side of the line
    where the text crosses the curves, the other lines and the other labels least. The
    limits of the Axes must be final."""
    for text in [text for text in ax.texts if text.get_gid() == LEVEL]:
        text.remove()
    fraction = ax.transData + ax.transAxes.inverted()
    paths = [fraction.transform(np.asarray(line.get_xydata())) for line in curves]
    lines = sorted(drawn_levels(ax), key=_height, reverse=True)
    heights = [float(fraction.transform((1.0, _height(line)))[1]) for line in lines]
    placed: list[_Place] = []
    for line, height in zip(lines, heights, strict=True):
        text = str(line.get_label())[1:]
        others = [other for other in heights if other != height]
        candidates = [
            _Place.of(ax, text, height, side, above)
            for side, above in itertools.product(("left", "right"), (True, False))
        ]
        costs = [place.cost(paths, others, placed) for place in candidates]
        best = candidates[int(np.argmin(costs))]
        placed.append(best)
        ax.annotate(
            text,
            (0.02 if best.side == "left" else 0.98, _height(line)),
            xycoords=ax.get_yaxis_transform(),
            xytext=(0, 2 if best.above else -2),
            textcoords="offset points",
            ha=best.side,
            va="bottom" if best.above else "top",
            color="0.25",
            fontsize="small",
            gid=LEVEL,
        )


class _Place(NamedTuple):
    """A place for a label, in fractions of the Axes."""

    side: str
    above: bool
    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def of(cls, ax: Axes, text: str, height: float, side: str, above: bool) -> "_Place":
        """The place at one end and on one side of a line, from the size of the font."""
        box = ax.get_window_extent()
        dpi = ax.get_figure(root=True).dpi  # pyright: ignore[reportOptionalMemberAccess]
        family = FontProperties(family=matplotlib.rcParams["font.family"], size="small")
        size = family.get_size_in_points() * dpi / 72
        width, tall = 0.55 * size * len(text) / box.width, 1.5 * size / box.height
        x0 = 0.02 if side == "left" else 0.98 - width
        y0 = height if above else height - tall
        return cls(side, above, x0, x0 + width, y0, y0 + tall)

    def cost(
        self,
        paths: Sequence[Float[np.ndarray, "points 2"]],
        levels: Sequence[float],
        placed: Sequence["_Place"],
    ) -> float:
        """How much the label would cover, or be cut off."""
        outside = self.y0 < 0 or self.y1 > 1
        covered = sum(
            self.x0 < p.x1 and p.x0 < self.x1 and self.y0 < p.y1 and p.y0 < self.y1
            for p in placed
        )
        crossed = sum(self._is_crossed_by(path) for path in paths)
        struck = sum(self.y0 < level < self.y1 for level in levels)
        return 4.0 * outside + 4.0 * covered + 2.0 * crossed + 1.0 * struck

    def _is_crossed_by(self, path: Float[np.ndarray, "points 2"]) -> bool:
        finite = path[np.all(np.isfinite(path), axis=1)]
        if not len(finite):
            return False
        # A curve is continuous: it crosses the label if it is not above or below it
        # all along.
        y = np.interp(np.linspace(self.x0, self.x1, 50), *finite.T)
        return bool(y.min() <= self.y1 and y.max() >= self.y0)


def _height(line: Line2D) -> float:
    return float(np.asarray(line.get_ydata())[0])


def _are_same(a: float, b: float) -> bool:
    return abs(a - b) <= SAME_LEVEL * max(abs(a), abs(b))
