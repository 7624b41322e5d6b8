"""One file a model: parameters, initialisation, forward map, conserved quantities and
observables."""

from ._model import KnownSaddle as KnownSaddle, Model as Model
from ._one_layer import (
    OneLayerParameters as OneLayerParameters,
    OneLayerTransformer as OneLayerTransformer,
)
from ._positional_heads import (
    PositionalHeads as PositionalHeads,
    PositionalHeadsParameters as PositionalHeadsParameters,
)
from ._rank_one import (
    RankOneFlow as RankOneFlow,
    RankOneParameters as RankOneParameters,
)
from ._symmetric_heads import SymmetricHeads as SymmetricHeads
from ._tensor_factorisation import (
    ReplicatorParameters as ReplicatorParameters,
    ScoreParameters as ScoreParameters,
    TensorFactorisation as TensorFactorisation,
)
