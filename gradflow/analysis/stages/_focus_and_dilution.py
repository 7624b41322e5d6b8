"""The stages of Focus and Dilution: one for each direction that opens."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ...problems import AbstractLoss
from ._clock import PROMINENCE, Clock, level
from ._stage import Stage


class _Directions(eqx.Module):
    """The singular values s of W0 and √σ of WQ WKᵀ, their rates of growth, and for the
    attention uᵀv, the cosine between the two sides of each direction."""

    loss: AbstractLoss

    def __call__(
        self, t: Float[Array, ""], params: PyTree
    ) -> dict[str, dict[str, Array]]:
        velocity = jax.tree.map(jnp.negative, jax.grad(self.loss)(params))
        U, s, Vt = jnp.linalg.svd(params.W0, full_matrices=False)
        rate = jnp.einsum("ai,ab,ib->i", U, velocity.W0, Vt)
        product = params.WQ @ params.WK.T
        change = velocity.WQ @ params.WK.T + params.WQ @ velocity.WK.T
        A, sigma, Bt = jnp.linalg.svd(product, full_matrices=False)
        rank = min(params.WQ.shape)
        A, sigma, Bt = A[:, :rank], sigma[:rank], Bt[:rank]
        root = jnp.sqrt(sigma)
        growth = jnp.einsum("ai,ab,ib->i", A, change, Bt)
        return {
            "W0": {"s": s, "rate": rate},
            "attention": {
                "s": root,
                "rate": growth / jnp.where(root > 0, 2 * root, 1.0),
                "sides": jnp.einsum("ai,ia->i", A, Bt),
            },
        }


@dataclass(frozen=True)
class _Opening:
    """The opening of one direction."""

    matrix: str
    index: int
    fastest: float
    """The time at which the direction opens fastest."""
    sides: float
    """uᵀv of a direction of the attention at that time."""

    @property
    def name(self) -> str:
        """The name of the stage in which the direction opens."""
        if self.matrix == "attention":
            return "focus" if self.sides > 0 else "anti-focus"
        return "condensation" if self.index == 0 else "new direction"

    def __str__(self) -> str:
        return f"{self.matrix} {self.index + 1}"


Seen = dict[str, dict[str, np.ndarray]]
"""The values of `_Directions` along the mesh of a clock."""


def _openings(clock: Clock, seen: Seen) -> list[_Opening]:
    """The directions that open, in the order in which they do."""
    found = []
    scale = seen["W0"]["s"][:, 0]
    if not np.any(scale > scale[0]):
        return []
    # Until the first direction has grown there is no scale to compare others with.
    grown = np.arange(len(scale)) > _first_prominent(seen["W0"]["rate"][:, 0], 0)
    for matrix, known in seen.items():
        for i in range(known["s"].shape[1]):
            s, rate = known["s"][:, i], known["rate"][:, i]
            is_open = grown & (s > level(s[0], scale))
            if matrix == "W0" and i == 0:
                is_open = scale > scale[0]
            if not np.any(is_open):
                continue
            at = _first_prominent(rate, int(np.argmax(is_open)))
            sides = float(known["sides"][at, i]) if "sides" in known else 0.0
            found.append(_Opening(matrix, i, float(clock.mesh[at]), sides))
    return sorted(found, key=lambda opening: opening.fastest)


def _first_prominent(rate: Float[np.ndarray, " mesh"], start: int) -> int:
    """The index of the first maximum after `start` from which the rate falls by
    `PROMINENCE`; of the largest maximum if the rate never falls that far."""
    best = start
    for i in range(start, len(rate)):
        if rate[i] > rate[best]:
            best = i
        elif rate[best] > 0 and rate[i] < rate[best] / PROMINENCE:
            break
    return best


def focus_and_dilution(clock: Clock) -> tuple[list[Stage], str]:
    """The stages, or none and the reason why."""
    seen = clock.flow.along(_Directions(clock.loss), clock.mesh)
    openings = _openings(clock, seen)
    if not openings:
        return [], (
            f"until t = {clock.end:g} no direction of the weights opens: none grows "
            "half way from its start to the largest"
        )
    stages, cycle = [], 0
    for members, start, end in clock.stretches([o.fastest for o in openings]):
        group = [openings[i] for i in members]
        name = group[0].name
        evidence = _evidence(clock, seen, group, start, end)
        peaks = [e for e in clock.peaks if start < e.t < end]
        if not name.endswith("focus"):
            stages.append(Stage(name, start, end, cycle, evidence))
            continue
        cycle += 1
        if not peaks:
            stages.append(Stage(name, start, end, cycle, evidence))
            continue
        peak = max(peaks, key=lambda e: e.log_speed).t
        stages.append(Stage(name, start, peak, cycle, evidence))
        diluted = _rare_queries(clock, peak, end)
        stages.append(Stage("dilution", peak, end, cycle, diluted))
    return stages, ""


def _evidence(
    clock: Clock, seen: Seen, group: list[_Opening], start: float, end: float
) -> dict[str, Any]:
    """The measurements that show the opening of the first direction of a group."""
    first = group[0]
    known = seen[first.matrix]
    s, rate = known["s"][:, first.index], known["rate"][:, first.index]
    within = (clock.mesh >= start) & (clock.mesh <= first.fastest)
    ends = clock.flow.along(_Directions(clock.loss), np.array([start, end]))
    before, after = ends[first.matrix]["s"][:, first.index]
    facts: dict[str, Any] = {
        "opens": " and ".join(map(str, group)),
        "from": float(before),
        "to": float(after),
        "rate": float(np.max(rate[within] / s[within], initial=0.0)),
    }
    if first.matrix == "attention":
        facts["sides"] = first.sides
    return facts


def _rare_queries(clock: Clock, start: float, end: float) -> dict[str, str]:
    """The attention of all other queries to the most frequent token."""
    pi, labels = clock.loss.token_frequencies, clock.loss.token_labels
    if pi is None:
        return {}
    top = int(np.argmax(pi))
    attention = clock.flow.observe(
        clock.flow.observable("attention"), np.array([start, end])
    )
    others = np.arange(len(pi)) != top
    before, after = (
        float(pi[others] @ a[others, top] / pi[others].sum()) for a in attention
    )
    token = str(top) if labels is None else labels[top]
    return {f"others' attention to {token!r}": f"{before:.3f} → {after:.3f}"}
