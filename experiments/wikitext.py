"""Experiment 24: WikiText-2 as a Markov chain, d = 100 and d = 1,000.

The bigrams of WikiText-2's d - 1 most frequent tokens, and `<unk>` for the rest, define
a chain (π, P). The flow θ̇ = -∇L(θ) is that of the one-layer Transformer with infinite
context, from entries N(0, ε²), ε = 1e-3.

We look for the stages of *Focus and Dilution*, and for the four phases that the paper
reports in the attention of the mid-frequency token `continue`: diffuse, on white space,
diffuse again, on itself. Attention counts as diffuse while it is spread over at least
half as many keys, exp(entropy), as at the start, and otherwise as on the key that gets
most of it.

Claims. L(0) = log d; every query's attention starts at π, with entropy H(π); W0
condenses at rate ‖π‖·‖π - 1/d‖; the energy balances, and conserved quantities do not
drift.
"""

from pathlib import Path

from _common import Measurement, run
from _corpus import Corpus, Size, draw, measured

from gradflow import corpora

WIKITEXT = Corpus("WikiText-2", corpora.wikitext2, "wikitext-2", ("continue",), "<unk>")
SIZES = (Size(100, 32, 6000.0), Size(1000, 64, 3000.0))
QUICK = (Size(20, 8, 3000.0),)


def measure(quick: bool, out: Path) -> Measurement:
    return measured(WIKITEXT, quick, QUICK if quick else SIZES, out)


if __name__ == "__main__":
    run(__doc__, measure, draw, keeps=True)
