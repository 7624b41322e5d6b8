"""The cross-entropy over a population, for any map from parameters to logits."""

from abc import abstractmethod
from typing import Generic, TypeVar

import jax
import numpy as np
from equinox import AbstractVar
from jaxtyping import Array, Float, PyTree

from .._core import checks, seeds
from .._core.checks import Checked
from .._core.types import AnyArray, Seed
from ..populations import AbstractPopulation
from ._loss import AbstractLoss, Observable
from ._matrix_products import with_plain_products

Population = TypeVar("Population", bound=AbstractPopulation)


class AbstractPopulationLoss(AbstractLoss, Generic[Population]):
    """The cross-entropy over a population,

    L(θ) = - Σ_c w_c Σ_y T[c, y] log softmax(logits_c(θ))_y.
    """

    population: AbstractVar[Population]

    @abstractmethod
    def logits(self, params: PyTree) -> Float[AnyArray, "contexts d"]:
        """The logits of the next token after each context."""

    @abstractmethod
    def _random(self, seed: Seed, scale: float) -> PyTree:
        """Random parameters of the given scale."""

    @abstractmethod
    def _model_observables(self) -> dict[str, Observable]:
        """All observables except the excess loss."""

    def __call__(self, params: PyTree) -> Float[AnyArray, ""]:
        return self.population.cross_entropy(jax.nn.log_softmax(self.logits(params)))

    def value_and_grad(self, params: PyTree) -> tuple[Float[Array, ""], PyTree]:
        """L(θ) and ∇L(θ), with small matrix products in their fastest form."""
        return with_plain_products(jax.value_and_grad(self.in_double))(params)

    def init(self, seed: Checked[Seed] = 0, scale: Checked[float] = 1e-3) -> PyTree:
        """Random parameters whose entries have standard deviation `scale`.

        **Arguments:**

        - `seed`: an integer or a `jax.random.key`.
        - `scale`: the standard deviation ε.
        """
        seed = seeds.check("seed", seed)
        scale = checks.positive_number("scale", scale, zero_allowed=True)
        return self._random(seed, scale)

    @property
    def floor(self) -> float:
        """A lower bound of the loss: the mean entropy of the target distributions. For
        a stationary chain it is the entropy rate."""
        return float(self.population.entropy)

    @property
    def baselines(self) -> dict[str, float]:
        return self.population.baselines

    @property
    def token_labels(self) -> tuple[str, ...] | None:
        return self.population.token_labels

    @property
    def token_frequencies(self) -> Float[np.ndarray, " d"] | None:
        return self.population.token_frequencies

    @property
    def observables(self) -> dict[str, Observable]:
        """Functions of the parameters that describe the training, by name."""

        def excess_loss(params: PyTree) -> Float[AnyArray, ""]:
            return self(params) - self.population.entropy

        return {"excess_loss": excess_loss, **self._model_observables()}


def check_population(population: object) -> None:
    """Raise a `ValueError` if `population` is not a population."""
    if not isinstance(population, AbstractPopulation):
        raise ValueError(
            "`population` must be a gradflow population such as InfiniteContext, "
            f"got {type(population).__name__}."
        )
