"""The members of an ensemble: what each has of its own, and what they share."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .._core.checks import Checked


def stack(params: Checked[Sequence[PyTree]]) -> PyTree:
    """Parameters of several members as one, with a leading axis of members."""
    if not isinstance(params, Sequence) or isinstance(params, str) or not params:
        raise ValueError(
            "`params` must be a list of parameters, one for each member, got "
            f"{params!r}."
        )
    kinds = [jax.tree.map(np.shape, one) for one in params]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                "`params` must be of one structure with arrays of the same shapes, but "
                f"params[{i}] has {kind}, and params[0] {kinds[0]}."
            )
    return jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *params)


def number_of_members(params_batch: PyTree) -> int:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params_batch)]
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "`params_batch` must have a leading axis of members, of one length, in "
            f"every array (`gradflow.stack` makes it of a list), got shapes {shapes}."
        )
    return sizes.pop()


def member(params_batch: PyTree, i: int) -> PyTree:
    return jax.tree.map(lambda leaf: np.asarray(leaf[i]), params_batch)


def one_for_each(problem: Any, size: int) -> list[Any]:
    """The losses: one for all members, or one for each."""
    if not isinstance(problem, list | tuple):
        return [problem]
    if len(problem) != size:
        raise ValueError(
            f"`problem` must be one loss, or one for each of the {size} members of "
            f"`params_batch`, got {len(problem)}."
        )
    return list(problem)


def _is_number_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.generic)


def same_kind(first: Any, other: Any, i: int) -> None:
    arrays, rest = eqx.partition(first, _is_number_array)
    others, other_rest = eqx.partition(other, _is_number_array)
    shapes, other_shapes = (
        [(np.shape(x), np.asarray(x).dtype) for x in jax.tree.leaves(a)]
        for a in (arrays, others)
    )
    if not eqx.tree_equal(rest, other_rest) or shapes != other_shapes:
        raise ValueError(
            "`problem` must list losses of one structure, with arrays of the same "
            f"shapes, so that one compilation serves all, but that of member {i} is of "
            "another than that of member 0. (Each function is of its own: what varies "
            "goes into arrays of a `jax.tree_util.Partial` or an `equinox.Module`.)"
        )


def stacked(losses: list[Any]) -> tuple[PyTree, PyTree]:
    """What the losses share, and what varies, stacked."""
    arrays = [eqx.filter(loss, _is_number_array) for loss in losses]

    def is_shared(*leaves: Any) -> bool:
        return all(np.array_equal(leaves[0], leaf) for leaf in leaves[1:])

    shared = jax.tree.map(is_shared, *arrays)
    stays = eqx.partition(losses[0], _is_number_array)[1]
    common = jax.tree.map(lambda same, x: x if same else None, shared, arrays[0])
    varying = jax.tree.map(
        lambda same, *x: None if same else np.stack(x), shared, *arrays
    )
    return eqx.combine(stays, common), varying
