"""The regression form of positional heads: a tensor factorisation."""

from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from .._core import checks, seeds
from .._core.checks import Checked
from .._core.file_format import storable
from .._core.types import AnyArray, Seed
from ..models._patterns import Patterns
from ..models._positional_heads import head_overlap
from ._loss import AbstractLoss, Observable


@storable
class ScoreParameters(eqx.Module):
    """The values V (heads × features) and scores a (heads × positions)."""

    V: Float[AnyArray, "*time heads features"]
    a: Float[AnyArray, "*time heads positions"]


@storable
class ReplicatorParameters(eqx.Module):
    """The values V (heads × features) and the attention s (heads × positions)."""

    V: Float[AnyArray, "*time heads features"]
    s: Float[AnyArray, "*time heads positions"]


Parameters: TypeAlias = ScoreParameters | ReplicatorParameters


@storable
class TensorFactorisation(AbstractLoss):
    """L = ½‖G - Σ_k V_k ⊗ s_k‖², with attention s_k on the simplex.

    - `geometry="scores"`: s_k = softmax(a_k), and the flow is the gradient flow in V
      and a. With g_k = ⟨V_k, G - Ĝ⟩ and J(s) = diag(s) - ssᵀ:

          V̇_k = (G - Ĝ)s_k,   ȧ_k = J(s_k)g_k,   so that   ṡ_k = J(s_k)²g_k.

    - `geometry="replicator"`: the same with ṡ_k = J(s_k)g_k, the gradient flow in the
      Fisher–Shahshahani metric on the simplex, for which

          L(0) - L(t) = ∫ ‖V̇‖² + Σ_k g_kᵀJ(s_k)g_k.
    """

    target: Float[np.ndarray, "features positions"]
    """G, features × positions."""
    patterns: Patterns
    """The columns of G in one direction form a pattern; the strongest comes first."""
    heads: int = eqx.field(static=True)
    """The number of heads."""
    geometry: Literal["scores", "replicator"] = eqx.field(static=True)

    def __init__(
        self,
        target: Any,
        heads: Checked[int],
        geometry: Checked[Literal["scores", "replicator"]] = "scores",
    ):
        """**Arguments:**

        - `target`: G, features × positions. For value matrices the features are their
            entries.
        - `heads`: the number of heads.
        - `geometry`: the metric in which the attention moves.
        """
        G = checks.real_array("target", target)
        if G.ndim != 2 or 0 in G.shape:
            raise ValueError(
                "`target` must be a matrix of features × positions, got shape "
                f"{G.shape}."
            )
        if geometry not in ("scores", "replicator"):
            raise ValueError(
                f"`geometry` must be 'scores' or 'replicator', got {geometry!r}."
            )
        self.target = G
        self.patterns = Patterns.of_columns(G)
        self.heads = checks.whole_number("heads", heads)
        self.geometry = geometry

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter array."""
        features, positions = self.target.shape
        attention = "a" if self.geometry == "scores" else "s"
        return {"V": (self.heads, features), attention: (self.heads, positions)}

    def init(self, seed: Checked[Seed] = 0, scale: Checked[float] = 1e-3) -> PyTree:
        """Values of zero and scores distributed as N(0, scale²)."""
        key = seeds.jax_key("seed", seed)
        scale = checks.positive_number("scale", scale, zero_allowed=True)
        shape = (self.heads, self.target.shape[1])
        a = scale * jax.random.normal(key, shape, jnp.float64)
        V = jnp.zeros(self.shapes["V"], jnp.float64)
        if self.geometry == "scores":
            return ScoreParameters(V, a)
        return ReplicatorParameters(V, jax.nn.softmax(a, axis=-1))

    def check(self, params: PyTree) -> None:
        """Raise a `ValueError` if `params` are not parameters of this problem."""
        scores = self.geometry == "scores"
        kind = ScoreParameters if scores else ReplicatorParameters
        checks.parameters_of(kind, self.shapes, params)
        if not scores:
            s = np.asarray(params.s)
            if np.any(s < 0) or not np.allclose(s.sum(axis=-1), 1.0, atol=1e-9):
                raise ValueError(
                    "`params.s` must be probability distributions over the positions, "
                    f"got rows that sum to {s.sum(axis=-1).tolist()} with entries from "
                    f"{s.min():g}."
                )

    def attention(self, params: Parameters) -> Float[AnyArray, "heads positions"]:
        """The attention s_k of each head."""
        if isinstance(params, ScoreParameters):
            return jax.nn.softmax(params.a, axis=-1)
        return params.s

    def residual(self, params: Parameters) -> Float[AnyArray, "features positions"]:
        """G - Ĝ."""
        return self.target - params.V.T @ self.attention(params)

    def __call__(self, params: Parameters) -> Float[AnyArray, ""]:
        return 0.5 * jnp.sum(self.residual(params) ** 2)

    def velocity(self, params: Parameters, gradient: Parameters) -> Parameters:
        """The velocity of the flow in the metric of the problem's geometry."""
        if isinstance(params, ScoreParameters) or isinstance(gradient, ScoreParameters):
            return jax.tree.map(jnp.negative, gradient)
        s, g = params.s, -gradient.s
        mean = jnp.sum(s * g, axis=-1, keepdims=True)
        return ReplicatorParameters(-gradient.V, s * (g - mean))

    @property
    def is_euclidean(self) -> bool:
        """Whether the flow is a gradient flow in the Euclidean metric."""
        return self.geometry == "scores"

    @property
    def floor(self) -> float:
        """A lower bound of the loss: the error of the singular value decomposition with
        as many terms as there are heads, which allows attention of any sign."""
        rest = np.linalg.svd(self.target, compute_uv=False)[self.heads :]
        return float(0.5 * np.sum(rest**2))

    def conserved_terms(
        self, params: Parameters
    ) -> dict[str, Float[AnyArray, "terms heads"]]:
        """The terms of the conserved sum of each head: its scores or, for the
        replicator, its attention."""
        if isinstance(params, ScoreParameters):
            return {"score_sum": params.a.T}
        return {"attention_sum": params.s.T}

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {
            "V": ("head", "feature"),
            "a": ("head", "position"),
            "s": ("head", "position"),
            "attention": ("head", "position"),
            "value_coordinates": ("head", "position"),
            "value_norms": ("head",),
            "position_loss": ("position",),
            "head_overlap": ("head", "other_head"),
            "pattern_shares": ("head", "pattern"),
        }

    @property
    def stage_theory(self) -> Literal["patterns"]:
        return "patterns"

    @property
    def observables(self) -> dict[str, Observable]:
        """Functions of the parameters that describe the training, by name.

        - `value_coordinates` (heads × positions): V_k along the column of G at each
            position, relative to its length;
        - `position_loss`: ½‖G - Ĝ‖² by position;
        - `pattern_shares` (heads × patterns): the share of each head in each pattern.
        """
        G = jnp.asarray(self.target)
        size = jnp.sum(G**2, axis=0)
        scale = jnp.where(size > 0, size, 1.0)
        return {
            "attention": self.attention,
            "value_coordinates": lambda p: p.V @ G / scale[None, :],
            "value_norms": lambda p: jnp.linalg.norm(p.V, axis=1),
            "position_loss": lambda p: 0.5 * jnp.sum(self.residual(p) ** 2, axis=0),
            "head_overlap": lambda p: head_overlap(p.V, self.attention(p)),
            "pattern_shares": lambda p: self.patterns.shares(p.V, self.attention(p)),
        }

    def stored_arguments(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "heads": self.heads,
            "geometry": self.geometry,
        }
