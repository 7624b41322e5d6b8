"""Experiment 25: TinyStories as a Markov chain, d = 100 and d = 1,000.

The same as experiment 24, on the bigrams of words and punctuation marks of TinyStories
and with the paper's inputs `the`, `,`, `a`, `full` and `been`: over how many keys,
exp(entropy), each spreads its attention, and on which key it comes to rest.
"""

from pathlib import Path

from _common import Measurement, run
from _corpus import Corpus, Size, draw, measured

from gradflow import corpora

TINYSTORIES = Corpus(
    "TinyStories",
    corpora.tinystories,
    "tinystories",
    ("the", ",", "a", "full", "been"),
)
SIZES = (Size(100, 32, 6000.0), Size(1000, 64, 3000.0))
QUICK = (Size(20, 8, 3000.0),)


def measure(quick: bool, out: Path) -> Measurement:
    return measured(TINYSTORIES, quick, QUICK if quick else SIZES, out)


if __name__ == "__main__":
    run(__doc__, measure, draw, keeps=True)
