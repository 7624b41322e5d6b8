"""Writes `small.txt`, the text on which the corpus experiments run with `--quick`.

    python experiments/data/generate.py

Word frequencies follow Zipf's law. The next word is, with probability 0.35, one of four
words that this one favours; with probability 0.15, the word before this one; otherwise
drawn afresh. The text therefore has bigram structure, and structure that no Markov
chain has. Python's own random generator is used because its draws are the same in every
version.
"""

import random
from pathlib import Path

WORDS = tuple(
    """the . , a and to was of in it she he said had with on they for his her day big
    that little so very happy you were play up but is not saw home there friend mom dog
    went one at full tree them ball sun been continue again box cat long found rain blue
    stone""".split()  # noqa: SIM905 (a list of this many words is unreadable)
)
SIZE, SEED = 24_000, 0
FAVOURED, AGAIN = 0.35, 0.15


def text() -> str:
    draw = random.Random(SEED)
    weights = [1 / (rank + 2) for rank in range(len(WORDS))]
    favoured = {word: draw.sample(WORDS, 4) for word in WORDS}
    words = ["the", "dog"]
    for _ in range(SIZE):
        chance = draw.random()
        if chance < FAVOURED:
            words.append(draw.choice(favoured[words[-1]]))
        elif chance < FAVOURED + AGAIN:
            words.append(words[-2])
        else:
            words += draw.choices(WORDS, weights)
    lines = (" ".join(words[i : i + 12]) for i in range(0, len(words), 12))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("small.txt").write_text(text(), encoding="utf-8")
