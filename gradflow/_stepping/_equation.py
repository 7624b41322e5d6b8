"""The differential equation of a flow, on a flat state."""

from typing import NamedTuple

import diffrax
import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._core.ravel import Ravel
from ..problems import AbstractLoss, descent
from ..solvers._internals import FixedStepController, ResumableController

BATCHED_NUMBERS = 2**16
"""The number of entries, over all states of a batch, that are evaluated at once.
Batching saves overhead for small states and costs memory for large ones."""
LARGEST_BATCH = 32


class Settings(NamedTuple):
    """What a flow was asked for: enough to integrate it again in the same way."""

    t1: float
    solver: str
    rtol: float
    atol: float
    step: float | None = None
    """The length of every step, for solvers with a fixed step."""


class Equation(eqx.Module):
    """θ̇ = -∇L(θ) on the flat state y, with its solver and tolerances.

    Tolerances are arrays, so that other values do not compile anew.
    """

    loss: AbstractLoss
    ravel: Ravel = eqx.field(static=True)
    solver: diffrax.AbstractSolver
    rtol: Float[Array, ""]
    atol: Float[Array, ""]
    step: Float[Array, ""] | None = None
    """The length of every step, for solvers with a fixed step."""

    @classmethod
    def of(
        cls,
        loss: AbstractLoss,
        ravel: Ravel,
        solver: diffrax.AbstractSolver,
        settings: Settings,
    ) -> "Equation":
        return cls(
            loss,
            ravel,
            solver,
            jnp.asarray(settings.rtol),
            jnp.asarray(settings.atol),
            None if settings.step is None else jnp.asarray(settings.step),
        )

    def value(self, y: Float[Array, " n"]) -> Float[Array, ""]:
        """L(y)."""
        return self.loss.in_double(self.ravel.unravel(y))

    def vector_field(
        self, t: object, y: Float[Array, " n"], args: object = None
    ) -> Float[Array, " n"]:
        """ẏ."""
        # The gradient of the pytree, ravelled: differentiating through `unravel` would
        # pad every leaf's gradient to the length of y and add them up.
        _, velocity, _ = descent(self.loss, self.ravel.unravel(y))
        return self.ravel.ravel(velocity)

    def loss_and_power(
        self, y: Float[Array, " n"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """L and -dL/dt, which is ‖∇L‖² in the loss's metric."""
        value, _, power = descent(self.loss, self.ravel.unravel(y))
        return value, power

    @property
    def batch_size(self) -> int:
        return states_at_once(self.ravel.size)

    def controller(
        self, first: Float[Array, ""] | None = None
    ) -> ResumableController | FixedStepController:
        """The step size controller, given the length of the first step if known."""
        if self.step is not None:
            return FixedStepController(self.step)
        return ResumableController(rtol=self.rtol, atol=self.atol, first=first)


def states_at_once(size: int) -> int:
    """How many states of `size` entries are evaluated together: a power of two, so that
    it divides the number of snapshots."""
    fitting = max(1, min(LARGEST_BATCH, BATCHED_NUMBERS // size))
    return 2 ** (fitting.bit_length() - 1)
