"""The exact gradient flow of small Transformers on Markov data."""

# First of all: it decides how JAX and XLA start.
from . import _configure as _configure  # isort: split

import importlib as _importlib
import importlib.metadata as _metadata
import typing as _typing

from . import (
    corpora,
    landscape,
    solvers,
    sweeps,
)
from ._core.file_format import RunFileError
from ._integrate import (
    integrate,
    integrate_ensemble,
    resume,
    stack,
)
from ._train import (
    SequenceSampler,
    TextSampler,
    train,
)
from .analysis import (
    Acquisition,
    Comparison,
    Convergence,
    EnsembleStages,
    Event,
    Occurrence,
    Occurrences,
    Plateau,
    RankOneComparison,
    Saddle,
    Saddles,
    Stage,
    StageMedian,
    Stages,
    best_stopping_time,
    compare,
    compare_rank_one,
    converged,
    find_events,
    find_saddles,
    find_stages,
)
from .chains import HighOrderChain, MarkovChain
from .flows import (
    Certificate,
    Ensemble,
    EnsembleError,
    Flow,
    FlowError,
    Training,
)
from .models import (
    OneLayerParameters,
    OneLayerTransformer,
    PositionalHeads,
    PositionalHeadsParameters,
)
from .populations import (
    AbstractUnorderedPopulation,
    AbstractWindowPopulation,
    AllContexts,
    DrawnContexts,
    FiniteContext,
    InfiniteContext,
    Sample,
    SampledContext,
)
from .problems import (
    AbstractLoss,
    Loss,
    Problem,
    RankOneParameters,
    RankOneProblem,
    ReplicatorParameters,
    ScoreParameters,
    SymmetricHeads,
    TensorFactorisation,
)
from .sweeps import (
    StoreError,
    Sweep,
    SweepError,
    open_store,
    sweep,
)

if _typing.TYPE_CHECKING:
    from . import plotting

__version__ = _metadata.version("gradflow")


__all__ = [
    "AbstractLoss",
    "AbstractUnorderedPopulation",
    "AbstractWindowPopulation",
    "Acquisition",
    "AllContexts",
    "Certificate",
    "Comparison",
    "Convergence",
    "DrawnContexts",
    "Ensemble",
    "EnsembleError",
    "EnsembleStages",
    "Event",
    "FiniteContext",
    "Flow",
    "FlowError",
    "HighOrderChain",
    "InfiniteContext",
    "Loss",
    "MarkovChain",
    "Occurrence",
    "Occurrences",
    "OneLayerParameters",
    "OneLayerTransformer",
    "Plateau",
    "PositionalHeads",
    "PositionalHeadsParameters",
    "Problem",
    "RankOneComparison",
    "RankOneParameters",
    "RankOneProblem",
    "ReplicatorParameters",
    "RunFileError",
    "Saddle",
    "Saddles",
    "Sample",
    "SampledContext",
    "ScoreParameters",
    "SequenceSampler",
    "Stage",
    "StageMedian",
    "Stages",
    "StoreError",
    "Sweep",
    "SweepError",
    "SymmetricHeads",
    "TensorFactorisation",
    "TextSampler",
    "Training",
    "__version__",
    "best_stopping_time",
    "compare",
    "compare_rank_one",
    "converged",
    "corpora",
    "find_events",
    "find_saddles",
    "find_stages",
    "integrate",
    "integrate_ensemble",
    "landscape",
    "open_store",
    "plotting",
    "resume",
    "solvers",
    "stack",
    "sweep",
    "sweeps",
    "train",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str):
    # Namespaces that are slow to import are loaded on first use.
    if name == "plotting":
        return _importlib.import_module(".plotting", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
