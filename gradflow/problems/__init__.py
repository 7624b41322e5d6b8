"""Losses, and everything that is known about them."""

from ..models import KnownSaddle as KnownSaddle
from ._descent import descent as descent
from ._loss import (
    RESERVED_NAMES as RESERVED_NAMES,
    AbstractLoss as AbstractLoss,
    Loss as Loss,
    NamedObservable as NamedObservable,
    Observable as Observable,
    UnknownLoss as UnknownLoss,
    as_loss as as_loss,
    checked_loss as checked_loss,
)
from ._problem import Problem as Problem
from ._rank_one import (
    RankOneParameters as RankOneParameters,
    RankOneProblem as RankOneProblem,
)
from ._recorded import chosen_observables as chosen_observables
from ._symmetric_heads import SymmetricHeads as SymmetricHeads
from ._tensor_factorisation import (
    ReplicatorParameters as ReplicatorParameters,
    ScoreParameters as ScoreParameters,
    TensorFactorisation as TensorFactorisation,
)
