"""The observables to record along a flow."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._core import checks
from ._loss import RESERVED_NAMES, AbstractLoss, Observable

LARGEST_DEFAULT_OBSERVABLE = 2**16
"""The number of entries at one time above which an observable is recorded only if it
is asked for by name."""


class _AllObservables(eqx.Module):
    loss: AbstractLoss

    def __call__(self, params: PyTree) -> dict[str, PyTree]:
        return {name: f(params) for name, f in self.loss.observables.items()}


def chosen_observables(
    loss: AbstractLoss, params: PyTree, observables: Any
) -> tuple[tuple[str, ...], dict[str, Observable]]:
    """The names among the loss's own observables, and the functions of the user."""
    if observables is None:
        shapes = checks.shape_of_result(_AllObservables(loss), params)
        sizes = {
            name: sum(leaf.size for leaf in jax.tree.leaves(shape))
            for name, shape in shapes.items()
        }
        return tuple(k for k, n in sizes.items() if n <= LARGEST_DEFAULT_OBSERVABLE), {}
    if isinstance(observables, Mapping):
        named = checks.named_functions("observables", observables, RESERVED_NAMES)
        for name, function in named.items():
            _check_observable(name, function, params)
        return (), named
    if not isinstance(observables, Iterable):
        raise ValueError(
            "`observables` must map names to functions of the parameters, or list "
            f"names of the loss's own, got {observables!r}."
        )
    known = loss.observables
    names = (observables,) if isinstance(observables, str) else tuple(observables)
    for name in names:
        if name not in known:
            raise ValueError(
                f"`observables` must name observables of the loss "
                f"({', '.join(known) or 'it has none'}), got {name!r}."
            )
    return names, {}


def _check_observable(
    name: str, function: Callable[[PyTree], Any], params: PyTree
) -> None:
    value = checks.traced_result(f"observables[{name!r}]", function, params)
    leaves = jax.tree.leaves(value)
    if not leaves or any(leaf.dtype.kind not in "fiub" for leaf in leaves):
        raise ValueError(
            f"`observables[{name!r}]` must return real numbers, got {value!r}."
        )
