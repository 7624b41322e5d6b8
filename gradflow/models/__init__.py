"""One file a model: parameters, initialisation, forward map, conserved quantities and
observables."""

from ._one_layer import (
    OneLayerParameters as OneLayerParameters,
    OneLayerTransformer as OneLayerTransformer,
)
