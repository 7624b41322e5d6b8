"""The minimal student of *Incremental Learning of Sparse Attention Patterns*."""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._core import checks, seeds
from .._core.checks import Checked
from .._core.file_format import storable
from .._core.types import AnyArray, Seed
from ..populations import AbstractChainWindows, AbstractWindowPopulation
from ._model import AbstractModel
from ._patterns import Patterns


@storable
class PositionalHeadsParameters(eqx.Module):
    """The scores a (heads × lags) and the value matrices V (heads × d × d)."""

    a: Float[AnyArray, "*time heads lags"]
    V: Float[AnyArray, "*time heads d d"]


@storable
class PositionalHeads(
    AbstractModel[PositionalHeadsParameters, AbstractWindowPopulation]
):
    """Heads that attend to positions instead of tokens: with s_k = softmax(a_k),

    logits = Σ_k V_k Σ_i s_k[i] x_{t-i}.
    """

    vocabulary: int = eqx.field(static=True)
    """The number of tokens, d."""
    lags: int = eqx.field(static=True)
    """The number of tokens that a head sees, w."""
    heads: int = eqx.field(static=True)
    """The number of heads."""

    def __init__(
        self, vocabulary: Checked[int], lags: Checked[int], heads: Checked[int]
    ):
        """**Arguments:**

        - `vocabulary`: the number of tokens d.
        - `lags`: the number of tokens w that a head sees.
        - `heads`: the number of heads.
        """
        self.vocabulary = checks.whole_number("vocabulary", vocabulary)
        self.lags = checks.whole_number("lags", lags)
        self.heads = checks.whole_number("heads", heads)

    @property
    def reads(self) -> type[AbstractWindowPopulation]:
        return AbstractWindowPopulation

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter array."""
        d = self.vocabulary
        return {"a": (self.heads, self.lags), "V": (self.heads, d, d)}

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {
            "a": ("head", "lag"),
            "V": ("head", "next_token", "token"),
            "attention": ("head", "lag"),
            "value_norms": ("head",),
            "head_overlap": ("head", "other_head"),
            "attention_to_blocks": ("head", "block"),
            "value_coordinates": ("head", "block"),
            "ladder": ("block",),
            "block_loss": ("block",),
            "pattern_shares": ("head", "block"),
        }

    def stage_theory(
        self, population: AbstractWindowPopulation
    ) -> Literal["patterns", "speed"]:
        # Only the blocks of a chain define patterns to acquire.
        return "patterns" if isinstance(population, AbstractChainWindows) else "speed"

    def init(self, seed: Seed, scale: float) -> PositionalHeadsParameters:
        """Values of zero and scores distributed as N(0, scale²)."""
        key = seeds.jax_key("seed", seed)
        noise = jax.random.normal(key, self.shapes["a"], jnp.float64)
        return PositionalHeadsParameters(
            a=scale * noise, V=jnp.zeros(self.shapes["V"], jnp.float64)
        )

    def check(self, params: object) -> None:
        checks.parameters_of(PositionalHeadsParameters, self.shapes, params)

    def check_population(self, population: AbstractWindowPopulation) -> None:
        """Raise a `ValueError` if the windows have another length."""
        if population.lags != self.lags:
            raise ValueError(
                f"`model` and `population` must have the same lags: `model` sees "
                f"{self.lags} lags and `population` has windows of {population.lags}."
            )

    def attention(
        self, params: PositionalHeadsParameters
    ) -> Float[AnyArray, "heads lags"]:
        """s_k[i], the attention of head k to lag i+1."""
        return jax.nn.softmax(params.a, axis=-1)

    def logits(
        self, params: PositionalHeadsParameters, population: AbstractWindowPopulation
    ) -> Float[AnyArray, "contexts d"]:
        return population.one_hot @ self.table(params).reshape(-1, self.vocabulary)

    @property
    def least_length(self) -> int:
        return self.lags

    def sequence_logits(
        self,
        params: PositionalHeadsParameters,
        tokens: Int[Array, " s"],
        positions: Literal["last", "all"],
    ) -> Float[Array, "predictions d"]:
        """Position t attends to u with score a_k[t-u], for t-u < w. The first
        prediction is made at the first position that sees w tokens:

            logits_t = Σ_k Σ_u softmax_u( a_k[t-u] ) V_k x_u.
        """
        s, d = tokens.shape[0], self.vocabulary
        first = s - 1 if positions == "last" else self.lags - 1
        lag = jnp.arange(first, s)[:, None] - jnp.arange(s)[None, :]
        seen = (lag >= 0) & (lag < self.lags)
        scores = jnp.asarray(params.a)[:, jnp.clip(lag, 0, self.lags - 1)]
        attention = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
        values = jax.nn.one_hot(tokens, d, dtype=scores.dtype) @ jnp.moveaxis(
            params.V, 2, 1
        )
        return jnp.einsum("ktu,kuy->ty", attention, values)

    def table(self, params: PositionalHeadsParameters) -> Float[AnyArray, "lags d d"]:
        """The contribution of token x at lag i to the logit of y, by i, x, y."""
        return jnp.einsum("ki,kyx->ixy", self.attention(params), params.V)

    def conserved_terms(
        self, params: PositionalHeadsParameters
    ) -> dict[str, Float[AnyArray, "terms ..."]]:
        """The terms of each conserved quantity, stacked along the first axis. Each
        follows from a transformation that leaves the loss unchanged:

        - `score_sum`: Σ_i a_k[i] of each head, from adding a constant to its scores;
        - `value_sum`: Σ_y V_k[y, x] of each head and token x, from adding a constant to
            all logits.
        """
        return {"score_sum": params.a.T, "value_sum": jnp.moveaxis(params.V, 1, 0)}

    def observables(
        self, population: AbstractWindowPopulation
    ) -> dict[str, Callable[[PositionalHeadsParameters], Any]]:
        """The quantities that the paper plots, as functions of the parameters."""
        known: dict[str, Callable[[PositionalHeadsParameters], Any]] = {
            "attention": self.attention,
            "value_norms": lambda p: jnp.sqrt(jnp.sum(p.V**2, axis=(1, 2))),
            "head_overlap": lambda p: head_overlap(
                p.V.reshape(self.heads, -1), self.attention(p)
            ),
        }
        if isinstance(population, AbstractChainWindows):
            known |= self._observables_of_chain(population)
        return known

    def _observables_of_chain(
        self, population: AbstractChainWindows
    ) -> dict[str, Callable[[PositionalHeadsParameters], Any]]:
        """The progress of the student towards its teacher, the chain.

        - `attention_to_blocks` (heads × blocks): Σ_{i ∈ I(j)} s_k[i];
        - `value_coordinates` (heads × blocks): ⟨V_k, A_j⟩/‖A_j‖²;
        - `ladder` (blocks): the mean over contexts of KL(T_j ‖ student), where T_j is
            the teacher with only its j strongest blocks;
        - `rung`: the j of the smallest of these;
        - `block_loss` (blocks): the decrease of the loss if the student's contribution
            from the lags of a block were replaced by the teacher's. For a squared error
            and independent tokens these are the parts of the loss;
        - `pattern_shares` (heads × blocks): the contribution of each head to the
            coefficient of A_j ⊗ α_j in Σ_k V_k ⊗ s_k, by projection on all of them.
            Parts that are the same for all next tokens, or for all tokens read, do not
            affect the loss and are left out.
        """
        chain = population.chain
        member = jnp.where(jnp.asarray(chain.pattern) > 0, 1.0, 0.0)
        A, teachers = jnp.asarray(chain.matrices), jnp.asarray(population.teachers)
        surprise = jnp.sum(teachers * jnp.log(teachers), axis=-1)

        def ladder(params: PositionalHeadsParameters) -> Float[AnyArray, " blocks"]:
            log_p = jax.nn.log_softmax(self.logits(params, population))
            cross = jnp.einsum("jcy,cy->jc", teachers, log_p)
            return (surprise - cross) @ mean

        mean = population.weights
        learned = jnp.einsum("ji,jyx->ixy", jnp.asarray(chain.pattern), A)

        def loss_of(table: Float[AnyArray, "lags d d"]) -> Float[AnyArray, ""]:
            logits = population.one_hot @ table.reshape(-1, self.vocabulary)
            log_p = jax.nn.log_softmax(logits)
            return -mean @ jnp.sum(population.targets * log_p, axis=1)

        def block_loss(params: PositionalHeadsParameters) -> Float[AnyArray, " blocks"]:
            table = self.table(params)
            known = jax.vmap(
                lambda lags: loss_of(jnp.where(lags[:, None, None] > 0, learned, table))
            )(member)
            return loss_of(table) - known

        centred = chain.matrices - chain.matrices.mean(axis=1, keepdims=True)
        centred = centred - centred.mean(axis=2, keepdims=True)
        patterns = Patterns(centred.reshape(len(centred), -1), chain.pattern)
        sizes = jnp.sum(A**2, axis=(1, 2))
        return {
            "attention_to_blocks": lambda p: self.attention(p) @ member.T,
            "value_coordinates": lambda p: (
                jnp.einsum("kyx,jyx->kj", p.V, A) / sizes[None, :]
            ),
            "ladder": ladder,
            "rung": lambda p: 1.0 + jnp.argmin(ladder(p)),
            "block_loss": block_loss,
            "pattern_shares": lambda p: patterns.shares(
                p.V.reshape(self.heads, -1), self.attention(p)
            ),
        }

    def stored_arguments(self) -> dict[str, Any]:
        return {
            "vocabulary": self.vocabulary,
            "lags": self.lags,
            "heads": self.heads,
        }


def head_overlap(
    V: Float[AnyArray, "heads features"], s: Float[AnyArray, "heads positions"]
) -> Float[AnyArray, "heads heads"]:
    """The cosine of V_j ⊗ s_j and V_k ⊗ s_k; one where either of them is zero."""
    inner = (V @ V.T) * (s @ s.T)
    size = jnp.sqrt(jnp.diag(inner))
    product = size[:, None] * size[None, :]
    return jnp.where(product > 0, inner / jnp.where(product > 0, product, 1.0), 1.0)
