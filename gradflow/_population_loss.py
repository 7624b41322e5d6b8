"""What all losses on a population share, whatever computes the logits."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Float, PyTree

from . import _checks
from ._checks import Checked
from ._types import AnyArray
from .populations import AbstractPopulation


class PopulationLoss(eqx.Module):
    """The cross-entropy of a population,

        L(θ) = - Σ_c w_c Σ_y T[c, y] log softmax(logits_c(θ))_y,

    as a callable on parameters, which also knows how to initialise them, how low it can
    get, what its flow conserves and what is worth watching.
    """

    population: AbstractVar[Any]
    """An `AbstractPopulation`."""

    @abstractmethod
    def logits(self, params: PyTree) -> Float[AnyArray, "contexts d"]:
        """The logits of the next token after each context."""

    @abstractmethod
    def check(self, params: PyTree) -> None:
        """Raise a `ValueError` if `params` are not parameters of this problem."""

    @abstractmethod
    def conserved_terms(self, params: PyTree) -> dict[str, AnyArray]:
        """The terms of each conserved quantity, stacked along the first axis; their
        sizes are the scale on which its drift is measured."""

    @abstractmethod
    def _random(self, seed: int, scale: float) -> PyTree:
        """Independent entries of law N(0, scale²)."""

    @abstractmethod
    def _model_observables(self) -> dict[str, Callable[[PyTree], Any]]:
        """What is worth watching beside the loss."""

    def __call__(self, params: PyTree) -> Float[AnyArray, ""]:
        return self.population.cross_entropy(jax.nn.log_softmax(self.logits(params)))

    def init(self, seed: Checked[int] = 0, scale: Checked[float] = 1e-3) -> PyTree:
        """Random parameters whose entries have standard deviation `scale`."""
        seed = _checks.whole_number("seed", seed, least=0)
        scale = _checks.positive_number("scale", scale, zero_allowed=True)
        return self._random(seed, scale)

    @property
    def floor(self) -> float:
        """A lower bound of the loss: the mean entropy of the target laws. For a
        stationary chain it is the entropy rate."""
        return float(self.population.entropy)

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
            **self._model_observables(),
        }


def check_population(population: Any) -> None:
    """Refuse what is no population."""
    if not isinstance(population, AbstractPopulation):
        raise ValueError(
            "`population` must be a gradflow population such as InfiniteContext, "
            f"got {type(population).__name__}."
        )


def _gradient_norm(loss: Callable, params: PyTree) -> Float[AnyArray, ""]:
    squares = [jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(params))]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))
