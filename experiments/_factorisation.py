"""Shared by the experiments on the tensor factorisation: targets, and bands that mark
the stages in a figure."""

from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

import gradflow

Geometry = Literal["scores", "replicator"]
GEOMETRIES: tuple[Geometry, ...] = ("scores", "replicator")
EQUATIONS = {
    "scores": r"scores, $\dot s = J^2 g$",
    "replicator": r"replicator, $\dot s = J g$",
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
RATIO = 1.7
BAND = ("#E69F00", "#56B4E9")
"""The colours of the competitive and of the cooperative phase."""


class Target(NamedTuple):
    """G = Σ_j A_j ⊗ e_j: pattern j sits at position j, and ‖A_j‖ falls with j."""

    patterns: Float[np.ndarray, "patterns features"]
    """A_j."""
    positions: int
    """T."""

    @property
    def G(self) -> Float[np.ndarray, "features positions"]:
        return self.known(len(self.patterns))

    def known(self, k: int) -> Float[np.ndarray, "features positions"]:
        """The k-pattern solution, Σ_{j ≤ k} A_j ⊗ e_j."""
        G = np.zeros((self.patterns.shape[1], self.positions))
        G[:, :k] = self.patterns[:k].T
        return G

    @property
    def sizes(self) -> Float[np.ndarray, " patterns"]:
        """‖A_j‖."""
        return np.linalg.norm(self.patterns, axis=1)

    def plateau_loss(self, k: int) -> float:
        """½Σ_{j > k} ‖A_j‖², the loss that remains when k patterns are known."""
        return float(0.5 * np.sum(self.sizes[k:] ** 2))

    def problem(
        self, geometry: Geometry, heads: int = 3
    ) -> gradflow.TensorFactorisation:
        return gradflow.TensorFactorisation(self.G, heads, geometry)


def random_target(
    d: int, positions: int, seed: int = 0, *, orthogonal: bool = True
) -> Target:
    """Three random d × d matrices with entries N(0, 1/d), so that ‖A_1‖ = √d, scaled to
    geometrically falling norms and, by default, made orthogonal to each other."""
    chain = gradflow.HighOrderChain.random(
        d, (1, 1, 1), ratio=RATIO, seed=seed, scale=1 / np.sqrt(d)
    )
    patterns = chain.matrices.reshape(3, -1)
    if orthogonal:
        sizes = np.linalg.norm(patterns, axis=1)
        patterns = sizes[:, None] * np.linalg.qr(patterns.T)[0].T
    return Target(patterns, positions)


def orthogonal_target(size: float, positions: int, patterns: int = 3) -> Target:
    """Orthogonal patterns with ‖A_1‖ = `size` and geometrically falling norms."""
    sizes = size * RATIO ** -np.arange(patterns, dtype=float)
    return Target(np.diag(sizes), positions)


def reduced(target: Target) -> tuple[Target, Float[np.ndarray, "features patterns"]]:
    """The same target in coordinates of an orthonormal basis of span{A_j}, and that
    basis."""
    basis, coordinates = np.linalg.qr(target.patterns.T)
    return Target(coordinates.T, target.positions), basis


def shade_stages(axes: Any, stages: gradflow.Stages, *, named: Axes | None) -> None:
    """Draw a band for each stage and lines where they meet, with the names above
    `named`."""
    names, middles = [], []
    for ax in axes:
        low, high = ax.get_xlim()
        for stage in stages:
            start, end = max(stage.start, low), min(stage.end, high)
            colour = BAND[stage.name == "cooperative"]
            ax.axvspan(start, end, color=colour, alpha=0.15, linewidth=0, zorder=-1)
            if end < high:
                ax.axvline(end, color="0.4", linewidth=0.8, linestyle=(0, (2, 2)))
            if ax is named:
                names.append(f"{stage.name}\n(pattern {stage.cycle})")
                middles.append(np.sqrt(start * end))
        ax.set_xlim(low, high)
    if named is not None and names:
        above = named.secondary_xaxis("top")
        above.set_xticks(middles, names)
        above.set_xticks([], minor=True)
        above.tick_params(length=0, pad=1, labelsize="x-small")
        above.spines["top"].set_visible(False)
