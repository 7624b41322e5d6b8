"""Populations: weighted lists of contexts, the data that models are trained on.

A population is plain arrays with one row for each context c: a weight w_c, the
distribution T[c, ·] of the next token, and the part of the context that a model sees.
Without positions that is its last token i_c and how often each token occurs in it,
log n[c, ·]; with positions it is the window of tokens itself. Kinds of population
differ in how they fill these arrays, never in how a model reads them.
"""

from ._finite_context import FiniteContext as FiniteContext
from ._population import (
    AbstractDensePopulation as AbstractDensePopulation,
    AbstractPopulation as AbstractPopulation,
)
from ._sampled_context import SampledContext as SampledContext
from ._unordered import (
    AbstractDenseUnorderedPopulation as AbstractDenseUnorderedPopulation,
    AbstractUnorderedPopulation as AbstractUnorderedPopulation,
    InfiniteContext as InfiniteContext,
    start_law as start_law,
)
from ._windows import (
    AbstractChainWindows as AbstractChainWindows,
    AbstractWindowPopulation as AbstractWindowPopulation,
    AllContexts as AllContexts,
    DrawnContexts as DrawnContexts,
    Sample as Sample,
)
