"""Helpers for samples of contexts, with and without positions."""

import numpy as np
from jaxtyping import Float, Int

from .._core import checks


def distinct(
    rows: Int[np.ndarray, "rows lags"],
) -> tuple[Int[np.ndarray, "distinct lags"], Int[np.ndarray, " rows"]]:
    """The distinct rows in order, and the index of each row among them."""
    # As strings of big-endian bytes, rows sort as fast as numbers and in the same
    # order.
    keys = np.ascontiguousarray(rows, dtype=">i4").view(f"V{4 * rows.shape[1]}").ravel()
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    return rows[first], which


def repetitions(value: object, size: int) -> Float[np.ndarray, " size"]:
    """How often each of `size` sequences is seen: `counts`, by default once."""
    if value is None:
        return np.ones(size)
    counts = checks.real_array("counts", value)
    if counts.shape != (size,) or np.any(counts <= 0):
        raise ValueError(
            f"`counts` must be a positive number for each of the {size} sequences, got "
            f"shape {counts.shape}"
            + (f" with {counts.min():g}." if counts.shape == (size,) else ".")
        )
    return counts
