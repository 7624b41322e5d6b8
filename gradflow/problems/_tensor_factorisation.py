"""The regression form of heads that share out lags: a factorisation of a tensor."""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._core import checks, seeds
from .._core.checks import Checked
from .._core.storage import storable
from .._core.types import AnyArray, Seed
from ..models._patterns import Patterns
from ..models._positional_heads import head_overlap
from ._loss import AbstractLoss


@storable
class ScoreParameters(eqx.Module):
    """Values V (heads × features) and scores a (heads × positions)."""

    V: Float[AnyArray, "*time heads features"]
    a: Float[AnyArray, "*time heads positions"]


@storable
class ReplicatorParameters(eqx.Module):
    """Values V (heads × features) and the attention s itself (heads × positions)."""

    V: Float[AnyArray, "*time heads features"]
    s: Float[AnyArray, "*time heads positions"]


@storable
class TensorFactorisation(AbstractLoss):
    """L = ½‖G - Σ_k V_k ⊗ s_k‖², with attention s_k on the simplex.

    - `geometry="scores"`: s_k = softmax(a_k), and the flow is the gradient's in V and
      a. With g_k = ⟨V_k, G - Ĝ⟩ and J(s) = diag(s) - ssᵀ:

          V̇_k = (G - Ĝ)s_k,   ȧ_k = J(s_k)g_k,   so that   ṡ_k = J(s_k)²g_k.

    - `geometry="replicator"`: the same with ṡ_k = J(s_k)g_k, the gradient flow in the
      metric of Fisher and Shahshahani on the simplex, in which

          L(0) - L(t) = ∫ ‖V̇‖² + Σ_k g_kᵀJ(s_k)g_k.
    """

    target: Float[np.ndarray, "features positions"]
    """G."""
    patterns: Patterns
    """Columns of G in one direction, the strongest first."""
    heads: int = eqx.field(static=True)
    geometry: Literal["scores", "replicator"] = eqx.field(static=True)

    def __init__(
        self,
        target: Any,
        heads: Checked[int],
        geometry: Checked[Literal["scores", "replicator"]] = "scores",
    ):
        """**Arguments:**

        - `target`: G, features × positions; of a value matrix the features are its
            entries.
        - `heads`: how many there are.
        - `geometry`: in which metric the attention moves.
        """
        G = checks.real_array("target", target)
        if G.ndim != 2 or 0 in G.shape:
            raise ValueError(
                f"`target` must be features × positions, got shape {G.shape}."
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
        features, positions = self.target.shape
        attention = "a" if self.geometry == "scores" else "s"
        return {"V": (self.heads, features), attention: (self.heads, positions)}

    def init(self, seed: Checked[Seed] = 0, scale: Checked[float] = 1e-3) -> Any:
        """Zero values and scores distributed as N(0, scale²)."""
        key = seeds.jax_key("seed", seed)
        scale = checks.positive_number("scale", scale, zero_allowed=True)
        shape = (self.heads, self.target.shape[1])
        a = scale * jax.random.normal(key, shape, jnp.float64)
        V = jnp.zeros(self.shapes["V"], jnp.float64)
        if self.geometry == "scores":
            return ScoreParameters(V, a)
        return ReplicatorParameters(V, jax.nn.softmax(a, axis=-1))

    def check(self, params: Any) -> None:
        """Raise a `ValueError` if `params` are not parameters of this problem."""
        scores = self.geometry == "scores"
        kind = ScoreParameters if scores else ReplicatorParameters
        checks.parameters_of(kind, self.shapes, params)
        if not scores:
            s = np.asarray(params.s)
            if np.any(s < 0) or not np.allclose(s.sum(axis=-1), 1.0, atol=1e-9):
                raise ValueError(
                    "`params.s` must be laws over the positions, got rows that sum to "
                    f"{s.sum(axis=-1).tolist()} with entries from {s.min():g}."
                )

    def attention(self, params: Any) -> Float[AnyArray, "heads positions"]:
        if self.geometry == "scores":
            return jax.nn.softmax(params.a, axis=-1)
        return params.s

    def residual(self, params: Any) -> Float[AnyArray, "features positions"]:
        """G - Ĝ."""
        return self.target - params.V.T @ self.attention(params)

    def __call__(self, params: Any) -> Float[AnyArray, ""]:
        return 0.5 * jnp.sum(self.residual(params) ** 2)

    def velocity(self, params: Any, gradient: Any) -> Any:
        """The velocity of the flow, from the gradient of the loss, in the problem's own
        metric."""
        if self.geometry == "scores":
            return jax.tree.map(jnp.negative, gradient)
        s, g = params.s, -gradient.s
        mean = jnp.sum(s * g, axis=-1, keepdims=True)
        return ReplicatorParameters(-gradient.V, s * (g - mean))

    @property
    def is_euclidean(self) -> bool:
        """Whether the flow is a gradient flow in the plain sense."""
        return self.geometry == "scores"

    @property
    def floor(self) -> float:
        """A lower bound of the loss: of all sums of so many products, with any signs,
        the singular value decomposition comes nearest."""
        rest = np.linalg.svd(self.target, compute_uv=False)[self.heads :]
        return float(0.5 * np.sum(rest**2))

    def conserved_terms(self, params: Any) -> dict[str, Float[AnyArray, "terms heads"]]:
        """Σ of the scores of each head; of the replicator, of its attention."""
        if self.geometry == "scores":
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
    def observables(self) -> dict[str, Callable[[Any], Any]]:
        """Functions of the parameters that show what training does, by name.

        - `value_coordinates` (heads × positions): V_k along G's column at each
            position, relative to its length;
        - `position_loss`: ½‖G - Ĝ‖² position by position;
        - `pattern_shares` (heads × patterns): how much of each pattern each head holds;
            columns of G in one direction are a pattern, the strongest first.
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
