"""The stages of Focus and Dilution, by the directions that open."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...problems._problem import Problem
from ._clock import PROMINENCE, Clock, level
from ._stage import Stage


class _Directions(eqx.Module):
    """Singular values of W0 and √ of those of WQ WKᵀ, by which rates they grow, and how
    the two sides of the attention's directions point."""

    problem: Problem

    def __call__(self, t: Any, params: Any) -> dict[str, dict[str, Array]]:
        velocity = jax.tree.map(jnp.negative, jax.grad(self.problem)(params))
        U, s, Vt = jnp.linalg.svd(params.W0, full_matrices=False)
        rate = jnp.einsum("ai,ab,ib->i", U, velocity.W0, Vt)
        product = params.WQ @ params.WK.T
        change = velocity.WQ @ params.WK.T + params.WQ @ velocity.WK.T
        A, sigma, Bt = jnp.linalg.svd(product, full_matrices=False)
        rank = min(self.problem.model.width, self.problem.model.head_width)
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


class _Opening(NamedTuple):
    """That a direction opens."""

    matrix: str
    index: int
    fastest: float
    """The time at which it does fastest."""
    sides: float
    """uᵀv of an attention's direction then."""

    @property
    def name(self) -> str:
        if self.matrix == "attention":
            return "focus" if self.sides > 0 else "anti-focus"
        return "condensation" if self.index == 0 else "new direction"

    def __str__(self) -> str:
        return f"{self.matrix} {self.index + 1}"


def _openings(clock: Clock, seen: dict[str, Any]) -> list[_Opening]:
    found = []
    scale = seen["W0"]["s"][:, 0]
    if not np.any(scale > scale[0]):
        return []
    # Until it has grown there is no scale to compare others with.
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
    """The first index after `start` of a maximum from which the rate falls by
    `PROMINENCE`; of the greatest, if it never does."""
    best = start
    for i in range(start, len(rate)):
        if rate[i] > rate[best]:
            best = i
        elif rate[best] > 0 and rate[i] < rate[best] / PROMINENCE:
            break
    return best


def focus_and_dilution(clock: Clock) -> tuple[list[Stage], str]:
    problem: Any = clock.loss
    seen = clock.flow.along(_Directions(problem), clock.mesh)
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
    clock: Clock, seen: dict[str, Any], group: list[_Opening], start: float, end: float
) -> dict[str, Any]:
    first = group[0]
    known = seen[first.matrix]
    s, rate = known["s"][:, first.index], known["rate"][:, first.index]
    within = (clock.mesh >= start) & (clock.mesh <= first.fastest)
    problem: Any = clock.loss
    ends = clock.flow.along(_Directions(problem), np.array([start, end]))
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


def _rare_queries(clock: Clock, start: float, end: float) -> dict[str, Any]:
    """What the queries other than the most frequent token pay to it."""
    problem: Any = clock.loss
    law = problem.population.chain.stationary
    top = int(np.argmax(law))
    attention = clock.flow.observe(
        problem.observables["attention"], np.array([start, end])
    )
    others = np.arange(len(law)) != top
    before, after = (
        float(law[others] @ a[others, top] / law[others].sum()) for a in attention
    )
    token = problem.population.chain.labels[top]
    return {f"others' attention to {token!r}": f"{before:.3f} → {after:.3f}"}
