"""The members of an ensemble: what differs between them, and what they share."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from .._core import checks
from .._core.checks import Checked
from ..problems import AbstractLoss, as_loss


def stack(params: Checked[Sequence[PyTree]]) -> PyTree:
    """Stack a list of parameters, one for each member, along a leading axis."""
    if not isinstance(params, Sequence) or isinstance(params, str) or not params:
        raise ValueError(
            "`params` must be a list of parameters, one for each member, got "
            f"{params!r}."
        )
    kinds = [jax.tree.map(np.shape, one) for one in params]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                "`params` must have one structure with arrays of the same shapes, but "
                f"params[{i}] has {kind} and params[0] has {kinds[0]}."
            )
    return jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *params)


def number_of_members(params_batch: PyTree) -> int:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params_batch)]
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "`params_batch` must have a leading axis of members, of one length, in "
            "every array (`gradflow.stack` makes one from a list), got shapes "
            f"{shapes}."
        )
    return sizes.pop()


def horizons(t1: Any, size: int) -> Float[np.ndarray, " members"]:
    """The horizon of each member, from one for all or one for each."""
    if np.ndim(t1) == 0:
        return np.full(size, checks.positive_number("t1", t1))
    ends = checks.real_array("t1", t1)
    if ends.shape != (size,) or np.any(ends <= 0):
        raise ValueError(
            f"`t1` must be a positive number, or one for each of the {size} members, "
            f"got {t1!r}."
        )
    return ends


def starts(params_batch: PyTree, size: int) -> Float[np.ndarray, "members n"]:
    """The flat states from which the members start."""
    # What `Ravel.ravel` does, for all members at once.
    leaves = [np.reshape(leaf, (size, -1)) for leaf in jax.tree.leaves(params_batch)]
    y0 = np.concatenate(leaves, axis=1, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(y0).all(axis=1))
    if bad.size:
        raise ValueError(
            f"`params_batch` must be finite, but member {bad[0]} is not"
            f"{f' ({bad.size} in all)' if bad.size > 1 else ''}."
        )
    return y0


def member(params_batch: PyTree, i: int) -> PyTree:
    return jax.tree.map(lambda leaf: np.asarray(leaf[i]), params_batch)


def one_for_each(loss: Any, size: int) -> list[AbstractLoss]:
    """The losses: one for all members, or one for each, of the same kind."""
    if not isinstance(loss, list | tuple):
        return [as_loss(loss)]
    if len(loss) != size:
        raise ValueError(
            f"`loss` must be one loss, or one for each of the {size} members of "
            f"`params_batch`, got {len(loss)}."
        )
    losses = [as_loss(one) for one in loss]
    for i, other in enumerate(losses[1:]):
        _same_kind(losses[0], other, i + 1)
    return losses


def _is_number_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.generic)


def _same_kind(first: AbstractLoss, other: AbstractLoss, i: int) -> None:
    arrays, rest = eqx.partition(first, _is_number_array)
    others, other_rest = eqx.partition(other, _is_number_array)
    shapes, other_shapes = (
        [(np.shape(x), np.asarray(x).dtype) for x in jax.tree.leaves(a)]
        for a in (arrays, others)
    )
    if not eqx.tree_equal(rest, other_rest) or shapes != other_shapes:
        raise ValueError(
            "`loss` must list losses of one structure, with arrays of the same shapes, "
            "so that one compilation serves all, but the loss of member "
            f"{i} differs from that of member 0. (Two functions always differ: put "
            "what varies into arrays of a `jax.tree_util.Partial` or an "
            "`equinox.Module`.)"
        )


def stacked(losses: list[AbstractLoss]) -> tuple[PyTree, PyTree]:
    """The parts that all losses share, and the arrays that vary, stacked."""
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
