"""The rank-one reduction of the one-layer Transformer: a flow in 2d+2 numbers."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core import checks
from .._core.checks import Checked
from .._core.compiled import jit
from .._core.file_format import storable
from .._core.types import AnyArray, Seed
from ..models._one_layer import OneLayerParameters, OneLayerTransformer
from ..populations import AbstractUnorderedPopulation
from ._population_loss import AbstractPopulationLoss, check_population

SWEEPS = 10
"""Sweeps of the alternating search for the nearest rank-one state. Near the manifold
each sweep reduces the error by a factor of the squared distance, and one is enough."""


@storable
class RankOneParameters(eqx.Module):
    """The embedding γ (d), the projection β (d) and the attention q, k (numbers)."""

    gamma: Float[AnyArray, "*time d"]
    beta: Float[AnyArray, "*time d"]
    q: Float[AnyArray, "*time"]
    k: Float[AnyArray, "*time"]


_WIDE = ("W0", "WQ", "WK", "W1")
"""The parameters of the full model, which the reduction does not have."""


@storable
class RankOneProblem(AbstractPopulationLoss[AbstractUnorderedPopulation]):
    """The loss on the rank-one manifold of the one-layer Transformer,

        W0 = γαᵀ,  W1 = αβᵀ,  WQ = q αᾱᵀ,  WK = k αᾱᵀ

    with unit vectors α in R^m and ᾱ in R^k, as a problem in 2d+2 numbers: L(M, Φ) at
    M = γβᵀ and Φ = qk γγᵀ. Its gradient flow is

        γ̇ = -G_M β - qk(G_Φ + G_Φᵀ)γ,  β̇ = -G_Mᵀγ,
        q̇ = -k γᵀG_Φγ,  k̇ = -q γᵀG_Φγ

    with G_M = ∂L/∂M and G_Φ = ∂L/∂Φ. The full flow leaves the manifold invariant and
    keeps α and ᾱ constant, so that on the manifold both flows agree for every m and k.
    It is the flow of the Transformer with width and head width one.
    """

    reduces: ClassVar = OneLayerTransformer
    """The model whose flow this problem reduces."""

    population: Checked[AbstractUnorderedPopulation]

    def __check_init__(self):
        check_population(self.population)
        if not isinstance(self.population, AbstractUnorderedPopulation):
            raise ValueError(
                "`population` must be one without positions, such as InfiniteContext, "
                f"got {type(self.population).__name__}."
            )

    @property
    def vocabulary(self) -> int:
        """The number of tokens, d."""
        return self.population.vocabulary

    @property
    def _narrow(self) -> OneLayerTransformer:
        return OneLayerTransformer(self.vocabulary, 1, 1)

    def check(self, params: PyTree) -> None:
        """Raise a `ValueError` if `params` are not parameters of this problem."""
        self._check(params, ())

    def _check(self, params: object, times: tuple[int, ...]) -> None:
        vector = (*times, self.vocabulary)
        shapes = {"gamma": vector, "beta": vector, "q": times, "k": times}
        checks.parameters_of(RankOneParameters, shapes, params)

    def logits(self, params: RankOneParameters) -> Float[AnyArray, "contexts d"]:
        return self._narrow.logits(_widened(params), self.population)

    def conserved_terms(
        self, params: RankOneParameters
    ) -> dict[str, Float[AnyArray, " terms"]]:
        """The terms of each conserved quantity, stacked along the first axis:

        - `embedding_balance`: γᵀγ - βᵀβ - q² - k²;
        - `attention_balance`: q² - k²;
        - `projection_sum`: Σβ.
        """
        terms = self._narrow.conserved_terms(_widened(params))
        return {name: jnp.reshape(stack, -1) for name, stack in terms.items()}

    def _random(self, seed: Seed, scale: float) -> RankOneParameters:
        wide = self._narrow.init(seed, scale)
        return RankOneParameters(
            gamma=wide.W0[:, 0], beta=wide.W1[0], q=wide.WQ[0, 0], k=wide.WK[0, 0]
        )

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        wide = self._narrow.axes
        parameters = {"gamma": ("token",), "beta": ("token",)}
        return parameters | {k: v for k, v in wide.items() if k not in _WIDE}

    def _model_observables(self) -> dict[str, Callable[[RankOneParameters], Any]]:
        def watched(
            function: Callable[[OneLayerParameters], Any],
        ) -> Callable[[RankOneParameters], Any]:
            return lambda params: function(_widened(params))

        known = self._narrow.observables(self.population)
        return {
            **{name: watched(function) for name, function in known.items()},
            # Here the sign is not arbitrary: it is that of γ.
            "embedding_coordinates": lambda params: params.gamma[:, None],
            "focus": lambda params: params.q * params.k,
        }

    def stored_arguments(self) -> dict[str, Any]:
        return {"population": self.population}

    #
    # Between the manifold and the full model
    #

    def embed(
        self,
        params: Checked[RankOneParameters],
        width: Checked[int],
        head_width: Checked[int | None] = None,
        alpha: Any = None,
        alpha_bar: Any = None,
    ) -> OneLayerParameters:
        """The state of the full model on the manifold: W0 = γαᵀ, W1 = αβᵀ,
        WQ = q αᾱᵀ, WK = k αᾱᵀ.

        **Arguments:**

        - `params`: parameters of this problem, or a stack of them along a time axis,
            for which the states are stacked too.
        - `width`, `head_width`: m and k of the full model; by default k = m.
        - `alpha`, `alpha_bar`: vectors in the directions of α and ᾱ; by default the
            first unit vectors.
        """
        self._check(params, np.shape(getattr(params, "q", ())))
        model = OneLayerTransformer(self.vocabulary, width, head_width)
        return _embedded(
            params,
            _direction("alpha", alpha, model.width),
            _direction("alpha_bar", alpha_bar, model.head_width),
        )

    def directions(
        self, params: Checked[OneLayerParameters]
    ) -> tuple[Float[Array, " m"], Float[Array, " k"]]:
        """α and ᾱ of the point of the manifold that is nearest to `params`: the unit
        vectors at which

            ‖W0 α‖² + ‖W1ᵀα‖² + (αᵀWQ ᾱ)² + (αᵀWK ᾱ)²

        is largest. α starts as the first singular vector of W0 and W1 jointly; then ᾱ
        given α and α given ᾱ are updated in turns, each as a first singular vector. The
        signs are chosen such that γ·π ≥ 0 and q ≥ 0.
        """
        self._check_full(params)
        return _directions(params, self.population.chain.stationary)

    def project(self, params: Checked[OneLayerParameters]) -> RankOneParameters:
        """The point of the manifold that is nearest to a state of the full model:
        γ = W0 α, β = W1ᵀα, q = αᵀWQ ᾱ and k = αᵀWK ᾱ, with α and ᾱ as in `directions`.
        """
        return _projected(params, *self.directions(params))

    def distance(self, params: Checked[OneLayerParameters]) -> Float[Array, ""]:
        """The relative distance of a state θ of the full model from the manifold:
        ‖θ - θ'‖/‖θ‖, where θ' is the nearest state on it."""
        return _share(params, self._residual(params))

    def attention_distance(
        self, params: Checked[OneLayerParameters]
    ) -> Float[Array, ""]:
        """The same distance for the attention alone: that of WQ and WK, where θ' is
        still the state nearest to the whole of θ. It is one if both are zero and have
        no direction."""
        residual = self._residual(params)
        return _share((params.WQ, params.WK), (residual.WQ, residual.WK))

    def _residual(self, params: OneLayerParameters) -> OneLayerParameters:
        alpha, alpha_bar = self.directions(params)
        nearest = _embedded(_projected(params, alpha, alpha_bar), alpha, alpha_bar)
        return jax.tree.map(jnp.subtract, params, nearest)

    def _check_full(self, params: object) -> None:
        """Raise a `ValueError` if `params` are not one state of a full model, of any
        width."""
        widths = np.shape(getattr(params, "WQ", 0.0))
        if len(widths) != 2 or 0 in widths:
            widths = (1, 1)  # the check below then says what is wrong
        OneLayerTransformer(self.vocabulary, *widths).check(params)


def _widened(params: RankOneParameters) -> OneLayerParameters:
    """The same state as parameters of width and head width one, where α = ᾱ = 1."""
    one = jnp.ones(1)
    return _embedded(params, one, one)


def _embedded(
    params: RankOneParameters,
    alpha: Float[AnyArray, " m"],
    alpha_bar: Float[AnyArray, " k"],
) -> OneLayerParameters:
    attention = jnp.einsum("a,b->ab", alpha, alpha_bar)
    return OneLayerParameters(
        W0=jnp.einsum("...i,a->...ia", params.gamma, alpha),
        WQ=jnp.einsum("...,ab->...ab", params.q, attention),
        WK=jnp.einsum("...,ab->...ab", params.k, attention),
        W1=jnp.einsum("a,...i->...ai", alpha, params.beta),
    )


def _projected(
    params: OneLayerParameters,
    alpha: Float[Array, " m"],
    alpha_bar: Float[Array, " k"],
) -> RankOneParameters:
    return RankOneParameters(
        gamma=params.W0 @ alpha,
        beta=alpha @ params.W1,
        q=alpha @ params.WQ @ alpha_bar,
        k=alpha @ params.WK @ alpha_bar,
    )


@jit
def _directions(
    params: OneLayerParameters, pi: Float[AnyArray, " d"]
) -> tuple[Float[Array, " m"], Float[Array, " k"]]:
    W0, WQ, WK, W1 = params.W0, params.WQ, params.WK, params.W1

    def given(alpha: Float[Array, " m"]) -> Float[Array, " k"]:
        return _first_singular_vector(alpha @ WQ, alpha @ WK)

    def turn(_: Any, alpha: Float[Array, " m"]) -> Float[Array, " m"]:
        alpha_bar = given(alpha)
        return _first_singular_vector(W0, W1.T, WQ @ alpha_bar, WK @ alpha_bar)

    alpha = jax.lax.fori_loop(0, SWEEPS, turn, _first_singular_vector(W0, W1.T))
    alpha = jnp.where(pi @ W0 @ alpha < 0, -alpha, alpha)
    alpha_bar = given(alpha)
    return alpha, jnp.where(alpha @ WQ @ alpha_bar < 0, -alpha_bar, alpha_bar)


def _first_singular_vector(*rows: Float[AnyArray, "..."]) -> Float[Array, " m"]:
    """The unit vector v at which Σ (row · v)² over all these rows is largest."""
    _, _, Vt = jnp.linalg.svd(
        jnp.concatenate([jnp.atleast_2d(row) for row in rows]), full_matrices=False
    )
    return Vt[0]


def _share(whole: PyTree, part: PyTree) -> Float[Array, ""]:
    """‖part‖/‖whole‖, or one if the whole is zero."""
    norms = [
        jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
        for tree in (whole, part)
    ]
    return jnp.where(norms[0] > 0, norms[1] / jnp.where(norms[0] > 0, norms[0], 1), 1.0)


def _direction(name: str, value: object, size: int) -> Float[np.ndarray, " size"]:
    """The unit vector in the direction of `value`, by default the first axis."""
    if value is None:
        return np.eye(1, size)[0]
    vector = checks.real_array(name, value)
    if vector.shape != (size,):
        raise ValueError(f"`{name}` must have shape {(size,)}, got {vector.shape}.")
    norm = np.linalg.norm(vector)
    if norm == 0:
        raise ValueError(f"`{name}` must not be zero, since it defines a direction.")
    return vector / norm
