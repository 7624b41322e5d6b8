"""Events that stop a flow."""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, PyTree

from .._core.ravel import Ravel

Condition = Callable[[PyTree], Any]
"""A real function of the parameters that crosses zero, or a boolean one."""


def stopping_event(ravel: Ravel, condition: Condition) -> diffrax.Event:
    """`condition` on parameters as a diffrax event on flat states."""

    def cond_fn(t: Any, y: Any, args: Any, **_: Any) -> Array:
        return jnp.asarray(condition(ravel.unravel(y)))

    # A real event is located to rounding: it deserves no less accuracy than the flow it
    # is found on. A boolean one has no root between two steps.
    value = eqx.filter_eval_shape(cond_fn, 0.0, jnp.zeros(ravel.size), None)
    if value.dtype.kind == "b":
        return diffrax.Event(cond_fn)
    return diffrax.Event(cond_fn, _Bracket(rtol=1e-14, atol=1e-300))


class _Bracket(optx.Bisection):
    """Bisection until the bracket is short, whatever the value there.

    The stock bisection also wants |value| < atol. A bound on the value needs the
    event's scale, which is unknown, and a rounded value may change its sign without
    ever being zero.
    """

    def terminate(
        self,
        fn: Any,
        y: Any,
        args: Any,
        options: dict[str, Any],
        state: Any,
        tags: frozenset[object],
    ) -> tuple[Bool[Array, ""], optx.RESULTS]:
        short = state.upper - state.lower < self.atol + self.rtol * jnp.abs(y)
        return short, optx.RESULTS.successful
