"""The speed of a flow, its prominent extrema and the plateaus between them."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..._core.ravel import path_name
from ..._core.types import AnyArray
from ...flows import AbstractTrajectory
from ...problems import AbstractLoss, descent
from .._crossing import crossing
from ._stage import Plateau, Stage

PROMINENCE = 2.0
"""The factor by which the speed must rise and fall around a transition."""


class _Speed(eqx.Module):
    """log v, where v is the speed in the loss's metric, and the rate -d log v/dt at
    which the flow slows down: gᵀHg/gᵀg in the Euclidean metric."""

    loss: AbstractLoss

    def __call__(self, t: Float[Array, ""], params: PyTree) -> tuple[Array, Array]:
        def log_speed(params: PyTree) -> Array:
            _, _, power = descent(self.loss, params)
            return 0.5 * jnp.log(power)

        _, velocity, power = descent(self.loss, params)
        value, change = jax.jvp(log_speed, (params,), (velocity,))
        return value, jnp.where(power > 0, -change, 0.0)


class Extremum(NamedTuple):
    """A local extremum of the speed."""

    t: float
    log_speed: float
    kind: int
    """1 for a maximum, -1 for a minimum."""


class Clock:
    """The speed along a flow, its prominent extrema and the stretches between them."""

    def __init__(self, flow: AbstractTrajectory, loss: AbstractLoss):
        self.flow, self.loss = flow, loss
        self.speed = _Speed(loss)
        self.mesh = np.unique(np.append(0.0, flow.mesh))
        self.log_speed, self.curvature = flow.along(self.speed, self.mesh)
        self.end = float(self.mesh[-1])
        self.extrema = _prominent(list(self._extrema()))
        """Including both ends of the flow, each of the kind opposite to its
        neighbour's."""

    @property
    def peaks(self) -> list[Extremum]:
        """The maxima of the speed, without the ends of the flow."""
        return [e for e in self.extrema[1:-1] if e.kind == 1]

    @property
    def dips(self) -> list[Extremum]:
        """The minima of the speed, without the ends of the flow."""
        return [e for e in self.extrema[1:-1] if e.kind == -1]

    @property
    def why_none(self) -> str:
        """Why the flow has no transition."""
        first, last = (float(np.exp(self.log_speed[i])) for i in (0, -1))
        if first == last == 0:
            return "the flow does not move"
        how = "only gains speed" if last > first else "only loses speed"
        return (
            f"until t = {self.end:g} the flow {how} (‖∇L‖ from {first:.2g} to "
            f"{last:.2g}); it is too short to contain a transition, or begins after it"
        )

    def _extrema(self) -> Iterator[Extremum]:
        """The ends of the flow, and between them the times at which the curvature along
        it changes sign."""
        signs = np.sign(self.curvature)
        yield Extremum(0.0, float(self.log_speed[0]), 0)
        for i in np.flatnonzero(signs[:-1] * signs[1:] < 0):
            begin, end = self.mesh[i : i + 2]
            t = crossing(self.flow, self.speed, begin, end, lambda seen: seen[1])
            log_speed = self.flow.along(self.speed, np.array([t]))[0]
            yield Extremum(t, float(log_speed[0]), int(signs[i + 1]))
        yield Extremum(self.end, float(self.log_speed[-1]), 0)

    def meeting(self, i: int) -> float:
        """The time at which the speed is the geometric mean of two neighbouring
        extrema, where the plateau and the transition meet."""
        a, b = self.extrema[i : i + 2]
        low, high = sorted([a.log_speed, b.log_speed])
        if b is self.extrema[-1] and b.kind == -1 and i > 0:
            # The speed at the end only depends on where the horizon was set.
            low = max(low, min(high, self.extrema[i - 1].log_speed))
        level = 0.5 * (low + high)
        inside = (self.mesh > a.t) & (self.mesh < b.t)
        times = np.concatenate([[a.t], self.mesh[inside], [b.t]])
        values = np.concatenate([[a.log_speed], self.log_speed[inside], [b.log_speed]])
        above = values > level
        i = int(np.flatnonzero(above[:-1] != above[1:])[0])
        begin, end = times[i : i + 2]
        return crossing(self.flow, self.speed, begin, end, lambda v: v[0] - level)

    @property
    def meetings(self) -> list[float]:
        """The ends of the flow, and the times between at which plateaus and transitions
        meet."""
        between = range(len(self.extrema) - 1)
        return [0.0, *(self.meeting(i) for i in between), self.end]

    def stretches(
        self,
        times: Sequence[float],
        otherwise: Callable[[int], float | None] = lambda i: None,
    ) -> list[tuple[list[int], float, float]]:
        """Cut the flow where it is slowest between consecutive `times`, which are
        sorted. Each stretch is given by the indices of the times in it, its start and
        its end. If the speed has no minimum between time i - 1 and time i, the cut is
        at `otherwise(i)`; if that is None, both times are in the same stretch."""
        groups, starts = [[0]], [0.0]
        for i in range(1, len(times)):
            dips = [e for e in self.dips if times[i - 1] < e.t < times[i]]
            cut = min(dips, key=lambda e: e.log_speed).t if dips else otherwise(i)
            if cut is None:
                groups[-1].append(i)
            else:
                groups.append([i])
                starts.append(cut)
        return list(zip(groups, starts, [*starts[1:], self.end], strict=True))

    @property
    def plateaus(self) -> tuple[Plateau, ...]:
        """The stretch around each minimum of the speed."""
        found, meetings = [], self.meetings
        watch = _AtRest(self.loss)
        for i, extremum in enumerate(self.extrema):
            if extremum.kind == -1:
                seen = self.flow.along(watch, np.array([0.0, extremum.t]))
                found.append(
                    Plateau(
                        start=meetings[i],
                        end=meetings[i + 1],
                        slowest=extremum.t,
                        speed=math.exp(extremum.log_speed),
                        loss=float(seen["loss"][1]),
                        ranks=_ranks(seen["singular_values"]),
                    )
                )
        return tuple(found)


