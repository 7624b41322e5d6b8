"""The one-layer Transformer of *Focus and Dilution*."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .._core import checks, machine, seeds
from .._core.checks import Checked
from .._core.compiled import jit
from .._core.file_format import storable
from .._core.types import AnyArray, Seed
from ..populations import AbstractUnorderedPopulation, InfiniteContext
from ._model import AbstractModel, KnownSaddle


@storable
class OneLayerParameters(eqx.Module):
    """The embedding W0 (d×m), the attention WQ and WK (m×k) and the projection W1
    (m×d)."""

    W0: Float[AnyArray, "*time d m"]
    WQ: Float[AnyArray, "*time m k"]
    WK: Float[AnyArray, "*time m k"]
    W1: Float[AnyArray, "*time m d"]


@storable
class OneLayerTransformer(
    AbstractModel[OneLayerParameters, AbstractUnorderedPopulation]
):
    """One attention layer, without position code, residual connection, normalisation
    or value matrix.

    With M = W0 W1 and Φ = W0 WQ WKᵀ W0ᵀ, a context whose last token is i and in which
    token j occurs n_j times attends to token j with total weight
    a_j ∝ n_j exp(Φ[i, j]), and its logits are Σ_j a_j M[j].
    """

    vocabulary: int = eqx.field(static=True)
    """The number of tokens, d."""
    width: int = eqx.field(static=True)
    """The width of the embedding, m."""
    head_width: int = eqx.field(static=True)
    """The width of the attention head, k."""

    def __init__(
        self,
        vocabulary: Checked[int],
        width: Checked[int],
        head_width: Checked[int | None] = None,
    ):
        """**Arguments:**

        - `vocabulary`: the number of tokens d.
        - `width`: the width m of the embedding.
        - `head_width`: the width k of the attention head, by default m.
        """
        self.vocabulary = checks.whole_number("vocabulary", vocabulary)
        self.width = checks.whole_number("width", width)
        self.head_width = (
            self.width
            if head_width is None
            else checks.whole_number("head_width", head_width)
        )

        count = sum(rows * columns for rows, columns in self.shapes.values())
        machine.refuse_beyond(
            f"A model with {count:,} parameters",
            8 * count,
            f"`vocabulary` = {self.vocabulary}, `width` = {self.width} and "
            f"`head_width` = {self.head_width}",
        )

    @property
    def reads(self) -> type[AbstractUnorderedPopulation]:
        return AbstractUnorderedPopulation

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape of each parameter array."""
        d, m, k = self.vocabulary, self.width, self.head_width
        return {"W0": (d, m), "WQ": (m, k), "WK": (m, k), "W1": (m, d)}

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {
            "W0": ("token", "width"),
            "WQ": ("width", "head_width"),
            "WK": ("width", "head_width"),
            "W1": ("width", "token"),
            "singular_values_W0": ("singular_value",),
            "singular_values_W1": ("singular_value",),
            "singular_values_QK": ("singular_value",),
            "attention": ("query", "key"),
            "attention_entropy": ("query",),
            "attention_mass": ("key",),
            "embedding_norms": ("token",),
            "embedding_coordinates": ("token", "direction"),
        }

    def stage_theory(
        self, population: AbstractUnorderedPopulation
    ) -> Literal["directions"]:
        return "directions"

    def init(self, seed: Seed, scale: float) -> OneLayerParameters:
        """Independent entries distributed as N(0, scale²)."""
        noise = _noise(seeds.jax_key("seed", seed), tuple(self.shapes.values()))
        return OneLayerParameters(
            **{k: scale * x for k, x in zip(self.shapes, noise, strict=True)}
        )

    def check(self, params: object) -> None:
        checks.parameters_of(OneLayerParameters, self.shapes, params)

    def context_attention(
        self, params: OneLayerParameters, population: AbstractUnorderedPopulation
    ) -> Float[AnyArray, "contexts d"]:
        """a[c, j], the attention of context c to all occurrences of token j."""
        queries, keys = params.W0 @ params.WQ, params.W0 @ params.WK
        return population.attention(queries @ keys.T)

    def logits(
        self, params: OneLayerParameters, population: AbstractUnorderedPopulation
    ) -> Float[AnyArray, "contexts d"]:
        attention = self.context_attention(params, population)
        # (A W0) W1 and never A (W0 W1): d×d products cost most where d is large.
        return (attention @ params.W0) @ params.W1

    def sequence_logits(
        self,
        params: OneLayerParameters,
        tokens: Int[Array, " s"],
        positions: Literal["last", "all"],
    ) -> Float[Array, "predictions d"]:
        """With x_t the embedding of the t-th token, position t attends to u ≤ t:

        logits_t = Σ_u softmax_u( x_tᵀ WQ WKᵀ x_u ) x_uᵀ W1.
        """
        x = jnp.asarray(params.W0)[tokens]
        s = tokens.shape[0]
        first = s - 1 if positions == "last" else 0
        scores = (x[first:] @ params.WQ) @ (x @ params.WK).T
        seen = jnp.arange(s)[None, :] <= jnp.arange(first, s)[:, None]
        attention = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return (attention @ x) @ params.W1

    def conserved_terms(
        self, params: OneLayerParameters
    ) -> dict[str, Float[AnyArray, "terms ..."]]:
        """The terms of each conserved quantity, stacked along the first axis. Each
        follows from a transformation that leaves the loss unchanged:

        - `embedding_balance`: W0ᵀW0 - W1W1ᵀ - WQWQᵀ - WKWKᵀ (m×m), from W0 → W0 R,
            (W1, WQ, WK) → R⁻¹(W1, WQ, WK);
        - `attention_balance`: WQᵀWQ - WKᵀWK (k×k), from WQ → WQ S, WK → WK S⁻ᵀ;
        - `projection_sum`: W1·1 (m), from adding a constant to all logits.
        """
        W0, WQ, WK, W1 = params.W0, params.WQ, params.WK, params.W1
        return {
            "embedding_balance": jnp.stack(
                [W0.T @ W0, -W1 @ W1.T, -WQ @ WQ.T, -WK @ WK.T]
            ),
            "attention_balance": jnp.stack([WQ.T @ WQ, -WK.T @ WK]),
            "projection_sum": W1.T,
        }

    def symmetry_generators(self, params: OneLayerParameters) -> OneLayerParameters:
        """The directions in which rotations that leave the loss unchanged move
        `params`: one row for each coordinate plane of R^m and then of R^k.

            W0 → W0 R, (W1, WQ, WK) → Rᵀ(W1, WQ, WK);   (WQ, WK) → (WQ, WK) S
        """
        W0, WQ, WK, W1 = params.W0, params.WQ, params.WK, params.W1
        X, Y = _rotations(self.width), _rotations(self.head_width)
        still = len(Y)

        def rows(
            by_X: Float[AnyArray, "..."], by_Y: Float[AnyArray, "..."]
        ) -> Float[Array, "..."]:
            return jnp.concatenate([by_X, by_Y])

        return OneLayerParameters(
            W0=rows(W0 @ X, jnp.zeros((still, *W0.shape))),
            WQ=rows(-X @ WQ, WQ @ Y),
            WK=rows(-X @ WK, WK @ Y),
            W1=rows(-X @ W1, jnp.zeros((still, *W1.shape))),
        )

    def known_saddles(
        self, population: AbstractUnorderedPopulation
    ) -> list[KnownSaddle]:
        """The saddles that theory gives in closed form, for infinite context.

        - θ⁰ = 0: the flow leaves it at rate ‖π‖·‖π - 1/d‖, in m directions;
        - θ¹ on the condensed ray, W0 = γαᵀ, W1 = αβᵀ with γ = gπ/‖π‖, β = c/(g‖π‖),
          c = log π - mean(log π), g² = ‖c‖/‖π‖: the attention grows at rate |κ|, in k
          directions, κ = [Σ_i π_i γ_i ((P - 1πᵀ)β)_i]·Var_π(γ).

        For uniform π there are none.
        """
        pi = np.asarray(population.chain.stationary)
        uniform = np.linalg.norm(pi - 1 / len(pi))
        if not isinstance(population, InfiniteContext) or uniform < 1e-12:
            return []
        size = np.linalg.norm(pi)
        c = np.log(pi) - np.mean(np.log(pi))
        g = np.sqrt(np.linalg.norm(c) / size)
        gamma, beta = g * pi / size, c / (g * size)
        contrast = np.asarray(population.chain.transition) @ beta - pi @ beta
        kappa = (pi @ (gamma * contrast)) * (pi @ gamma**2 - (pi @ gamma) ** 2)
        entropy = float(-pi @ np.log(pi))
        return [
            KnownSaddle("θ⁰", math.log(len(pi)), float(size * uniform), self.width),
            KnownSaddle("θ¹", entropy, abs(float(kappa)), self.head_width),
        ]

    def observables(
        self, population: AbstractUnorderedPopulation
    ) -> dict[str, Callable[[OneLayerParameters], Float[AnyArray, "..."]]]:
        """The quantities that the paper plots, as functions of the parameters."""
        pi = population.chain.stationary

        def attention(params: OneLayerParameters) -> Float[AnyArray, "d d"]:
            return population.mean_by_query(self.context_attention(params, population))

        def context_entropy(params: OneLayerParameters) -> Float[AnyArray, " contexts"]:
            a = self.context_attention(params, population)
            return -jnp.sum(jax.scipy.special.xlogy(a, a), axis=1)

        def attention_entropy(params: OneLayerParameters) -> Float[AnyArray, " d"]:
            return population.mean_by_query(context_entropy(params)[:, None])[:, 0]

        def mean_attention_entropy(params: OneLayerParameters) -> Float[AnyArray, ""]:
            return population.weights @ context_entropy(params)

        def attention_mass(params: OneLayerParameters) -> Float[AnyArray, " d"]:
            return population.weights @ self.context_attention(params, population)

        def factors_W0(
            params: OneLayerParameters,
        ) -> tuple[Float[Array, "d r"], Float[Array, " r"]]:
            # Observables that are compiled together share this computation.
            U, s, _ = jnp.linalg.svd(params.W0, full_matrices=False)
            return U, s

        def alignment(params: OneLayerParameters) -> Float[AnyArray, ""]:
            U, _ = factors_W0(params)
            return jnp.abs(U[:, 0] @ pi) / jnp.linalg.norm(pi)

        def coordinates(params: OneLayerParameters) -> Float[AnyArray, "d r"]:
            U, s = factors_W0(params)
            # The sign of a singular vector is arbitrary: make its largest entry
            # positive.
            largest = jnp.take_along_axis(
                U, jnp.argmax(jnp.abs(U), axis=0)[None], axis=0
            )
            return U * jnp.sign(largest) * s[None]

        def singular_values(matrix: Float[AnyArray, "a b"]) -> Float[AnyArray, " r"]:
            return jnp.linalg.svd(matrix, compute_uv=False)

        return {
            "singular_values_W0": lambda p: factors_W0(p)[1],
            "singular_values_W1": lambda p: singular_values(p.W1),
            "singular_values_QK": lambda p: singular_values(p.WQ @ p.WK.T),
            "alignment": alignment,
            "attention": attention,
            "attention_entropy": attention_entropy,
            "mean_attention_entropy": mean_attention_entropy,
            "attention_mass": attention_mass,
            "embedding_norms": lambda p: jnp.linalg.norm(p.W0, axis=1),
            "embedding_coordinates": coordinates,
        }

    def stored_arguments(self) -> dict[str, Any]:
        return {
            "vocabulary": self.vocabulary,
            "width": self.width,
            "head_width": self.head_width,
        }


@jit
def _noise(
    key: PRNGKeyArray, shapes: tuple[tuple[int, ...], ...]
) -> list[Float[Array, "..."]]:
    """Arrays of these shapes with entries distributed as N(0, 1), each from its own
    key.

    They are drawn together, with the size of the largest, since a draw takes longer to
    compile than to run. Each number depends only on its key and its place, not on the
    size of the draw.
    """
    keys = jax.random.split(key, len(shapes))
    sizes = [math.prod(shape) for shape in shapes]
    draw = functools.partial(jax.random.normal, shape=(max(sizes),), dtype=jnp.float64)
    rows = jax.vmap(draw)(keys)
    return [
        row[:size].reshape(shape)
        for row, size, shape in zip(rows, sizes, shapes, strict=True)
    ]


def _rotations(size: int) -> Float[AnyArray, "planes n n"]:
    """The generator of the rotations in each coordinate plane."""
    row, column = np.triu_indices(size, 1)
    plane = np.arange(len(row))
    generators = np.zeros((len(row), size, size))
    generators[plane, row, column] = 1.0
    generators[plane, column, row] = -1.0
    return generators
