"""Models: parameters, initialisation, forward map, symmetries and observables."""

from ._model import AbstractModel as AbstractModel, KnownSaddle as KnownSaddle
from ._one_layer import (
    OneLayerParameters as OneLayerParameters,
    OneLayerTransformer as OneLayerTransformer,
)
from ._positional_heads import (
    PositionalHeads as PositionalHeads,
    PositionalHeadsParameters as PositionalHeadsParameters,
)
