"""The Loss protocol: what a loss may know about itself, written down once."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core import checks
from .._core.checks import Checked
from .._core.types import AnyArray, Scalar, Seed
from ..models import KnownSaddle

Observable = Callable[[PyTree], PyTree]
"""A function of the parameters that returns an array or a pytree of arrays."""

StageTheory = Literal["speed", "directions", "patterns"]

RESERVED_NAMES = ("ts", "loss", "speed")
"""Names that every flow uses itself and that no observable may have."""


class AbstractLoss(eqx.Module):
    """A loss L(θ) and what is known about its gradient flow.

    A subclass must define `__call__`. Every other member has a default that means
    "nothing is known", so that the rest of the library never has to ask whether a loss
    has it. A plain function becomes a `Loss` where it enters the library.
    """

    @abstractmethod
    def __call__(self, params: PyTree) -> Scalar:
        """L(θ), a real scalar."""

    def init(self, seed: Checked[Seed] = 0, scale: Checked[float] = 1e-3) -> PyTree:
        """Random initial parameters of the given scale."""
        raise ValueError(
            f"{type(self).__name__} does not know how to initialise its parameters: "
            "pass them to `gradflow.integrate` yourself."
        )

    def check(self, params: PyTree) -> None:
        """Raise a `ValueError` if `params` are not parameters of this loss."""

    @property
    def floor(self) -> float | None:
        """A lower bound of the loss."""
        return None

    @property
    def baselines(self) -> dict[str, float]:
        """The losses of simple predictors, by name, to compare the loss with."""
        return {}

    @property
    def observables(self) -> dict[str, Observable]:
        """Functions of the parameters that are worth watching, by name."""
        return {}

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The names of the axes of observables and parameters, by name."""
        return {}

    @property
    def token_labels(self) -> tuple[str, ...] | None:
        """The labels of the tokens, along the axes `token`, `query` and `key`."""
        return None

    @property
    def token_frequencies(self) -> Float[np.ndarray, " d"] | None:
        """How frequent each token is."""
        return None

    def conserved_terms(self, params: PyTree) -> dict[str, AnyArray]:
        """The terms of each conserved quantity, stacked along the first axis. Their
        sum is conserved; their size is the scale on which its drift is measured."""
        return {}

    def conserved(self, params: PyTree) -> dict[str, Float[AnyArray, "..."]]:
        """The quantities that the exact flow conserves, by name."""
        terms = self.conserved_terms(params)
        return {name: jnp.sum(stack, axis=0) for name, stack in terms.items()}

    def value_and_grad(self, params: PyTree) -> tuple[Float[Array, ""], PyTree]:
        """L(θ) and ∇L(θ) in double precision."""
        return jax.value_and_grad(self.in_double)(params)

    def in_double(self, params: PyTree) -> Float[Array, ""]:
        """L(θ) as a double-precision array."""
        return jnp.asarray(self(params), dtype=jnp.float64)

    def velocity(self, params: PyTree, gradient: PyTree) -> PyTree:
        """θ̇ = -G(θ)⁻¹∇L, the flow's velocity, where G is the metric of the flow."""
        return jax.tree.map(jnp.negative, gradient)

    @property
    def is_euclidean(self) -> bool:
        """Whether the metric G is constant and isotropic, which makes the Jacobian of
        the flow symmetric."""
        return True

    @property
    def known_saddles(self) -> Sequence[KnownSaddle]:
        """The saddles that theory gives in closed form."""
        return ()

    def symmetry_generators(self, params: PyTree) -> PyTree | None:
        """The directions in which the loss's known symmetries move `params`, one row
        each; None if no symmetry is known."""
        return None

    @property
    def stage_theory(self) -> StageTheory:
        """Which of the definitions in `gradflow.analysis.stages` names the stages:

        - `"speed"`: plateaus and transitions of the speed, which any flow has;
        - `"directions"`: directions of W0 and of WQ WKᵀ that open (*Focus and
            Dilution*);
        - `"patterns"`: patterns that heads acquire, given by the observables
            `pattern_shares` and `head_overlap` (*Incremental Learning*).
        """
        return "speed"


