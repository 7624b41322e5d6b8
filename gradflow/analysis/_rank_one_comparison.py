"""compare_rank_one(): a flow beside its rank-one reduction."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core import checks
from .._core.checks import Checked
from .._integrate import integrate, same_solver
from ..flows._flow import Flow
from ..models import OneLayerParameters, OneLayerTransformer
from ..problems import RankOneProblem
from ..problems._problem import Problem

PARTED = (0.01, 0.1)
"""Relative distances whose times are printed."""
RANK_ONE_ATTENTION = 0.1
"""How far from rank one WQ and WK may be where a comparison starts by itself."""
LOOKED_AT = 200
"""Times, geometrically spaced, at which a flow is looked at beside its saved times."""


class RankOneComparison(eqx.Module):
    """A flow of the one-layer Transformer and the flow of its rank-one reduction, from
    the same state on. `print(comparison)` shows a summary,
    `gradflow.plotting.rank_one(comparison)` a figure.

    Times are the full flow's: the reduced flow, which is one of its own, is at time
    t - `start` when the full one is at t.
    """

    full: Flow
    reduced: Flow
    start: float
    """When both were the same, but for what projecting took from the full state."""
    alpha: Float[np.ndarray, " m"]
    """α at the start, which the reduction keeps."""
    alpha_bar: Float[np.ndarray, " k"]
    """ᾱ at the start, which the reduction keeps."""
    times: Float[np.ndarray, " times"]
    """From `start` on: where the following are given."""
    distance: Float[np.ndarray, " times"]
    """‖θ(t) - θ'(t)‖/‖θ(t)‖, where θ' is what the reduced state stands for."""
    off_manifold: Float[np.ndarray, " times"]
    """The relative distance of θ(t) from the nearest rank-one state of all, which no
    reduction can undercut."""
    attention_off_manifold: float
    """How far WQ and WK alone were from rank one at the start."""
    full_loss: Float[np.ndarray, " times"]
    reduced_loss: Float[np.ndarray, " times"]
    full_gamma: Float[np.ndarray, "times d"]
    """W0 α: the embeddings along α."""
    reduced_gamma: Float[np.ndarray, "times d"]
    frequent: int
    """The most frequent token."""
    full_attention: Float[np.ndarray, "times d"]
    """Of each query, on the most frequent token."""
    reduced_attention: Float[np.ndarray, "times d"]
    parted: dict[float, float | None]
    """When the relative distance first exceeded 1 % and 10 %; None if it never did."""

    def parts_at(self, threshold: Checked[float]) -> float | None:
        """The first time at which the relative distance exceeds `threshold`, located
        between the times of this comparison; None if it never does."""
        threshold = checks.positive_number("threshold", threshold)
        return _first_crossing(self.times, self.distance, threshold, self._distance_at)

    def _distance_at(self, t: float) -> float:
        return _distance_at(
            self.full, self.reduced, self.start, (self.alpha, self.alpha_bar), t
        )

    def __str__(self) -> str:
        sizes = [_size(flow.start) for flow in (self.reduced, self.full)]
        worst = int(np.argmax(self.distance))
        lines = [
            f"Rank-one reduction from t = {self.start:.6g} to t = {self.times[-1]:.6g} "
            f"({sizes[0]:,} numbers for {sizes[1]:,})",
            f"start            {self.off_manifold[0]:.1e} from rank one, its attention "
            f"{self.attention_off_manifold:.1e}",
        ]
        for threshold, time in self.parted.items():
            when = "at no time" if time is None else f"at t = {time:.6g}"
            lines.append(f"{f'apart by {100 * threshold:g} %':<17}{when}")
        lines += [
            f"largest distance {self.distance[worst]:.1e} at t = "
            f"{self.times[worst]:.6g}{self._before_parting()}",
            f"loss             {self.full_loss[0]:.6f} → {self.full_loss[-1]:.6f}, "
            f"reduced {self.reduced_loss[-1]:.6f}",
        ]
        return "\n".join(lines)

    def _before_parting(self) -> str:
        """How well attention is followed as long as the parameters are."""
        first = self.parted[PARTED[0]]
        before = self.times <= (np.inf if first is None else first)
        gap = np.abs(self.full_attention - self.reduced_attention)[before]
        until = "" if first is None else f" until t = {first:.6g}"
        return f"; attention within {gap.max():.1e}{until}"


def compare_rank_one(
    flow: Checked[Flow],
    start: Checked[float | None] = None,
    end: Checked[float | None] = None,
) -> RankOneComparison:
    """Project a flow's state at the time `start` onto the rank-one manifold, integrate
    the reduction from there by the same solver at the same tolerances, and compare.

    **Arguments:**

    - `flow`: of a `Problem` with a `OneLayerTransformer`.
    - `start`: when the reduction takes over. By default the time at which the flow is
        nearest to the manifold, among those at which WQ and WK, which are small for
        long, are by themselves rank one within 10 %: after condensation, when focus has
        grown out of the noise.
    - `end`: until when to compare; by default the end of the flow.

    **Returns:**

    A `RankOneComparison`, at the flow's saved times between `start` and `end` and at
    200 geometrically spaced ones.
    """
    problem = _one_layer_problem(flow)
    start, end = _window(flow, start, end)
    solver = same_solver(flow.settings, flow.solver)
    reduction = RankOneProblem(problem.population)
    if start is None:
        start = _nearest_time(reduction, flow, _times_between(flow, 0.0, end)[:-1])
    times = _times_between(flow, start, end)
    states = _stacked([flow.at(float(t)) for t in times])
    first = _at(states, 0)
    alpha, alpha_bar = map(np.asarray, reduction.directions(first))
    reduced = integrate(
        reduction,
        reduction.project(first),
        float(times[-1] - start),
        ts=times - start,
        solver=solver,
        rtol=flow.settings.rtol,
        atol=flow.settings.atol,
        step=flow.settings.step,
    )
    model = problem.model
    embedded = reduction.embed(
        reduced.params, model.width, model.head_width, alpha, alpha_bar
    )
    distance = _relative_distance(states, embedded)
    off = _off_manifold(reduction, states)
    frequent = int(np.argmax(problem.population.chain.stationary))
    full_loss, full_attention = _seen(problem, states, frequent)
    reduced_loss, reduced_attention = _seen(reduction, reduced.params, frequent)

    def distance_at(t: float) -> float:
        return _distance_at(flow, reduced, start, (alpha, alpha_bar), t)

    return RankOneComparison(
        full=flow,
        reduced=reduced,
        start=start,
        alpha=alpha,
        alpha_bar=alpha_bar,
        times=times,
        distance=distance,
        off_manifold=off[:, 0],
        attention_off_manifold=float(off[0, 1]),
        full_loss=full_loss,
        reduced_loss=reduced_loss,
        full_gamma=states.W0 @ alpha,
        reduced_gamma=np.asarray(reduced.params.gamma),
        frequent=frequent,
        full_attention=full_attention,
        reduced_attention=reduced_attention,
        parted={
            threshold: _first_crossing(times, distance, threshold, distance_at)
            for threshold in PARTED
        },
    )


#
# When to start
#


def _times_between(flow: Flow, start: float, end: float) -> Float[np.ndarray, " times"]:
    """Both ends, the saved times between them, and geometrically spaced ones. From 0 to
    the end of a flow these are what `integrate` saves by default, and cost nothing."""
    saved = flow.ts[(flow.ts > start) & (flow.ts < end)]
    spaced = np.geomspace(start if start > 0 else 1e-5 * end, end, LOOKED_AT)
    return np.unique(np.concatenate([[start], saved, spaced[1:-1], [end]]))


def _nearest_time(
    reduction: RankOneProblem, flow: Flow, times: Float[np.ndarray, " some"]
) -> float:
    """Where the flow is nearest to the manifold with rank-one attention: the best of
    `times`, and then, on the dense output, the best between its neighbours."""
    from scipy.optimize import minimize_scalar

    def score(t: float) -> float:
        """The distance; above one, and by how much, where attention is not rank one."""
        distance, attention = _off_manifold_of(reduction, flow.at(t))
        if attention > RANK_ONE_ATTENTION:
            return 1 + float(attention)
        # Below the tolerance the distance is the solver's doing, and no better.
        return max(float(distance), flow.settings.rtol)

    scores = np.array([score(float(t)) for t in times])
    best = int(np.argmin(scores))
    if scores[best] > 1:
        raise ValueError(
            "`start` must be given, as WQ and WK are nowhere rank one within "
            f"{100 * RANK_ONE_ATTENTION:g} % until t = {times[-1]:g} in this flow: at "
            f"best within {100 * (scores[best] - 1):.0f} %, at t = {times[best]:g}."
        )
    if scores[best] == flow.settings.rtol:
        return float(times[best])
    low, high = times[max(best - 1, 0)], times[min(best + 1, len(times) - 1)]
    found: Any = minimize_scalar(
        score, bounds=(low, high), method="bounded", options={"xatol": 1e-4 * high}
    )
    return float(found.x if found.fun < scores[best] else times[best])


@eqx.filter_jit
def _off_manifold_of(
    reduction: RankOneProblem, state: OneLayerParameters
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The distances of all parameters, and of WQ and WK, from rank one."""
    return reduction.distance(state), reduction.attention_distance(state)


