"""Points: products, lists, random draws, and which points are the same."""

import jax
import numpy as np
import pytest
import sweep_tasks

from gradflow import sweep, sweeps


def test_a_list_of_points(tmp_path, workers):
    points = [{"a": 3, "b": 1}, {"a": 1, "b": 2}, {"a": 3, "b": 1}]
    report = sweep(sweep_tasks.product, points, store=tmp_path / "s", engine=workers)
    assert report.computed == 2
    dataset = report.open()
    assert dataset.sizes["point"] == 2
    assert dataset.a.values.tolist() == [3, 1]
    assert dataset.area.values.tolist() == [3, 2]


def test_one_and_one_point_zero_are_the_same_point(tmp_path, workers):
    store = tmp_path / "s"
    sweep(sweep_tasks.product, {"a": [1, 2], "b": 1}, store=store, engine=workers)
    report = sweep(
        sweep_tasks.product,
        {"a": np.array([1.0, 2.0]), "b": 1},
        store=store,
        engine=workers,
    )
    assert report.reused == 2


def test_random_points():
    distributions = {
        "scale": sweeps.log_uniform(1e-4, 1e-1),
        "shift": sweeps.uniform(-1, 1),
        "seed": sweeps.integers(0, 10),
        "kind": ["one", "two"],
        "normal": lambda generator: generator.normal(),
    }
    points = sweeps.random_points(distributions, 500, seed=1)
    assert sweeps.random_points(distributions, 200, seed=1) == points[:200]
    fewer = sweeps.random_points({"seed": distributions["seed"]}, 500, seed=1)
    assert [p["seed"] for p in fewer] == [p["seed"] for p in points]
    assert points != sweeps.random_points(distributions, 500, seed=2)
    scales = np.log([p["scale"] for p in points])
    assert scales.min() >= np.log(1e-4)
    assert scales.max() <= np.log(1e-1)
    # The mean of 500 uniform numbers, within four standard deviations.
    spread = np.log(1e3) / np.sqrt(12 * 500)
    assert abs(scales.mean() - np.log(1e-4 * 1e-1) / 2) < 4 * spread
    assert abs(np.mean([p["shift"] for p in points])) < 4 * 2 / np.sqrt(12 * 500)
    assert {p["seed"] for p in points} == set(range(10))
    assert {p["kind"] for p in points} == {"one", "two"}


def test_random_points_of_a_key():
    distributions = {"a": sweeps.uniform(0, 1)}
    points = sweeps.random_points(distributions, 20, seed=jax.random.key(1))
    again = sweeps.random_points(distributions, 10, seed=jax.random.key(1))
    assert points[:10] == again
    assert points != sweeps.random_points(distributions, 20, seed=jax.random.key(2))
    assert len({p["a"] for p in points}) == 20


def test_a_seed_keeps_its_points():
    """Otherwise a sweep over more points would compute all of them again."""
    points = sweeps.random_points({"n": sweeps.integers(0, 1000)}, 5, seed=3)
    assert [p["n"] for p in points] == [602, 656, 247, 943, 552]


@pytest.mark.parametrize("seed", [-1, 1.5, "3", None, True])
def test_bad_seeds(seed):
    with pytest.raises(ValueError, match="`seed` must be a whole number"):
        sweeps.random_points({"a": [1, 2]}, 3, seed=seed)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sweeps.random_points({}, 3),
            "`distributions` must map at least one name",
        ),
        (
            lambda: sweeps.random_points({"a": "word"}, 3),
            r"`distributions\['a'\]` must be a function of a numpy",
        ),
        (lambda: sweeps.random_points({"a": [1]}, 0), "`count` must be a whole number"),
        (lambda: sweeps.uniform(2, 1), "`high` must be above `low` = 2, got 1"),
        (lambda: sweeps.log_uniform(0, 1), "`low` must be a positive number"),
        (lambda: sweeps.integers(3, 3), "`high` must be a whole number of at least 4"),
    ],
)
def test_bad_distributions(call, message):
    with pytest.raises(ValueError, match=message):
        call()
