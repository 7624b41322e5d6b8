"""Sources of tokens: Markov chains of first and of higher order."""

from ._high_order import HighOrderChain as HighOrderChain
from ._markov import MarkovChain as MarkovChain
from ._vocabulary import Vocabulary as Vocabulary
