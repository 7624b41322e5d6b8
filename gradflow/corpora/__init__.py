"""Text as data: text → tokens → vocabulary → a chain or a sample of real contexts.

tokens = corpora.wikitext2()
vocabulary = corpora.Vocabulary.from_tokens(tokens, 100, keep=["continue"])
chain = MarkovChain.from_tokens(tokens, vocabulary, smoothing=1e-3)
sample = SampledContext(chain, vocabulary.encode(tokens), 16, examples=20_000)
"""

from ..chains import Vocabulary as Vocabulary
from ._texts import (
    read_text as read_text,
    tinystories as tinystories,
    wikitext2 as wikitext2,
)
from ._tokens import tokenise as tokenise
