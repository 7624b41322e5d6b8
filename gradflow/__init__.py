"""The exact gradient flow of small Transformers on Markov data."""

import importlib
import importlib.metadata

import jax

from ._xla import compile_small_loops_whole

compile_small_loops_whole()

# The flow is meaningless in single precision: squares of the initial scale, splits of
# frequencies and conserved quantities drown in its rounding.
jax.config.update("jax_enable_x64", True)

from . import (  # noqa: E402
    corpora as corpora,
    landscape as landscape,
    solvers as solvers,
    sweeps as sweeps,
)
from ._certificate import Certificate as Certificate  # noqa: E402
from ._compare import Comparison as Comparison, compare as compare  # noqa: E402
from ._converged import Convergence as Convergence, converged as converged  # noqa: E402
from ._ensemble import (  # noqa: E402
    Ensemble as Ensemble,
    EnsembleError as EnsembleError,
)
from ._events import (  # noqa: E402
    Event as Event,
    Occurrence as Occurrence,
    Occurrences as Occurrences,
    find_events as find_events,
)
from ._flow import Flow as Flow, FlowError as FlowError  # noqa: E402
from ._integrate import integrate as integrate  # noqa: E402
from ._integrate_ensemble import (  # noqa: E402
    integrate_ensemble as integrate_ensemble,
    stack as stack,
)
from ._rank_one_comparison import (  # noqa: E402
    RankOneComparison as RankOneComparison,
    compare_rank_one as compare_rank_one,
)
from ._resume import resume as resume  # noqa: E402
from ._stopping import best_stopping_time as best_stopping_time  # noqa: E402
from ._storage import RunFileError as RunFileError  # noqa: E402
from ._train import train as train  # noqa: E402
from .chains import (  # noqa: E402
    HighOrderChain as HighOrderChain,
    MarkovChain as MarkovChain,
)
from .models import (  # noqa: E402
    OneLayerParameters as OneLayerParameters,
    OneLayerTransformer as OneLayerTransformer,
    PositionalHeads as PositionalHeads,
    PositionalHeadsParameters as PositionalHeadsParameters,
    RankOneFlow as RankOneFlow,
    RankOneParameters as RankOneParameters,
    ReplicatorParameters as ReplicatorParameters,
    ScoreParameters as ScoreParameters,
    SymmetricHeads as SymmetricHeads,
    TensorFactorisation as TensorFactorisation,
)
from .populations import (  # noqa: E402
    AllContexts as AllContexts,
    DrawnContexts as DrawnContexts,
    FiniteContext as FiniteContext,
    InfiniteContext as InfiniteContext,
    Population as Population,
    Positional as Positional,
    Sample as Sample,
    SampledContext as SampledContext,
)
from .problem import Problem as Problem  # noqa: E402
from .saddles import (  # noqa: E402
    Saddle as Saddle,
    Saddles as Saddles,
    visited_saddles as visited_saddles,
)
from .samplers import (  # noqa: E402
    SequenceSampler as SequenceSampler,
    TextSampler as TextSampler,
)
from .stages import (  # noqa: E402
    Acquisition as Acquisition,
    Plateau as Plateau,
    Stage as Stage,
    Stages as Stages,
    find_stages as find_stages,
)
from .sweeps import (  # noqa: E402
    StoreError as StoreError,
    Sweep as Sweep,
    SweepError as SweepError,
    open_store as open_store,
    sweep as sweep,
)

__version__ = importlib.metadata.version("gradflow")


def __getattr__(name: str):
    # Namespaces that cost an import are loaded on first use.
    if name == "plotting":
        return importlib.import_module(".plotting", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
