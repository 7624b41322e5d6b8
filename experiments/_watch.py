"""Shared by the experiments on stages: measurements along a flow, at its solver's
steps."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

import gradflow


class Watch(eqx.Module):
    """Measurements at parameters θ with velocity θ̇ = -∇L(θ). Let u₁, s₁, v₁ be the
    leading singular vectors and value of W0, and a₁, σ₁, b₁ those of WQ WKᵀ:

    - `s1` and `root`: s₁ and √σ₁;
    - `condensation_rate`: d log s₁/dt;
    - `condensation`: |u₁ᵀπ|/‖π‖, which is one if W0 ∝ παᵀ;
    - `second`: s₂/s₁, which is zero if W0 has rank one;
    - `attention_rate`: d log √σ₁/dt, the growth rate of WQ and WK if they grow alike;
    - `sides`: a₁ᵀb₁, which is ±1 if WQ ≈ ±WK;
    - `phi`: ⟨Φ, ππᵀ⟩/(‖Φ‖‖π‖²) with Φ = W0 WQ WKᵀ W0ᵀ;
    - `log_speed`: log ‖∇L‖.
    """

    problem: gradflow.Problem

    def __call__(self, params: Any) -> dict[str, Array]:
        velocity = jax.tree.map(jnp.negative, jax.grad(self.problem)(params))
        pi = jnp.asarray(self.problem.population.chain.stationary)
        size = jnp.linalg.norm(pi)
        U, s, Vt = jnp.linalg.svd(params.W0, full_matrices=False)
        product = params.WQ @ params.WK.T
        change = velocity.WQ @ params.WK.T + params.WQ @ velocity.WK.T
        A, sigma, Bt = jnp.linalg.svd(product, full_matrices=False)
        phi = params.W0 @ product @ params.W0.T
        return {
            "s1": s[0],
            "condensation_rate": U[:, 0] @ velocity.W0 @ Vt[0] / s[0],
            "condensation": jnp.abs(U[:, 0] @ pi) / size,
            "second": s[1] / s[0],
            "attention_rate": A[:, 0] @ change @ Bt[0] / (2 * sigma[0]),
            "root": jnp.sqrt(sigma[0]),
            "sides": A[:, 0] @ Bt[0],
            "phi": pi @ phi @ pi / (jnp.linalg.norm(phi) * size**2),
            "log_speed": 0.5
            * jnp.log(sum(jnp.sum(x**2) for x in jax.tree.leaves(velocity))),
        }


class Watched(NamedTuple):
    """A flow, its stages, and a `Watch` at `ts`, the times of its steps."""

    flow: gradflow.Flow
    stages: gradflow.Stages
    ts: Float[np.ndarray, " steps"]
    seen: dict[str, Float[np.ndarray, " steps"]]

    @property
    def condensation_rate(self) -> float:
        """The largest d log s₁/dt along the flow."""
        return float(np.max(self.seen["condensation_rate"]))

    def within(self, start: float, end: float) -> Bool[np.ndarray, " steps"]:
        """A mask of the steps between two times."""
        return (self.ts >= start) & (self.ts <= end)

    @property
    def rest(self) -> gradflow.Plateau | None:
        """The plateau near θ¹, which is the flow's first one apart from its start; None
        if there is none."""
        between = [p for p in self.stages.plateaus if 0 < p.slowest < self.ts[-1]]
        return between[0] if between else None

    def at_rest(self, name: str) -> float:
        """The measurement `name` where the flow is slowest near θ¹; NaN if the flow has
        no such plateau."""
        if self.rest is None:
            return float("nan")
        return float(self.seen[name][np.searchsorted(self.ts, self.rest.slowest)])

    @property
    def first_focus(self) -> gradflow.Stage | None:
        """The first stage of focus or anti-focus, or None."""
        return next((s for s in self.stages if s.name.endswith("focus")), None)

    @property
    def focus(self) -> gradflow.Stage:
        """The first stage of focus or anti-focus, which must exist."""
        if self.first_focus is None:
            raise RuntimeError(f"The flow has no focus:\n{self.stages}")
        return self.first_focus

    @property
    def focus_rate(self) -> float:
        """d log √σ₁/dt where it is steadiest (|d rate/dt|/rate² is smallest), between
        the time at which the flow is slowest near θ¹ and the end of that plateau. Later
        the attention is no longer small, and its growth no longer linear. NaN if the
        flow has no such plateau."""
        if self.rest is None:
            return float("nan")
        inside = self.within(self.rest.slowest, self.rest.end)
        rate = self.seen["attention_rate"][inside]
        change = np.abs(np.gradient(rate, self.ts[inside]))
        grows = rate > 0
        steady = np.where(grows, change / np.where(grows, rate, 1.0) ** 2, np.inf)
        return float(rate[np.argmin(steady)])


def follow(
    problem: gradflow.Problem, *, scale: float, t1: float, seed: int = 0, **options: Any
) -> Watched:
    start = problem.init(seed=seed, scale=scale)
    flow = gradflow.integrate(problem, start, t1, observables=(), **options)
    ts = flow.mesh
    return Watched(
        flow, gradflow.find_stages(flow), ts, flow.observe(Watch(problem), ts)
    )
