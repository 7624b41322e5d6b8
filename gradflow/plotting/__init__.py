"""One function a figure; each takes an optional Axes and returns it."""

from ._attention import plot_attention as plot_attention
from ._comparison import comparison as comparison
from ._embeddings import plot_embeddings as plot_embeddings
from ._ensemble import plot_band as plot_band
from ._loss import plot_loss as plot_loss
from ._overview import overview as overview
from ._rank_one import rank_one as rank_one
from ._singular_values import plot_singular_values as plot_singular_values
from ._stages import shade as shade, stage_colour as stage_colour
