"""Types that several rooms share."""

from typing import TypeAlias

import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

AnyArray: TypeAlias = Array | np.ndarray
"""An array on the host (NumPy) or on the device (JAX)."""

Scalar: TypeAlias = Float[Array | np.ndarray, ""]
"""A real number as an array without axes."""

Seed: TypeAlias = int | PRNGKeyArray
"""What seeds a random draw: a whole number, or a key made by `jax.random.key`."""
