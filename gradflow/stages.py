"""The stages of a flow: where it rests, where it moves, and what opens when it does.

**Any flow.** The speed v = ‖∇L‖ falls while the flow comes near a critical point and
grows while it leaves it: d log v/dt = -gᵀHg/gᵀg with g = ∇L, H = ∇²L. So a *plateau*
lies around each local minimum of v, a *transition* around each maximum, and extrema are
where the curvature gᵀHg along the flow changes sign. Speeds are compared by their
ratios: a maximum counts where v rose and fell by `PROMINENCE` about it, and plateau and
transition meet where v is the geometric mean of its two extrema; in the end, which is
none, where it is as slow again as where the last transition began.

**Focus and Dilution.** The weights of the one-layer Transformer start at a small scale
and grow one direction after another: singular values s_i of W0, and in the attention
√σ_j of WQ WKᵀ. A direction is *open* once s(t) > √(s(0) S(t)), half way, on a
logarithmic scale, from where it started to the largest scale S = σ₁(W0) of its time,
which must have grown first. It opens fastest where ds/dt has its first maximum from
then on, from which it falls by `PROMINENCE`. In the order of these times:

- the first direction of W0 is `condensation`;
- a direction of the attention is `focus`, or `anti-focus` where its query side u and
  its key side v, the singular vectors of WQ WKᵀ, point apart: uᵀv < 0, as for κ < 0;
- a further direction of W0 is `new direction`.

Between two of them the stage changes where the speed is least, at the flow's closest
approach to the saddle in between. A focus ends, and `dilution` begins, where the speed
is greatest: from there on the flow relaxes. Directions between whose openings the
speed has no minimum opened in one stage, named after the first. The cycle is the number
of focus stages so far.

Nothing here depends on the saved times: what happens is looked for on the steps of the
solver, and located between them on its dense output.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ._checks import Checked
from ._events import crossing
from ._flow import Flow
from ._metric import descent
from ._ravel import path_name
from .models import OneLayerTransformer
from .problem import Problem

PROMINENCE = 2.0
"""By what factor the speed must rise and fall for its maximum to be a transition."""


class Stage(eqx.Module):
    """A stretch of a flow with a name."""

    name: str = eqx.field(static=True)
    start: float
    end: float
    cycle: int
    """How many focus stages began so far; zero where nothing is named after them."""
    evidence: dict[str, Any]
    """The numbers that it rests on."""


class Plateau(eqx.Module):
    """A stretch where a flow is slow."""

    start: float
    end: float
    slowest: float
    """The time at which it is slowest."""
    speed: float
    """‖∇L‖ then."""
    loss: float
    ranks: dict[str, int]
    """How many directions of each weight matrix are open then."""


class Stages(Sequence):
    """The stages of a flow, in order. `print` shows them as a table."""

    def __init__(
        self,
        stages: Sequence[Stage],
        plateaus: Sequence[Plateau],
        reason: str = "",
    ):
        self._stages = tuple(stages)
        self.plateaus = tuple(plateaus)
        """Where the flow rests, at its start and at its end too."""
        self.reason = reason
        """Why there are no stages, if there are none."""

    def __len__(self) -> int:
        return len(self._stages)

    def __getitem__(self, index: Any) -> Any:
        return self._stages[index]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self._stages)

    @property
    def boundaries(self) -> Float[np.ndarray, " boundaries"]:
        """The times at which one stage passes into the next."""
        return np.array([stage.end for stage in self._stages[:-1]])

    def __repr__(self) -> str:
        return f"Stages({', '.join(self.names)})"

    def __str__(self) -> str:
        if not self._stages:
            return f"no stage found: {self.reason}"
        lines = [f"{'stage':<14} {'cycle':>5} {'start':>10} {'end':>10}  evidence"]
        for s in self._stages:
            facts = ", ".join(f"{k} {_readable(v)}" for k, v in s.evidence.items())
            lines.append(
                f"{s.name:<14} {s.cycle or '':>5} {s.start:>10.5g} {s.end:>10.5g}  "
                f"{facts}"
            )
        return "\n".join(lines)


def _readable(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def find_stages(flow: Checked[Flow]) -> Stages:
    """The stages of a flow; see the definitions at the top of `gradflow.stages`.

    A flow of a one-layer Transformer has those of Focus and Dilution, any other
    plateaus and transitions. Where there are none the answer is empty, and says why.
    """
    if not isinstance(flow, Flow):
        raise ValueError(f"`flow` must be a Flow, got {type(flow).__name__}.")
    loss = flow.require_problem("`gradflow.find_stages`")
    clock = _Clock(flow, loss)
    if not clock.peaks:
        return Stages((), (), clock.why_none)
    if isinstance(loss, Problem) and isinstance(loss.model, OneLayerTransformer):
        stages, reason = _focus_and_dilution(clock)
        return Stages(stages, clock.plateaus, reason)
    return Stages(list(_plain(clock)), clock.plateaus)


#
# Any flow
#


class _Speed(eqx.Module):
    """log v of the speed v, in the loss's metric, and the rate -d log v/dt at which the
    flow slows down; in Euclid's metric that is gᵀHg/gᵀg."""

    loss: Callable

    def __call__(self, t: Any, params: PyTree) -> tuple[Array, Array]:
        def log_speed(params: PyTree) -> Array:
            _, _, power = descent(self.loss, params)
            return 0.5 * jnp.log(power)

        _, velocity, power = descent(self.loss, params)
        value, change = jax.jvp(log_speed, (params,), (velocity,))
        return value, jnp.where(power > 0, -change, 0.0)


class _Extremum(NamedTuple):
    t: float
    log_speed: float
    kind: int
    """1 for a maximum, -1 for a minimum."""


