"""Points drawn at random."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._core import checks
from .._core.checks import Checked
from ._grid import Point, Value

Law = Callable[[np.random.Generator], Any]


def uniform(low: Checked[float], high: Checked[float]) -> Law:
    """Numbers between `low` and `high`, all equally likely."""
    low, high = _bounds(low, high)
    return lambda generator: generator.uniform(low, high)


def log_uniform(low: Checked[float], high: Checked[float]) -> Law:
    """Positive numbers between `low` and `high`, whose logarithm is uniform."""
    low = checks.positive_number("low", low)
    low, high = _bounds(low, high)
    return lambda generator: math.exp(generator.uniform(math.log(low), math.log(high)))


def integers(low: Checked[int], high: Checked[int]) -> Law:
    """Whole numbers from `low` to below `high`, all equally likely."""
    low = checks.whole_number("low", low, least=-(2**63))
    high = checks.whole_number("high", high, least=low + 1)
    return lambda generator: int(generator.integers(low, high))


def _bounds(low: Any, high: Any) -> tuple[float, float]:
    low, high = (
        float(checks.real_array(n, v)) for n, v in (("low", low), ("high", high))
    )
    if not low < high:
        raise ValueError(f"`high` must be above `low` = {low:g}, got {high:g}.")
    return low, high


def random_points(
    laws: Checked[Mapping[str, Law | Sequence[Value]]],
    count: Checked[int],
    *,
    seed: Checked[int] = 0,
) -> list[Point]:
    """`count` points whose coordinates are drawn independently, for `sweep`.

    More points begin with the same points, and a further name changes nothing of the
    others, so that a sweep over more of them computes only what is new.

    **Arguments:**

    - `laws`: for each name `uniform(low, high)`, `log_uniform(low, high)`,
        `integers(low, high)`, any other function of a `numpy.random.Generator` that
        returns one value, or a list of values to choose from.
    - `count`: the number of points.
    - `seed`: of all that is random here.
    """
    count = checks.whole_number("count", count)
    seed = checks.whole_number("seed", seed, least=0)
    if not isinstance(laws, Mapping) or not laws:
        raise ValueError(
            f"`laws` must map at least one name to the law of its values, got {laws!r}."
        )
    columns = {
        name: _column(name, law, count, _generator(seed, name))
        for name, law in laws.items()
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _generator(seed: int, name: Any) -> np.random.Generator:
    digest = hashlib.sha256(str(name).encode()).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest, dtype=np.uint32)])


def _column(name: Any, law: Any, count: int, generator: np.random.Generator) -> list:
    if callable(law):
        return [law(generator) for _ in range(count)]
    if isinstance(law, str | Mapping) or not isinstance(law, Sequence) or not law:
        raise ValueError(
            f"`laws[{name!r}]` must be a law or a list of values to choose from, got "
            f"{law!r}."
        )
    return [law[int(generator.integers(len(law)))] for _ in range(count)]
