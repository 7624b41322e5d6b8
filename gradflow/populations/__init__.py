"""What a model is trained on: weighted lists of contexts.

A population is plain arrays, one row a context c: a weight w_c, a target law T[c, ·],
and what a model sees of the context. Without a position code that is its last token i_c
and how often each token occurs in it, log n[c, ·]; with positions, the window of tokens
itself. Kinds of population differ in how they fill these arrays, never in what the
arrays mean.
"""

from ._population import AbstractPopulation as AbstractPopulation
from ._positional import (
    AllContexts as AllContexts,
    ContextsOfChain as ContextsOfChain,
    DrawnContexts as DrawnContexts,
    Positional as Positional,
    Sample as Sample,
)
from ._unordered import (
    FiniteContext as FiniteContext,
    InfiniteContext as InfiniteContext,
    Population as Population,
    SampledContext as SampledContext,
    start_law as start_law,
)
