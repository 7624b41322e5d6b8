"""The exact gradient flow of small Transformers on Markov data."""

import importlib
import importlib.metadata

import jax

# The flow is meaningless in single precision: squares of the initial scale, splits of
# frequencies and conserved quantities drown in its rounding.
jax.config.update("jax_enable_x64", True)

from . import landscape as landscape, solvers as solvers  # noqa: E402
from ._certificate import Certificate as Certificate  # noqa: E402
from ._converged import Convergence as Convergence, converged as converged  # noqa: E402
from ._flow import Flow as Flow, FlowError as FlowError  # noqa: E402
from ._integrate import integrate as integrate  # noqa: E402
from ._storage import RunFileError as RunFileError  # noqa: E402
from .chains import MarkovChain as MarkovChain  # noqa: E402
from .models import (  # noqa: E402
    OneLayerParameters as OneLayerParameters,
    OneLayerTransformer as OneLayerTransformer,
)
from .populations import (  # noqa: E402
    FiniteContext as FiniteContext,
    InfiniteContext as InfiniteContext,
    Population as Population,
)
from .problem import Problem as Problem  # noqa: E402

__version__ = importlib.metadata.version("gradflow")


def __getattr__(name: str):
    # Namespaces that cost an import are loaded on first use.
    if name == "plotting":
        return importlib.import_module(".plotting", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
