"""Points drawn at random."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from .._core import checks, seeds
from .._core.checks import Checked
from .._core.types import Seed
from ._grid import Point, Value

Distribution = Callable[[np.random.Generator], Value]
"""A function that draws one value."""


def uniform(low: Checked[float], high: Checked[float]) -> Distribution:
    """The uniform distribution between `low` and `high`."""
    low, high = _bounds(low, high)
    return lambda generator: generator.uniform(low, high)


def log_uniform(low: Checked[float], high: Checked[float]) -> Distribution:
    """The distribution between `low` and `high` whose logarithm is uniform; both are
    positive."""
    low = checks.positive_number("low", low)
    low, high = _bounds(low, high)
    return lambda generator: math.exp(generator.uniform(math.log(low), math.log(high)))


def integers(low: Checked[int], high: Checked[int]) -> Distribution:
    """The uniform distribution over the whole numbers from `low` to `high - 1`."""
    low = checks.whole_number("low", low, least=-(2**63))
    high = checks.whole_number("high", high, least=low + 1)
    return lambda generator: int(generator.integers(low, high))


def _bounds(low: object, high: object) -> tuple[float, float]:
    lowest, highest = (
        float(checks.real_array(n, v)) for n, v in (("low", low), ("high", high))
    )
    if not lowest < highest:
        raise ValueError(f"`high` must be above `low` = {lowest:g}, got {highest:g}.")
    return lowest, highest


def random_points(
    distributions: Checked[Mapping[str, Distribution | Sequence[Value]]],
    count: Checked[int],
    *,
    seed: Checked[Seed] = 0,
) -> list[Point]:
    """`count` points for `sweep`, whose coordinates are drawn independently.

    A larger `count` begins with the same points, and a further name leaves the values
    of the others unchanged, so that a larger sweep computes only the new points.

    **Arguments:**

    - `distributions`: for each name one of `uniform(low, high)`,
        `log_uniform(low, high)` and `integers(low, high)`, any other function from a
        `numpy.random.Generator` to one value, or a list of values to choose from.
    - `count`: the number of points.
    - `seed`: a whole number or a `jax.random.key`.
    """
    count = checks.whole_number("count", count)
    entropy = _entropy(seed)
    if not isinstance(distributions, Mapping) or not distributions:
        raise ValueError(
            "`distributions` must map at least one name to a distribution, got "
            f"{distributions!r}."
        )
    columns = {
        name: _column(name, distribution, count, _generator(entropy, name))
        for name, distribution in distributions.items()
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _entropy(seed: object) -> list[int]:
    checked = seeds.check("seed", seed)
    if isinstance(checked, int):
        return [checked]
    return np.asarray(jax.random.key_data(checked)).ravel().tolist()


def _generator(entropy: list[int], name: object) -> np.random.Generator:
    """A generator for one name, independent of those of other names."""
    digest = hashlib.sha256(str(name).encode()).digest()
    return np.random.default_rng([*entropy, *np.frombuffer(digest, dtype=np.uint32)])


def _column(
    name: object,
    distribution: Checked[Distribution | Sequence[Value]],
    count: int,
    generator: np.random.Generator,
) -> list[Value]:
    if callable(distribution):
        return [distribution(generator) for _ in range(count)]
    if (
        isinstance(distribution, str | Mapping)
        or not isinstance(distribution, Sequence)
        or not distribution
    ):
        raise ValueError(
            f"`distributions[{name!r}]` must be a function of a numpy.random.Generator "
            f"or a list of values to choose from, got {distribution!r}."
        )
    choices = len(distribution)
    return [distribution[int(generator.integers(choices))] for _ in range(count)]
