"""Seeds: integers and JAX keys."""

import jax
import numpy as np
import pytest

from gradflow._core import file_format, seeds


def test_integers_seed_as_they_always_did():
    for seed in (0, 7, np.int64(7)):
        draw = seeds.numpy_generator("seed", seed).normal(size=3)
        np.testing.assert_array_equal(draw, np.random.default_rng(seed).normal(size=3))
        assert seeds.jax_key("seed", seed) == jax.random.key(seed)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_a_key_is_stored_and_restored(implementation, tmp_path):
    key = jax.random.fold_in(jax.random.key(3, impl=implementation), 4)
    stored = seeds.storable(key)
    assert hash(stored) == hash(seeds.storable(key))
    path = file_format.write(tmp_path / "seed.npz", {"seed": stored})
    again = file_format.read(path, lambda header: header["seed"])
    assert again == stored
    assert seeds.check("seed", again) == key
    assert seeds.check("seed", again) == key
    for seed in (stored, again):
        np.testing.assert_array_equal(
            seeds.numpy_generator("seed", seed).integers(1000, size=5),
            seeds.numpy_generator("seed", key).integers(1000, size=5),
        )


def test_keys_seed_different_draws():
    one, two = jax.random.split(jax.random.key(0))
    a, b = (seeds.numpy_generator("seed", key).normal() for key in (one, two))
    assert a != b


def test_an_integer_is_stored_as_itself():
    assert seeds.storable(5) == seeds.check("seed", 5) == 5


@pytest.mark.parametrize(
    "seed",
    [-1, 1.0, "0", None, True, jax.random.split(jax.random.key(0)), np.array([0, 1])],
    ids=repr,
)
def test_other_seeds_are_refused(seed):
    with pytest.raises(ValueError, match="`seed` must be a whole number of at least 0"):
        seeds.check("seed", seed)
