"""compare_rank_one(): a flow compared with its rank-one reduction."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._core import checks
from .._core.checks import Checked
from .._core.compiled import jit
from .._integrate import integrate, same_solver
from ..flows import Flow, check_integrated
from ..problems import AbstractLoss, Problem, RankOneProblem

PARTED = (0.01, 0.1)
"""The relative distances whose times are printed."""
RANK_ONE_ATTENTION = 0.1
"""The largest relative distance of WQ and WK from rank one at a default start."""
LOOKED_AT = 200
"""The number of geometrically spaced times at which flows are compared, in addition to
the saved times."""


class RankOneComparison(eqx.Module):
    """A flow of the one-layer Transformer and the flow of its rank-one reduction from
    the same state. `print` shows a summary, `gradflow.plotting.plot_rank_one` a figure.

    Times are those of the full flow: the reduced flow is at time t - `start` when the
    full flow is at t.
    """

    full: Flow
    reduced: Flow
    start: float
    """The time at which the full state was projected to start the reduced flow."""
    alpha: Float[np.ndarray, " m"]
    """α at the start, which the reduction keeps constant."""
    alpha_bar: Float[np.ndarray, " k"]
    """ᾱ at the start, which the reduction keeps constant."""
    times: Float[np.ndarray, " times"]
    """The times of the curves below, from `start` on."""
    distance: Float[np.ndarray, " times"]
    """‖θ(t) - θ'(t)‖/‖θ(t)‖, where θ' are the full parameters of the reduced state."""
    off_manifold: Float[np.ndarray, " times"]
    """The relative distance of θ(t) from the nearest rank-one state: a lower bound of
    `distance`."""
    attention_off_manifold: float
    """The relative distance of WQ and WK alone from rank one at the start."""
    full_loss: Float[np.ndarray, " times"]
    reduced_loss: Float[np.ndarray, " times"]
    full_gamma: Float[np.ndarray, "times d"]
    """W0 α: the embeddings along α."""
    reduced_gamma: Float[np.ndarray, "times d"]
    frequent: int
    """The most frequent token."""
    full_attention: Float[np.ndarray, "times d"]
    """The attention of each query to the most frequent token."""
    reduced_attention: Float[np.ndarray, "times d"]
    parted: dict[float, float | None]
    """The times at which the relative distance first exceeds 1 % and 10 %; None if it
    never does."""

    def parts_at(self, threshold: Checked[float]) -> float | None:
        """The first time at which the relative distance exceeds `threshold`, located
        between the times of this comparison; None if there is none."""
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
        """The largest difference in attention until the parameters have parted."""
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
    """Project the state of a flow at the time `start` onto the rank-one manifold,
    integrate the reduction from there with the same solver and tolerances, and compare.

    **Arguments:**

    - `flow`: a flow of a `Problem` with a `OneLayerTransformer`.
    - `start`: the time at which the reduction starts. By default the time at which the
        flow is nearest to the manifold, among those at which WQ and WK, which stay
        small for long, are rank one within 10 % by themselves: after condensation, when
        focus has grown out of the noise.
    - `end`: the end of the comparison. By default the end of the flow.

    **Returns:**

    A `RankOneComparison` at the saved times of the flow between `start` and `end`, and
    at 200 geometrically spaced times.
    """
    flow = check_integrated(flow)
    problem = _one_layer_problem(flow)
    start, end = _window(flow, start, end)
    reduction = RankOneProblem(problem.population)
    if start is None:
        start = _nearest_time(reduction, flow, _times_between(flow, 0.0, end)[:-1])
    times = _times_between(flow, start, end)
    states = _stacked([flow.at(float(t)) for t in times])
    first = _at(states, 0)
    alpha, alpha_bar = map(np.asarray, reduction.directions(first))
    reduced = _reduced_flow(flow, reduction, first, times - start)
    model = problem.model
    embedded = reduction.embed(
        reduced.params, model.width, model.head_width, alpha, alpha_bar
    )
    distance = _relative_distance(states, embedded)
    off = _off_manifold(reduction, states)
    frequencies = problem.token_frequencies
    assert frequencies is not None  # every unordered population has them
    frequent = int(np.argmax(frequencies))
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


def _reduced_flow(
    flow: Flow,
    reduction: RankOneProblem,
    first: PyTree,
    ts: Float[np.ndarray, " times"],
) -> Flow:
    """The flow of the reduction from the full state `first`, saved at the times `ts`,
    with the solver and the tolerances of the full flow."""
    return integrate(
        reduction,
        reduction.project(first),
        float(ts[-1]),
        ts=ts,
        solver=same_solver(flow.settings, flow.solver),
        rtol=flow.settings.rtol,
        atol=flow.settings.atol,
        step=flow.settings.step,
    )


#
# When to start
#


def _times_between(flow: Flow, start: float, end: float) -> Float[np.ndarray, " times"]:
    """Both ends, the saved times between them, and geometrically spaced times. From 0
    to the end of a flow these are the times that `integrate` saves by default, at no
    cost."""
    saved = flow.ts[(flow.ts > start) & (flow.ts < end)]
    spaced = np.geomspace(start if start > 0 else 1e-5 * end, end, LOOKED_AT)
    return np.unique(np.concatenate([[start], saved, spaced[1:-1], [end]]))


def _nearest_time(
    reduction: RankOneProblem, flow: Flow, times: Float[np.ndarray, " some"]
) -> float:
    """The time at which the flow is nearest to the manifold and its attention is rank
    one: the best of `times`, refined on the dense output between its neighbours."""
    from scipy.optimize import minimize_scalar

    def score(t: float) -> float:
        """The distance; where attention is not rank one, one plus its distance."""
        distance, attention = _off_manifold_of(reduction, flow.at(t))
        if attention > RANK_ONE_ATTENTION:
            return 1 + float(attention)
        # Below the tolerance, differences between distances are solver error.
        return max(float(distance), flow.settings.rtol)

    scores = np.array([score(float(t)) for t in times])
    best = int(np.argmin(scores))
    if scores[best] > 1:
        raise ValueError(
            f"`start` must be given: up to t = {times[-1]:g}, WQ and WK of this flow "
            f"are never rank one within {100 * RANK_ONE_ATTENTION:g} %. They come "
            f"closest at t = {times[best]:g}, within {100 * (scores[best] - 1):.0f} %."
        )
    if scores[best] == flow.settings.rtol:
        return float(times[best])
    low, high = times[max(best - 1, 0)], times[min(best + 1, len(times) - 1)]
    found: Any = minimize_scalar(
        score, bounds=(low, high), method="bounded", options={"xatol": 1e-4 * high}
    )
    return float(found.x if found.fun < scores[best] else times[best])


@jit
def _off_manifold_of(
    reduction: RankOneProblem, state: PyTree
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The distances of all parameters, and of WQ and WK, from rank one."""
    return reduction.distance(state), reduction.attention_distance(state)


