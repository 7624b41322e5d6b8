"""Types that several rooms share."""

import numpy as np
from jaxtyping import Array

AnyArray = Array | np.ndarray
"""On the host or on the device: NumPy's where saved, JAX's where computed."""