def _prominent(extrema: list[Extremum]) -> list[Extremum]:
    """The extrema around which the speed rises and falls by `PROMINENCE` or more. The
    smallest rise is removed first, with both of its ends, except an end of the flow."""
    kept = list(extrema)
    while len(kept) > 2:
        rises = [abs(b.log_speed - a.log_speed) for a, b in itertools.pairwise(kept)]
        least = int(np.argmin(rises))
        if not rises[least] < math.log(PROMINENCE):
            break
        if least == 0:
            del kept[1]
        elif least == len(kept) - 2:
            del kept[-2]
        else:
            del kept[least : least + 2]
    if len(kept) == 2:  # monotone, or nearly
        kind = 1 if kept[0].log_speed > kept[1].log_speed else -1
        return [kept[0]._replace(kind=kind), kept[1]._replace(kind=-kind)]
    first, last = kept[0], kept[-1]
    kept[0] = first._replace(kind=-kept[1].kind)
    kept[-1] = last._replace(kind=-kept[-2].kind)
    return kept


class _AtRest(eqx.Module):
    """The loss, and the singular values of every weight matrix."""

    loss: AbstractLoss

    def __call__(self, t: Float[Array, ""], params: PyTree) -> dict[str, PyTree]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        return {
            "loss": self.loss(params),
            "singular_values": {
                path_name(where) or "params": jnp.linalg.svd(leaf, compute_uv=False)
                for where, leaf in leaves
                if jnp.ndim(leaf) == 2
            },
        }


def _ranks(values: dict[str, Float[np.ndarray, "two r"]]) -> dict[str, int]:
    """The number of open directions of each matrix, from its singular values at the
    start and now."""
    scale = max((float(s[1, 0]) for s in values.values()), default=0.0)
    return {k: int(np.sum(s[1] > level(s[0], scale))) for k, s in values.items()}


def level(
    start: Float[AnyArray, "*shape"] | np.floating | float,
    scale: Float[AnyArray, "*shape"] | float,
) -> Float[np.ndarray, "*shape"]:
    """The value half way, on a logarithmic scale, from `start` to `scale`."""
    return np.sqrt(np.maximum(start, np.finfo(float).eps * scale) * scale)


def plain_stages(clock: Clock) -> Iterator[Stage]:
    """Plateaus and transitions in turn."""
    meetings = clock.meetings
    for i, extremum in enumerate(clock.extrema):
        yield Stage(
            "transition" if extremum.kind == 1 else "plateau",
            meetings[i],
            meetings[i + 1],
            0,
            {"fastest" if extremum.kind == 1 else "slowest": extremum.t}
            | {"speed": math.exp(extremum.log_speed)},
        )
