"""Random seeds: a whole number or a JAX key, for JAX's generators and NumPy's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from . import checks


def is_key(value: Any) -> bool:
    """Whether `value` is one key made by `jax.random.key`."""
    return (
        isinstance(value, jax.Array)
        and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        and value.ndim == 0
    )


def check(name: str, seed: Any) -> int | PRNGKeyArray:
    """`seed`, if it is a whole number or a JAX key."""
    if is_key(seed):
        return seed
    if isinstance(seed, jax.Array) or not isinstance(seed, int | np.integer):
        raise ValueError(
            f"`{name}` must be a whole number of at least 0 or a `jax.random.key`, got "
            f"{seed!r}."
        )
    return checks.whole_number(name, seed, least=0)


def jax_key(name: str, seed: Any) -> PRNGKeyArray:
    """The JAX key that `seed` stands for."""
    seed = check(name, seed)
    return jax.random.key(seed) if isinstance(seed, int) else seed


def numpy_generator(name: str, seed: Any) -> np.random.Generator:
    """The NumPy generator that `seed` stands for."""
    seed = check(name, seed)
    if not isinstance(seed, int):
        return np.random.default_rng(np.asarray(jax.random.key_data(seed)))
    return np.random.default_rng(seed)


def storable(seed: int | PRNGKeyArray) -> int | np.ndarray:
    """`seed` as plain data, which `restored` turns back."""
    return seed if isinstance(seed, int) else np.asarray(jax.random.key_data(seed))


def restored(seed: Any) -> Any:
    """The seed that `storable` was given."""
    if isinstance(seed, np.ndarray) and seed.dtype == np.uint32:
        return jax.random.wrap_key_data(jnp.asarray(seed))
    return seed