def _off_manifold(
    reduction: RankOneProblem, states: OneLayerParameters
) -> Float[np.ndarray, "times 2"]:
    count = len(states.W0)
    # One by one: compiled once, however many there are.
    return np.array([_off_manifold_of(reduction, _at(states, i)) for i in range(count)])


#
# How far apart
#


def _relative_distance(
    states: OneLayerParameters, others: OneLayerParameters
) -> Float[np.ndarray, " times"]:
    """‖θ - θ'‖/‖θ‖ at each time."""
    theta, other = (
        np.concatenate(
            [np.reshape(leaf, (len(leaf), -1)) for leaf in jax.tree.leaves(tree)],
            axis=1,
        )
        for tree in (states, others)
    )
    norms = np.linalg.norm(theta, axis=1)
    return np.linalg.norm(theta - other, axis=1) / np.where(norms > 0, norms, 1.0)


def _distance_at(
    full: Flow, reduced: Flow, start: float, directions: tuple[Any, Any], t: float
) -> float:
    problem: Any = full.problem
    reduction: Any = reduced.problem
    states = full.at([t])
    embedded = reduction.embed(
        reduced.at([min(t - start, reduced.ts[-1])]),
        problem.model.width,
        problem.model.head_width,
        *directions,
    )
    return float(_relative_distance(states, embedded)[0])