class Loss(AbstractLoss):
    """A function of the parameters, with what its author knows about it."""

    function: Callable[[PyTree], Any]
    _floor: float | None = eqx.field(static=True)
    _conserved: dict[str, Callable[[PyTree], Any]]
    _observables: dict[str, Observable]

    def __init__(
        self,
        function: Checked[Callable[[PyTree], Any]],
        *,
        floor: Checked[float | None] = None,
        conserved: Checked[Mapping[str, Callable[[PyTree], Any]] | None] = None,
        observables: Checked[Mapping[str, Observable] | None] = None,
    ):
        """**Arguments:**

        - `function`: the loss, any callable from parameters to a real scalar. Compiled
            code is reused for the same function object, or for modules of the same
            structure (an `equinox.Module` whose arrays are its data).
        - `floor`: a lower bound of the loss.
        - `conserved`: functions of the parameters, by name, that the exact flow keeps
            constant. One that is a sum with cancellations should return its terms as a
            tuple: the drift is reported relative to the largest term.
        - `observables`: functions of the parameters to record along the flow, by name.
        """
        if isinstance(function, type) or not callable(function):
            raise ValueError(
                "`function` must be a callable on parameters, got "
                f"{_described(function)}."
            )
        self.function = function
        self._floor = None if floor is None else checks.finite_number("floor", floor)
        self._conserved = checks.named_functions("conserved", conserved)
        self._observables = checks.named_functions(
            "observables", observables, RESERVED_NAMES
        )

    def __call__(self, params: PyTree) -> Any:
        return self.function(params)

    @property
    def floor(self) -> float | None:
        return self._floor

    @property
    def observables(self) -> dict[str, Observable]:
        return self._observables

    def conserved_terms(self, params: PyTree) -> dict[str, AnyArray]:
        terms = {name: q(params) for name, q in self._conserved.items()}
        return {
            name: jnp.stack(q) if isinstance(q, tuple) else jnp.asarray(q)[None]
            for name, q in terms.items()
        }


class UnknownLoss(AbstractLoss):
    """Stands for a loss that is not available, for example after loading the flow of a
    plain function. Nothing is known about it."""

    def __call__(self, params: PyTree) -> Scalar:
        raise ValueError("This flow was loaded without its loss.")


class NamedObservable(eqx.Module):
    """An observable of a loss, by name.

    `loss.observables[name]` may be a new function at each access, which jit compiles
    anew; this is the same one for losses of the same structure.
    """

    loss: AbstractLoss
    name: str = eqx.field(static=True)

    def __call__(self, params: PyTree) -> PyTree:
        return self.loss.observables[self.name](params)


def as_loss(loss: object, name: str = "loss") -> AbstractLoss:
    """`loss` as an `AbstractLoss`; a plain callable is wrapped. This is the door
    through which every loss enters the library."""
    if isinstance(loss, AbstractLoss):
        return loss
    if isinstance(loss, type) or not callable(loss):
        raise ValueError(
            f"`{name}` must be a callable on parameters, got {_described(loss)}."
        )
    return Loss(loss)


def checked_loss(
    loss: Any, params: PyTree, name: str = "loss", of: str = "params"
) -> AbstractLoss:
    """`loss` as an `AbstractLoss`, if it is a real scalar function of `params` that JAX
    can trace and `params` can flow. `name` and `of` are the user's names for them."""
    loss = as_loss(loss, name)
    checks.floating_parameters(of, params)
    loss.check(params)
    value = checks.traced_result(name, loss, params)
    if not checks.is_scalar(value, "f"):
        raise ValueError(f"`{name}` must return a real scalar, got {value!r}.")
    return loss


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return type(value).__name__
