"""Between a pytree of arrays and one flat float64 vector."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree


def path_name(path: tuple[Any, ...], prefix: str = "") -> str:
    """A leaf's place in its pytree, as `encoder.0.weight`; empty for a lone leaf."""
    name = jtu.keystr(path, simple=True, separator=".")
    return f"{prefix}{name}" if name else ""


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves of a pytree by their places, in order."""
    leaves, _ = jtu.tree_flatten_with_path(tree)
    return {path_name(where): leaf for where, leaf in leaves}


@dataclasses.dataclass(frozen=True)
class Ravel:
    """The structure of a pytree of floating arrays, without its numbers.

    `jax.flatten_util.ravel_pytree` returns a new closure on every call, which jit takes
    for a new function and traces again. Two `Ravel`s of equal structure are equal, so
    that a solve compiled for one serves the other.
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: PyTree) -> "Ravel":
        leaves, treedef = jtu.tree_flatten(params)
        return cls(treedef, tuple(tuple(jnp.shape(leaf)) for leaf in leaves))

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def ravel(self, params: PyTree) -> Float[Array, " n"]:
        leaves = self.treedef.flatten_up_to(params)
        return jnp.concatenate([jnp.ravel(x).astype(jnp.float64) for x in leaves])

    def unravel(self, y: Float[Array, " n"]) -> PyTree:
        leaves, start = [], 0
        for shape in self.shapes:
            size = math.prod(shape)
            leaves.append(jax.lax.slice(y, (start,), (start + size,)).reshape(shape))
            start += size
        return jtu.tree_unflatten(self.treedef, leaves)