def _off_manifold(
    reduction: RankOneProblem, states: PyTree
) -> Float[np.ndarray, "times 2"]:
    count = len(states.W0)
    # One by one, which compiles once for any number of states.
    return np.array([_off_manifold_of(reduction, _at(states, i)) for i in range(count)])


#
# How far apart
#


def _relative_distance(states: PyTree, others: PyTree) -> Float[np.ndarray, " times"]:
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
    full: Flow,
    reduced: Flow,
    start: float,
    directions: tuple[Float[np.ndarray, " m"], Float[np.ndarray, " k"]],
    t: float,
) -> float:
    """‖θ - θ'‖/‖θ‖ at time t of the full flow."""
    reduction = reduced.problem
    assert isinstance(reduction, RankOneProblem)
    states = full.at([t])
    embedded = reduction.embed(
        reduced.at([min(t - start, reduced.ts[-1])]),
        states.WQ.shape[1],
        states.WQ.shape[2],
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


@jit
def _seen_of(
    problem: AbstractLoss, state: PyTree, frequent: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, " d"]]:
    return problem.in_double(state), problem.observables["attention"](state)[
        :, frequent
    ]


def _seen(
    problem: AbstractLoss, states: PyTree, frequent: int
) -> tuple[Float[np.ndarray, " times"], Float[np.ndarray, "times d"]]:
    """The loss, and the attention of each query to the most frequent token."""
    count = len(jax.tree.leaves(states)[0])
    rows = [
        _seen_of(problem, _at(states, i), jnp.asarray(frequent)) for i in range(count)
    ]
    losses, attention = zip(*rows, strict=True)
    return np.array(losses), np.array(attention)


def _stacked(states: list[PyTree]) -> PyTree:
    """States stacked by NumPy: JAX would compile again for each number of them."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


def _at(states: PyTree, index: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[index]), states)


def _size(params: PyTree) -> int:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(params))


#
# Checks, before any work starts
#


def _one_layer_problem(flow: Flow) -> Problem:
    """The problem of the flow, if it has a rank-one reduction."""
    problem = flow.require_problem("`gradflow.compare_rank_one`")
    reduced = RankOneProblem.reduces
    if not isinstance(problem, Problem) or not isinstance(problem.model, reduced):
        raise ValueError(
            "`flow` must be a flow of a Problem with a OneLayerTransformer, which "
            f"has a rank-one reduction, but its loss is a {type(problem).__name__}."
        )
    return problem


def _window(flow: Flow, start: object, end: object) -> tuple[float | None, float]:
    """The checked start, if one is given, and end of a comparison."""
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