class _Clock:
    """A flow's speed, its prominent extrema and what lies between them."""

    def __init__(self, flow: Flow, loss: Callable):
        self.flow, self.loss = flow, loss
        self.speed = _Speed(loss)
        self.mesh = np.unique(np.append(0.0, flow.mesh))
        self.log_speed, self.curvature = flow.along(self.speed, self.mesh)
        self.end = float(self.mesh[-1])
        self.extrema = _prominent(list(self._extrema()))
        """With both ends of the flow, each as the opposite of its neighbour."""

    @property
    def peaks(self) -> list[_Extremum]:
        return [e for e in self.extrema[1:-1] if e.kind == 1]

    @property
    def dips(self) -> list[_Extremum]:
        return [e for e in self.extrema[1:-1] if e.kind == -1]

    @property
    def why_none(self) -> str:
        first, last = (float(np.exp(self.log_speed[i])) for i in (0, -1))
        if first == last == 0:
            return "the flow does not move"
        how = "only gains speed" if last > first else "only loses speed"
        return (
            f"until t = {self.end:g} the flow {how} (‖∇L‖ from {first:.2g} to "
            f"{last:.2g}); it is too short to hold a transition, or begins at its end"
        )

    def _extrema(self) -> Iterator[_Extremum]:
        """Where the curvature along the flow changes sign, between the ends."""
        signs = np.sign(self.curvature)
        yield _Extremum(0.0, float(self.log_speed[0]), 0)
        for i in np.flatnonzero(signs[:-1] * signs[1:] < 0):
            begin, end = self.mesh[i : i + 2]
            t = crossing(self.flow, self.speed, begin, end, lambda seen: seen[1])
            log_speed = self.flow.along(self.speed, np.array([t]))[0]
            yield _Extremum(t, float(log_speed[0]), int(signs[i + 1]))
        yield _Extremum(self.end, float(self.log_speed[-1]), 0)

    def meeting(self, i: int) -> float:
        """Where plateau and transition meet: the speed is the geometric mean."""
        a, b = self.extrema[i : i + 2]
        low, high = sorted([a.log_speed, b.log_speed])
        if b is self.extrema[-1] and b.kind == -1 and i > 0:
            # How slow the flow is in the end is a matter of its horizon.
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
        """The ends of the flow, and where plateaus and transitions meet in between."""
        between = range(len(self.extrema) - 1)
        return [0.0, *(self.meeting(i) for i in between), self.end]

    @property
    def plateaus(self) -> list[Plateau]:
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
        return found


def _prominent(extrema: list[_Extremum]) -> list[_Extremum]:
    """Without those about which the speed rises and falls by less than `PROMINENCE`:
    the least rise goes first, with both of its ends, unless one is the flow's own."""
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
    """What is said of a plateau."""

    loss: Callable

    def __call__(self, t: Any, params: PyTree) -> dict[str, Any]:
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
    """Open directions, from the singular values at the start and now."""
    scale = max((float(s[1, 0]) for s in values.values()), default=0.0)
    return {k: int(np.sum(s[1] > _level(s[0], scale))) for k, s in values.items()}


def _level(start: Any, scale: Any) -> Any:
    """Half way, on a logarithmic scale, from the start to the largest scale."""
    return np.sqrt(np.maximum(start, np.finfo(float).eps * scale) * scale)


def _plain(clock: _Clock) -> Iterator[Stage]:
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


#
# Focus and Dilution
#


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


def _openings(clock: _Clock, seen: dict[str, Any]) -> list[_Opening]:
    found = []
    scale = seen["W0"]["s"][:, 0]
    if not np.any(scale > scale[0]):
        return []
    # Until it has grown there is no scale to compare others with.
    grown = np.arange(len(scale)) > _first_prominent(seen["W0"]["rate"][:, 0], 0)
    for matrix, known in seen.items():
        for i in range(known["s"].shape[1]):
            s, rate = known["s"][:, i], known["rate"][:, i]
            is_open = grown & (s > _level(s[0], scale))
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


def _focus_and_dilution(clock: _Clock) -> tuple[list[Stage], str]:
    problem: Any = clock.loss
    seen = clock.flow.along(_Directions(problem), clock.mesh)
    groups: list[list[_Opening]] = []
    starts: list[float] = []
    for opening in _openings(clock, seen):
        since = groups[-1][-1].fastest if groups else -1.0
        dips = [e for e in clock.dips if since < e.t < opening.fastest]
        if groups and not dips:
            groups[-1].append(opening)
            continue
        starts.append(min(dips, key=lambda e: e.log_speed).t if groups else 0.0)
        groups.append([opening])
    if not groups:
        return [], (
            f"until t = {clock.end:g} no direction of the weights opens: none grows "
            "half way from its start to the largest"
        )
    stages, cycle = [], 0
    for group, start, end in zip(groups, starts, [*starts[1:], clock.end], strict=True):
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
    clock: _Clock, seen: dict[str, Any], group: list[_Opening], start: float, end: float
) -> dict[str, Any]:
    first = group[0]
    known = seen[first.matrix]
    s, rate = known["s"][:, first.index], known["rate"][:, first.index]
    within = (clock.mesh >= start) & (clock.mesh <= first.fastest)
    at_start, at_end = np.searchsorted(clock.mesh, [start, end])
    facts: dict[str, Any] = {
        "opens": " and ".join(map(str, group)),
        "from": float(s[at_start]),
        "to": float(s[min(at_end, len(s) - 1)]),
        "rate": float(np.max(rate[within] / s[within], initial=0.0)),
    }
    if first.matrix == "attention":
        facts["sides"] = first.sides
    return facts


def _rare_queries(clock: _Clock, start: float, end: float) -> dict[str, Any]:
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
