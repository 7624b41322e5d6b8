"""A training in chunks of steps, all run by the same compiled functions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from .._core.compiled import compiled
from .._stepping._segments import strongly_typed
from ..problems import Loss
from ..problems._descent import descent
from ._optimiser import is_optimiser
from ._samplers import AbstractSampler

if TYPE_CHECKING:
    import optax


class State(eqx.Module):
    """Where a training stands, with the gradient that the next step takes."""

    step: Int[Array, ""]
    params: PyTree
    optimiser: PyTree
    value: Float[Array, ""]
    """The loss at `params`, of the batch if there is one."""
    gradient: PyTree
    power: Float[Array, ""]
    first: Float[Array, ""]
    """The loss at the start."""
    released: Float[Array, ""]
    """Σ η‖∇L‖² so far."""
    imbalance: Float[Array, ""]
    is_finite: Bool[Array, ""]
    """If not, the step that would have come next is not."""


class Plan(eqx.Module):
    """What a step does. Numbers that may change from call to call are arrays."""

    loss: Callable[[PyTree], Any]
    make: "Callable | optax.GradientTransformation"
    """An optimiser, or what makes one of a learning rate."""
    rates: Float[Array, "*steps"]
    """η, one for all steps or one for each."""
    sampler: AbstractSampler | None
    key: PRNGKeyArray

    @property
    def optimiser(self) -> "optax.GradientTransformationExtraArgs":
        import optax

        made: Any = self.make
        if not is_optimiser(made):
            made = made(self.rates if self.rates.ndim == 0 else self._rate)
        return optax.with_extra_args_support(made)

    def _rate(self, step: Any) -> Float[Array, ""]:
        return self.rates if self.rates.ndim == 0 else self.rates[step]

    def descended(self, step: Int[Array, ""]) -> Callable[[PyTree], Any]:
        """The loss whose gradient is taken before this step."""
        problem: Any = self.loss
        sampler = self.sampler
        if sampler is None:
            return problem
        key = jax.random.fold_in(self.key, step)
        return Loss(lambda params: sampler.loss(problem.model, params, key))

    def step(self, state: State) -> State:
        import optax

        updates, optimiser = self.optimiser.update(
            state.gradient,
            state.optimiser,
            state.params,
            value=state.value,
            grad=state.gradient,
            value_fn=self.descended(state.step),
        )
        params: Any = optax.apply_updates(state.params, updates)
        step = state.step + 1
        value, gradient, power = self.descent(params, step)
        released = state.released + self._rate(state.step) * state.power
        imbalance = jnp.abs(state.first - value - released)
        after = State(
            step=step,
            params=params,
            optimiser=optimiser,
            value=value,
            gradient=gradient,
            power=power,
            first=state.first,
            released=released,
            imbalance=jnp.maximum(state.imbalance, imbalance),
            is_finite=_all_finite((params, value, gradient)),
        )
        # The last state whose numbers are finite stays.
        kept = jax.tree.map(
            lambda new, old: jnp.where(after.is_finite, new, old), after, state
        )
        return eqx.tree_at(lambda s: s.is_finite, kept, after.is_finite)

    def descent(
        self, params: PyTree, step: Int[Array, ""]
    ) -> tuple[Float[Array, ""], PyTree, Float[Array, ""]]:
        """The loss, its gradient in the loss's own metric, and ‖∇L‖²."""
        value, velocity, power = descent(self.descended(step), params)
        return value, jax.tree.map(jnp.negative, velocity), power


def _all_finite(tree: PyTree) -> Bool[Array, ""]:
    leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves))


@compiled
def start(plan: Plan, params: PyTree) -> State:
    zero = jnp.zeros((), jnp.float64)
    step = jnp.zeros((), jnp.int64)
    value, gradient, power = plan.descent(params, step)
    finite = _all_finite((value, gradient))
    state = State(
        step=step,
        params=params,
        optimiser=plan.optimiser.init(params),
        value=value,
        gradient=gradient,
        power=power,
        first=value,
        released=zero,
        imbalance=zero,
        is_finite=finite,
    )
    return strongly_typed(state)


@compiled
def advance(plan: Plan, state: State, until: Int[Array, ""]) -> State:
    """So many steps, or as many as stay finite."""
    after = jax.lax.while_loop(
        lambda s: s.is_finite & (s.step < until), lambda s: plan.step(s), state
    )
    return strongly_typed(after)
