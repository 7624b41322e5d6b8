"""The meaning of a flow: its stages, saddles, events and comparisons."""

from ._compare import Comparison as Comparison, compare as compare
from ._converged import Convergence as Convergence, converged as converged
from ._events import (
    Event as Event,
    Occurrence as Occurrence,
    Occurrences as Occurrences,
    find_events as find_events,
)
from ._rank_one_comparison import (
    RankOneComparison as RankOneComparison,
    compare_rank_one as compare_rank_one,
)
from ._saddles import Saddle as Saddle, Saddles as Saddles, find_saddles as find_saddles
from ._stopping import best_stopping_time as best_stopping_time
from .stages import (
    Acquisition as Acquisition,
    EnsembleStages as EnsembleStages,
    Plateau as Plateau,
    Stage as Stage,
    StageMedian as StageMedian,
    Stages as Stages,
    find_stages as find_stages,
)
