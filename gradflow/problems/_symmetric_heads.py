"""Problems with equal heads, reduced to one head."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PyTree

from .._core.checks import Checked
from .._core.file_format import storable
from .._core.types import AnyArray, Seed
from ..models import PositionalHeads
from ._loss import AbstractLoss, Observable, StageTheory
from ._problem import Problem
from ._tensor_factorisation import TensorFactorisation


@storable
class SymmetricHeads(AbstractLoss):
    """A problem with h heads, restricted to equal heads: its parameters are those of
    one head, with a leading axis of length one.

    A flow that starts with equal heads keeps them equal, but rounding errors break the
    symmetry when all heads are integrated. Here they cannot: with L̄(θ) = L(θ, …, θ),

        θ̇ = -∇_{θ_k} L = -∇L̄/h.
    """

    problem: AbstractLoss
    """A loss whose parameters all have the heads as their leading axis."""
    heads: int = eqx.field(static=True)
    _ranks: tuple[int, ...] = eqx.field(static=True)
    """The number of axes of each parameter array."""

    def __init__(self, problem: Checked[AbstractLoss]):
        """**Arguments:**

        - `problem`: a [`TensorFactorisation`][] or a [`Problem`][] of
            [`PositionalHeads`][].
        """
        is_of_heads = isinstance(problem, TensorFactorisation) or (
            isinstance(problem, Problem) and isinstance(problem.model, PositionalHeads)
        )
        if not is_of_heads:
            kind = problem.model if isinstance(problem, Problem) else problem
            raise ValueError(
                "`problem` must be a problem with several heads, such as a "
                "TensorFactorisation or a Problem of PositionalHeads, got "
                f"{type(kind).__name__}."
            )
        start = problem.init(0, 0.0)
        self.problem = problem
        self.heads = jnp.shape(jax.tree.leaves(start)[0])[0]
        self._ranks = tuple(jnp.ndim(leaf) for leaf in jax.tree.leaves(start))

    def expand(self, params: PyTree) -> PyTree:
        """The parameters of all heads, from those of one head; a stack along a time
        axis is expanded at each time."""
        leaves, structure = jax.tree.flatten(params)
        copies = [
            jnp.repeat(jnp.asarray(leaf), self.heads, axis=jnp.ndim(leaf) - rank)
            for leaf, rank in zip(leaves, self._ranks, strict=True)
        ]
        return jax.tree.unflatten(structure, copies)

    def average(self, params: PyTree) -> PyTree:
        """The mean over the heads of the problem's parameters. The mean of attention
        that sums to one sums to one too."""
        self.problem.check(params)
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0, keepdims=True), params)

    def init(self, seed: Checked[Seed] = 0, scale: Checked[float] = 1e-3) -> PyTree:
        """The mean over the heads of the problem's own initial parameters."""
        return self.average(self.problem.init(seed, scale))

    def check(self, params: PyTree) -> None:
        """Raise a `ValueError` if `params` are not those of one head."""
        for leaf in jax.tree.leaves(params):
            if jnp.shape(leaf)[:1] != (1,):
                raise ValueError(
                    "`params` must be those of one head, with a leading axis of "
                    f"length one, got shape {jnp.shape(leaf)}."
                )
        self.problem.check(self.expand(params))

    def __call__(self, params: PyTree) -> Float[AnyArray, ""]:
        return self.problem(self.expand(params))

    def velocity(self, params: PyTree, gradient: PyTree) -> PyTree:
        """The velocity of each head."""
        of_each = self.expand(jax.tree.map(lambda g: g / self.heads, gradient))
        velocity = self.problem.velocity(self.expand(params), of_each)
        return jax.tree.map(lambda leaf: leaf[:1], velocity)

    @property
    def is_euclidean(self) -> bool:
        """Whether the Jacobian of the flow is symmetric, as for the problem itself: the
        metric differs by the factor 1/h."""
        return self.problem.is_euclidean

    @property
    def floor(self) -> float | None:
        return self.problem.floor

    def conserved_terms(self, params: PyTree) -> dict[str, AnyArray]:
        return self.problem.conserved_terms(self.expand(params))

    @property
    def baselines(self) -> dict[str, float]:
        return self.problem.baselines

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return self.problem.axes

    @property
    def stage_theory(self) -> StageTheory:
        return self.problem.stage_theory

    @property
    def observables(self) -> dict[str, Observable]:
        """The observables of the problem, evaluated for all heads."""

        def of_all(function: Observable) -> Observable:
            return lambda params: function(self.expand(params))

        return {name: of_all(f) for name, f in self.problem.observables.items()}

    def stored_arguments(self) -> dict[str, Any]:
        return {"problem": self.problem}
