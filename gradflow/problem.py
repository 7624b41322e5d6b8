"""A model on a population: the loss whose flow is integrated."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PyTree

from . import _checks
from ._checks import Checked
from ._storage import storable
from ._types import AnyArray
from .models import OneLayerTransformer
from .populations import Population


@storable
class Problem(eqx.Module):
    """The population loss of a model,

        L(θ) = - Σ_c w_c Σ_y T[c, y] log softmax(logits_c(θ))_y,

    as a callable on the model's parameters, which also knows how to initialise them,
    how low it can get, what its flow conserves and what is worth watching.
    """

    model: Checked[OneLayerTransformer]
    population: Checked[Population]

    def __check_init__(self):
        if not isinstance(self.population, Population):
            raise ValueError(
                "`population` must be a gradflow population such as InfiniteContext, "
                f"got {type(self.population).__name__}."
            )
        if not isinstance(self.model, OneLayerTransformer):
            raise ValueError(
                "`model` must be a gradflow model such as OneLayerTransformer, got "
                f"{type(self.model).__name__}."
            )
        if self.model.vocabulary != self.population.vocabulary:
            raise ValueError(
                f"`model` has a vocabulary of {self.model.vocabulary} tokens and "
                f"`population` one of {self.population.vocabulary}."
            )

    def __call__(self, params: PyTree) -> Float[AnyArray, ""]:
        log_law = jax.nn.log_softmax(self.model.logits(params, self.population))
        losses = -jnp.sum(self.population.targets * log_law, axis=1)
        return self.population.weights @ losses

    def init(self, seed: Checked[int] = 0, scale: Checked[float] = 1e-3) -> PyTree:
        """Random parameters whose entries have standard deviation `scale`."""
        seed = _checks.whole_number("seed", seed, least=0)
        scale = _checks.positive_number("scale", scale, zero_allowed=True)
        return self.model.init(seed, scale)

    def check(self, params: PyTree) -> None:
        """Raise a `ValueError` if `params` are not parameters of this problem."""
        self.model.check(params)

    @property
    def floor(self) -> float:
        """A lower bound of the loss: the mean entropy of the target laws. For a
        stationary chain it is the entropy rate."""
        return float(self.population.entropy)

    def conserved_terms(self, params: PyTree) -> dict[str, AnyArray]:
        """The terms of each conserved quantity, stacked along the first axis; their
        sizes are the scale on which its drift is measured."""
        return self.model.conserved_terms(params)

    def conserved(self, params: PyTree) -> dict[str, Float[AnyArray, "..."]]:
        """The quantities that the exact flow keeps constant, by name."""
        terms = self.conserved_terms(params)
        return {name: jnp.sum(stack, axis=0) for name, stack in terms.items()}

    @property
    def observables(self) -> dict[str, Callable[[PyTree], Float[AnyArray, "..."]]]:
        """Functions of the parameters that show what training does, by name."""
        return {
            "loss": self,
            "excess_loss": lambda params: self(params) - self.population.entropy,
            "speed": partial(_gradient_norm, self),
            **self.model.observables(self.population),
        }

    def stored_arguments(self) -> dict[str, Any]:
        return {"model": self.model, "population": self.population}


def _gradient_norm(loss: Callable, params: PyTree) -> Float[AnyArray, ""]:
    squares = [jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(params))]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))
