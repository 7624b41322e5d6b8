"""Random seeds: an integer or a JAX key, for the generators of JAX and of NumPy."""

import dataclasses
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from . import checks
from .file_format import storable as _storable


@_storable
@dataclasses.dataclass(frozen=True)
class StoredKey:
    """A JAX key as plain data, which is hashable and fits into a run file. It seeds
    the same draws as the key."""

    implementation: str
    """The name of the key's generator, such as `"threefry2x32"`."""
    words: tuple[int, ...]

    @property
    def key(self) -> PRNGKeyArray:
        data = jnp.array(self.words, jnp.uint32)
        return jax.random.wrap_key_data(data, impl=self.implementation)

    def stored_arguments(self) -> dict[str, Any]:
        return {"implementation": self.implementation, "words": self.words}


def is_key(value: object) -> TypeGuard[PRNGKeyArray]:
    """Whether `value` is one key made by `jax.random.key`."""
    return (
        isinstance(value, jax.Array)
        and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        and value.ndim == 0
    )


def check(name: str, seed: object) -> int | PRNGKeyArray:
    """`seed`, if it is an integer of at least 0 or a JAX key."""
    if isinstance(seed, StoredKey):
        return seed.key
    if is_key(seed):
        return seed
    if isinstance(seed, jax.Array) or not isinstance(seed, int | np.integer):
        raise ValueError(
            f"`{name}` must be a whole number of at least 0 or a `jax.random.key`, got "
            f"{seed!r}."
        )
    return checks.whole_number(name, seed, least=0)


def jax_key(name: str, seed: object) -> PRNGKeyArray:
    """The JAX key that `seed` stands for."""
    seed = check(name, seed)
    return jax.random.key(seed) if isinstance(seed, int) else seed


def numpy_generator(name: str, seed: object) -> np.random.Generator:
    """The NumPy generator that `seed` stands for."""
    seed = check(name, seed)
    if isinstance(seed, int):
        return np.random.default_rng(seed)
    return np.random.default_rng(np.asarray(jax.random.key_data(seed)))


def storable(seed: int | PRNGKeyArray) -> int | StoredKey:
    """`seed` as plain data, which every function here takes for the seed itself."""
    if isinstance(seed, int):
        return seed
    words = np.asarray(jax.random.key_data(seed)).tolist()
    return StoredKey(str(jax.random.key_impl(seed)), tuple(words))
