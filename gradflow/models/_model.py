"""The interface of a model, as a `Problem` uses it."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import equinox as eqx
from equinox import AbstractVar
from jaxtyping import Array, Float, Int, PyTree

from .._core.types import AnyArray, Seed
from ..populations import AbstractPopulation

Params = TypeVar("Params")
Population = TypeVar("Population", bound=AbstractPopulation)


@dataclasses.dataclass(frozen=True)
class KnownSaddle:
    """A critical point of the loss that theory gives in closed form."""

    name: str
    loss: float
    rate: float
    """The rate at which the flow leaves it."""
    index: int
    """The number of directions in which the flow leaves it."""


class AbstractModel(eqx.Module, Generic[Params, Population]):
    """Parameters, their initialisation, the map from contexts to logits, and everything
    that is known about them."""

    vocabulary: AbstractVar[int]
    """The number of tokens, d."""

    @property
    @abstractmethod
    def reads(self) -> type[Population]:
        """The kind of population that the model can be trained on."""

    @abstractmethod
    def init(self, seed: Seed, scale: float) -> Params:
        """Random parameters of the given scale."""

    @abstractmethod
    def check(self, params: object) -> None:
        """Raise a `ValueError` if `params` are not parameters of this model."""

    @abstractmethod
    def logits(
        self, params: Params, population: Population
    ) -> Float[AnyArray, "contexts d"]:
        """The logits of the next token after each context."""

    @abstractmethod
    def sequence_logits(
        self,
        params: Params,
        tokens: Int[Array, " s"],
        positions: Literal["last", "all"],
    ) -> Float[Array, "predictions d"]:
        """A causal forward pass on one sequence of tokens: the logits of the next token
        at every position from which the model can predict, or only at the last one."""

    @property
    def least_length(self) -> int:
        """The number of tokens that the model needs in order to predict the next."""
        return 1

    @abstractmethod
    def conserved_terms(
        self, params: Params
    ) -> dict[str, Float[AnyArray, "terms ..."]]:
        """The terms of each conserved quantity, stacked along the first axis. The flow
        keeps their sums constant, for any population."""

    @abstractmethod
    def observables(self, population: Population) -> dict[str, Callable[[Params], Any]]:
        """The quantities that the papers plot, as functions of the parameters."""

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The names of the axes of parameters and observables, by name."""
        return {}

    def stage_theory(
        self, population: Population
    ) -> Literal["speed", "directions", "patterns"]:
        """Which definitions name the stages of the model's flows; see
        `gradflow.problems.AbstractLoss.stage_theory`."""
        return "speed"

    def check_population(self, population: Population) -> None:
        """Raise a `ValueError` if the model cannot read this population, although it is
        of the right kind."""

    def known_saddles(self, population: Population) -> list[KnownSaddle]:
        """The saddles that theory gives in closed form."""
        return []

    def symmetry_generators(self, params: Params) -> PyTree | None:
        """The directions in which rotations that leave the loss unchanged move
        `params`, one row each; None if no such rotations are known."""
        return None
