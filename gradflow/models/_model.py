"""What a `Problem` asks of a model."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
from equinox import AbstractClassVar, AbstractVar
from jaxtyping import Array, Float, Int, PyTree

from .._core.types import AnyArray, Seed


class KnownSaddle(NamedTuple):
    """What theory says of a critical point."""

    name: str
    loss: float
    rate: float
    """At which the flow leaves it."""
    index: int
    """In how many directions."""


class AbstractModel(eqx.Module):
    """Parameters, their initialisation, the map from contexts to logits, and what is
    known of it."""

    reads: AbstractClassVar[type]
    """The kind of population that the model can be trained on."""
    vocabulary: AbstractVar[int]
    """d, the number of tokens."""

    @abstractmethod
    def init(self, seed: Seed, scale: float) -> PyTree:
        """Random parameters of this scale."""

    @abstractmethod
    def check(self, params: Any) -> None:
        """Refuse parameters that are not this model's."""

    @abstractmethod
    def logits(self, params: Any, population: Any) -> Float[AnyArray, "contexts d"]:
        """The logits of the next token after each context."""

    @abstractmethod
    def sequence_logits(
        self, params: Any, tokens: Int[Array, " s"], positions: Literal["last", "all"]
    ) -> Float[Array, "predictions d"]:
        """A forward pass on one sequence of tokens: the logits of the token after each
        position that the model can predict from, seeing no later one; or after the last
        position only."""

    @property
    def least_length(self) -> int:
        """The number of tokens that the model must see to predict the next."""
        return 1

    @abstractmethod
    def conserved_terms(self, params: Any) -> dict[str, Float[AnyArray, "terms ..."]]:
        """Terms, stacked, whose sums the flow keeps constant, for any population."""

    @abstractmethod
    def observables(self, population: Any) -> dict[str, Callable[[Any], Any]]:
        """What the papers plot, each a function of the parameters."""

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The names of the axes of parameters and observables, by name."""
        return {}

    def stage_theory(
        self, population: Any
    ) -> Literal["speed", "directions", "patterns"]:
        """Which definitions name the stages of the model's flows; see
        `gradflow.problems.AbstractLoss.stage_theory`."""
        return "speed"

    def check_population(self, population: Any) -> None:
        """Refuse a population of the right kind that this model cannot read."""

    def known_saddles(self, population: Any) -> list[KnownSaddle]:
        """The saddles that theory has in closed form."""
        return []

    def symmetry_generators(self, params: Any) -> PyTree | None:
        """How `params` move, to first order, under the rotations that the loss does not
        see, one row for each; None where no such is known."""
        return None
