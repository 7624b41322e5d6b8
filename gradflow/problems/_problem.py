"""The loss of a model on a population."""

from typing import Any

from jaxtyping import Float, PyTree

from .._core.checks import Checked
from .._core.file_format import storable
from .._core.types import AnyArray, Seed
from ..models import AbstractModel, KnownSaddle
from ..populations import AbstractPopulation, AbstractUnorderedPopulation
from ._loss import Observable, StageTheory
from ._population_loss import AbstractPopulationLoss, check_population


@storable
class Problem(AbstractPopulationLoss[Any]):
    """The population loss of a model,

        L(θ) = - Σ_c w_c Σ_y T[c, y] log softmax(logits_c(θ))_y,

    as a callable on the model's parameters. It also knows how to initialise them, its
    lower bound, the quantities that its flow conserves, and its observables.
    """

    # `Any`, since users read attributes that only some kinds of model and population
    # have (`problem.model.width`, `problem.population.chain`).
    model: Any
    """An `AbstractModel`."""
    population: Any
    """An `AbstractPopulation` of the kind that the model reads."""

    # Written out because type checkers put the field of the base class first.
    def __init__(
        self,
        model: Checked[AbstractModel],
        population: Checked[AbstractPopulation],
    ):
        self.model = model
        self.population = population

    def __check_init__(self):
        check_population(self.population)
        if not isinstance(self.model, AbstractModel):
            raise ValueError(
                "`model` must be a gradflow model such as OneLayerTransformer, got "
                f"{type(self.model).__name__}."
            )
        if not isinstance(self.population, self.model.reads):
            unordered = issubclass(self.model.reads, AbstractUnorderedPopulation)
            raise ValueError(
                f"`population` must be one {'without' if unordered else 'with'} "
                f"positions for a {type(self.model).__name__}, got "
                f"{type(self.population).__name__}."
            )
        if self.model.vocabulary != self.population.vocabulary:
            raise ValueError(
                "`model` and `population` must have the same tokens: `model` has a "
                f"vocabulary of {self.model.vocabulary} tokens and `population` one of "
                f"{self.population.vocabulary}."
            )
        self.model.check_population(self.population)

    def logits(self, params: PyTree) -> Float[AnyArray, "contexts d"]:
        return self.model.logits(params, self.population)

    @property
    def known_saddles(self) -> list[KnownSaddle]:
        """The saddles of this loss that theory gives in closed form."""
        return self.model.known_saddles(self.population)

    def symmetry_generators(self, params: PyTree) -> PyTree | None:
        """The directions in which the known symmetries of the loss move `params`, one
        row each; None if no symmetry is known."""
        return self.model.symmetry_generators(params)

    def check(self, params: PyTree) -> None:
        """Raise a `ValueError` if `params` are not parameters of this problem."""
        self.model.check(params)

    def conserved_terms(self, params: PyTree) -> dict[str, AnyArray]:
        """The terms of each conserved quantity, stacked along the first axis; their
        sizes are the scale on which its drift is measured."""
        return self.model.conserved_terms(params)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return self.model.axes

    @property
    def stage_theory(self) -> StageTheory:
        return self.model.stage_theory(self.population)

    def _random(self, seed: Seed, scale: float) -> PyTree:
        return self.model.init(seed, scale)

    def _model_observables(self) -> dict[str, Observable]:
        known = self.model.observables(self.population)
        source = self.population.sampled_from
        if source is None:
            return known
        # A sample is judged by the population that it was drawn from.
        whole = Problem(self.model, source)
        return known | self.model.observables(source) | {"population_loss": whole}

    def stored_arguments(self) -> dict[str, Any]:
        return {"model": self.model, "population": self.population}
