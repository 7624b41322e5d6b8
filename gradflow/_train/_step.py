"""The steps of a training run, in chunks run by the same compiled functions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from .._core.compiled import compiled
from .._stepping import EnergyAccount, strongly_typed
from ..problems import AbstractLoss, Loss, Problem, descent
from ._optimiser import is_optimiser
from ._samplers import AbstractSampler

if TYPE_CHECKING:
    import optax


class State(eqx.Module):
    """The state of a training run, with the gradient that the next step takes."""

    step: Int[Array, ""]
    params: PyTree
    optimiser: PyTree
    value: Float[Array, ""]
    """The loss at `params`, on the batch if there is one."""
    gradient: PyTree
    power: Float[Array, ""]
    account: EnergyAccount
    """The balance of L(0) - L(t) against Σ η‖∇L‖²."""
    is_finite: Bool[Array, ""]
    """Whether the step after this one, which was tried, stayed finite."""


class Plan(eqx.Module):
    """Everything that a step depends on. Numbers that may change from call to call are
    arrays."""

    loss: AbstractLoss
    make: "Callable | optax.GradientTransformation"
    """An optimiser, or a function from a learning rate to one."""
    rates: Float[Array, "*steps"]
    """η, one for all steps or one for each step."""
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

    def descended(self, step: Int[Array, ""]) -> AbstractLoss:
        """The loss whose gradient is taken before this step."""
        problem, sampler = self.loss, self.sampler
        if sampler is None:
            return problem
        assert isinstance(problem, Problem)
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
        energy = self._rate(state.step) * state.power
        after = State(
            step=step,
            params=params,
            optimiser=optimiser,
            value=value,
            gradient=gradient,
            power=power,
            account=state.account.released(energy, value),
            is_finite=_all_finite((params, value, gradient)),
        )
        # The last finite state is kept.
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
        account=EnergyAccount.open(value),
        is_finite=finite,
    )
    return strongly_typed(state)


@compiled
def advance(plan: Plan, state: State, until: Int[Array, ""]) -> State:
    """Steps up to the number `until`, or as many as stay finite."""
    after = jax.lax.while_loop(
        lambda s: s.is_finite & (s.step < until), lambda s: plan.step(s), state
    )
    return strongly_typed(after)
