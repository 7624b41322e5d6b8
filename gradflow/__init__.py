"""The exact gradient flow of small Transformers on Markov data."""

# First of all: it decides how JAX and XLA start.
from . import _configure as _configure  # isort: split

import importlib as _importlib
import importlib.metadata as _metadata

from . import (
    corpora as corpora,
    landscape as landscape,
    solvers as solvers,
    sweeps as sweeps,
)
from ._core.storage import RunFileError as RunFileError
from ._integrate import (
    integrate as integrate,
    integrate_ensemble as integrate_ensemble,
    resume as resume,
    stack as stack,
)
from ._train import (
    SequenceSampler as SequenceSampler,
    TextSampler as TextSampler,
    train as train,
)
from .analysis import (
    Acquisition as Acquisition,
    Comparison as Comparison,
    Convergence as Convergence,
    Event as Event,
    Occurrence as Occurrence,
    Occurrences as Occurrences,
    Plateau as Plateau,
    RankOneComparison as RankOneComparison,
    Saddle as Saddle,
    Saddles as Saddles,
    Stage as Stage,
    Stages as Stages,
    best_stopping_time as best_stopping_time,
    compare as compare,
    compare_rank_one as compare_rank_one,
    converged as converged,
    find_events as find_events,
    find_saddles as find_saddles,
    find_stages as find_stages,
)
from .chains import HighOrderChain as HighOrderChain, MarkovChain as MarkovChain
from .flows import (
    Certificate as Certificate,
    Ensemble as Ensemble,
    EnsembleError as EnsembleError,
    Flow as Flow,
    FlowError as FlowError,
    Training as Training,
)
from .models import (
    OneLayerParameters as OneLayerParameters,
    OneLayerTransformer as OneLayerTransformer,
    PositionalHeads as PositionalHeads,
    PositionalHeadsParameters as PositionalHeadsParameters,
)
from .populations import (
    AllContexts as AllContexts,
    DrawnContexts as DrawnContexts,
    FiniteContext as FiniteContext,
    InfiniteContext as InfiniteContext,
    Population as Population,
    Positional as Positional,
    Sample as Sample,
    SampledContext as SampledContext,
)
from .problems import (
    AbstractLoss as AbstractLoss,
    Loss as Loss,
    Problem as Problem,
    RankOneParameters as RankOneParameters,
    RankOneProblem as RankOneProblem,
    ReplicatorParameters as ReplicatorParameters,
    ScoreParameters as ScoreParameters,
    SymmetricHeads as SymmetricHeads,
    TensorFactorisation as TensorFactorisation,
)
from .sweeps import (
    StoreError as StoreError,
    Sweep as Sweep,
    SweepError as SweepError,
    open_store as open_store,
    sweep as sweep,
)

__version__ = _metadata.version("gradflow")


def __getattr__(name: str):
    # Namespaces that are slow to import are loaded on first use.
    if name == "plotting":
        return _importlib.import_module(".plotting", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
