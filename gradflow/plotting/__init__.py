"""Figures: one function for each, which takes an optional Axes and returns it."""

from ._attention import plot_attention
from ._common import COLOURS
from ._comparison import plot_comparison
from ._embeddings import plot_embeddings
from ._ensemble import plot_band
from ._loss import plot_loss
from ._overview import plot_overview
from ._rank_one import plot_rank_one
from ._singular_values import plot_singular_values
from ._stages import plot_stages, stage_colour

__all__ = [
    "COLOURS",
    "plot_attention",
    "plot_band",
    "plot_comparison",
    "plot_embeddings",
    "plot_loss",
    "plot_overview",
    "plot_rank_one",
    "plot_singular_values",
    "plot_stages",
    "stage_colour",
]


def __dir__() -> list[str]:
    return __all__