def _first_crossing(
    times: Float[np.ndarray, " times"],
    distance: Float[np.ndarray, " times"],
    threshold: float,
    distance_at: Callable[[float], float],
) -> float | None:
    """The first time at which the distance exceeds `threshold`, or None."""
    from scipy.optimize import brentq

    beyond = np.flatnonzero(distance > threshold)
    if len(beyond) == 0:
        return None
    if beyond[0] == 0:
        return float(times[0])
    low, high = times[beyond[0] - 1], times[beyond[0]]
    root: Any = brentq(lambda t: distance_at(t) - threshold, low, high)
    return float(root)


@eqx.filter_jit
def _seen_of(
    problem: Any, state: PyTree, frequent: Any
) -> tuple[Float[Array, ""], Float[Array, " d"]]:
    return problem(state), problem.observables["attention"](state)[:, frequent]


def _seen(
    problem: Any, states: PyTree, frequent: int
) -> tuple[Float[np.ndarray, " times"], Float[np.ndarray, "times d"]]:
    """The loss, and the attention of each query on the most frequent token."""
    count = len(jax.tree.leaves(states)[0])
    rows = [
        _seen_of(problem, _at(states, i), jnp.asarray(frequent)) for i in range(count)
    ]
    losses, attention = zip(*rows, strict=True)
    return np.array(losses), np.array(attention)


def _stacked(states: list[PyTree]) -> PyTree:
    """By NumPy: JAX would compile anew for each number of states."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


def _at(states: PyTree, index: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[index]), states)


def _size(params: PyTree) -> int:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(params))


#
# Checks, before any work starts
#


def _one_layer_problem(flow: Any) -> Problem:
    if not isinstance(flow, Flow):
        raise ValueError(f"`flow` must be a Flow, got {type(flow).__name__}.")
    problem = flow.require_problem("`gradflow.compare_rank_one`")
    model = getattr(problem, "model", None)
    if not isinstance(problem, Problem) or not isinstance(model, OneLayerTransformer):
        raise ValueError(
            "`flow` must be one of a Problem with a OneLayerTransformer, which has the "
            f"rank-one reduction; its loss is a {type(problem).__name__}."
        )
    return problem


def _window(flow: Flow, start: Any, end: Any) -> tuple[float | None, float]:
    last = float(flow.ts[-1])
    end = last if end is None else checks.positive_number("end", end)
    if end > last:
        raise ValueError(
            f"`end` must lie within the flow, which ends at {last:g}, got {end:g}."
        )
    if start is not None:
        start = checks.positive_number("start", start, zero_allowed=True)
        if start >= end:
            raise ValueError(
                f"`start` must lie before the end of the comparison, {end:g}, got "
                f"{start:g}."
            )
    return start, end
