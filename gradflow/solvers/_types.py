"""Types of the arguments that diffrax passes to solvers and step size controllers."""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Real

if TYPE_CHECKING:
    RealScalar: TypeAlias = int | float | Array | np.ndarray
    BoolScalar: TypeAlias = bool | Array | np.ndarray
else:
    RealScalar: TypeAlias = Real[ArrayLike, ""]
    BoolScalar: TypeAlias = Bool[ArrayLike, ""]

DiffraxField: TypeAlias = Any
"""The type of a field that diffrax declares as an `equinox.AbstractVar`, which pyright
takes for a class variable: only a field of type `Any` may override it."""
