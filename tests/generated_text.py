"""A generated text for tests that need tokens of a language."""

import numpy as np

from gradflow.corpora import tokenise


def generated_text(sentences=400, seed=0):
    """A few kilobytes of English-like sentences over some forty tokens."""
    rng = np.random.default_rng(seed)
    names = ["Ann", "Ben", "cat", "dog", "bird", "fox", "child", "king"]
    verbs = ["saw", "found", "liked", "chased", "fed", "lost"]
    adjectives = ["small", "old", "red", "happy", "quiet"]
    places = ["park", "garden", "house", "river", "hill"]

    def pick(words):
        # Unequal frequencies, as in a language.
        weights = 1 / np.arange(1, len(words) + 1)
        return words[rng.choice(len(words), p=weights / weights.sum())]

    lines = []
    for _ in range(sentences):
        line = f"the {pick(adjectives)} {pick(names)} {pick(verbs)} a {pick(names)}"
        if rng.random() < 0.4:
            line += f", and then it {pick(verbs)} the {pick(names)}"
        if rng.random() < 0.5:
            line += f" in the {pick(places)}"
        lines.append(line + ("!" if rng.random() < 0.2 else "."))
    return "\n".join(lines) + "\n"


TEXT = generated_text()
TOKENS = tokenise(TEXT)
