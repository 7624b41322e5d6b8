"""The results of `find_stages`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float

from ..._core.result_tables import AbstractResults, Column, legend, listed, table


class Stage(eqx.Module):
    """A named stretch of a flow."""

    name: str = eqx.field(static=True)
    start: float
    end: float
    cycle: int
    """The number of focus stages, or of patterns acquired, up to and including this
    stage; zero where the theory counts neither."""
    evidence: dict[str, Any]
    """The measurements on which the stage rests, by name."""


class Plateau(eqx.Module):
    """A stretch along which a flow is slow."""

    start: float
    end: float
    slowest: float
    """The time at which the flow is slowest."""
    speed: float
    """‖∇L‖ at that time."""
    loss: float
    """L at that time."""
    ranks: dict[str, int]
    """The number of open directions of each weight matrix at that time."""


class Acquisition(eqx.Module):
    """The acquisition of one pattern by some of the heads."""

    pattern: int
    """The index of the pattern: a block of the chain, or a column of the target."""
    heads: tuple[int, ...] = eqx.field(static=True)
    """The heads that hold the pattern at time `t`, the one with the largest share
    first."""
    t: float
    """The time at which half of the pattern is learned."""
    overlap: float
    """The least cosine between two heads at time `t`."""


_COLUMNS = (
    Column("stage", "the name, as defined in `gradflow.analysis.stages`.", 14, "<"),
    Column("cycle", "the number of focus stages, or of patterns acquired, so far.", 5),
    Column("start", "the time at which the stage begins.", 10),
    Column("end", "the time at which the next stage begins, or the flow ends.", 10),
    Column(" evidence", "", 0, "<"),
)

_EVIDENCE = {
    "opens": "the directions of W0 or of WQ WKᵀ (attention) that open, by their rank.",
    "from": "the singular value of the first of them (√σ for attention) at the start.",
    "to": "the same at the end of the stage.",
    "rate": "the largest d log s/dt of that singular value s before it grows fastest.",
    "sides": "uᵀv of the query side u and the key side v; anti-focus if negative.",
    "others' attention": "the mean attention of all other queries to the most frequent "
    "token, at the start → at the end.",
    "acquires": "the patterns that are learned, and the heads that hold them.",
    "at": "the time at which half of the first of them is learned.",
    "overlap": "the least cosine between two heads at that time.",
    "slowest": "the time at which the flow is slowest.",
    "fastest": "the time at which the flow is fastest.",
    "speed": "‖∇L‖ at that time.",
}
"""The meaning of each measurement, by the beginning of its name."""


@dataclass(frozen=True, eq=False, repr=False)
class Stages(AbstractResults[Stage]):
    """The stages of a flow in order of time. `print` shows them as a table."""

    stages: tuple[Stage, ...]
    plateaus: tuple[Plateau, ...]
    """The stretches along which the flow is slow, including its start and its end."""
    reason: str = ""
    """Why no stage was found; empty if there are stages."""
    acquisitions: tuple[Acquisition, ...] = ()
    """The patterns that heads acquired, in order of time."""

    def __len__(self) -> int:
        return len(self.stages)

    def _result(self, index: int) -> Stage:
        return self.stages[index]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each stage."""
        return tuple(stage.name for stage in self.stages)

    @property
    def boundaries(self) -> Float[np.ndarray, " boundaries"]:
        """The times at which one stage passes into the next."""
        return np.array([stage.end for stage in self.stages[:-1]])

    def _summary(self) -> str:
        return listed(self.names)

    def _table(self) -> str:
        if not self.stages:
            return f"no stage found: {self.reason}"
        rows = [
            (
                s.name,
                str(s.cycle or ""),
                f"{s.start:.5g}",
                f"{s.end:.5g}",
                " " + ", ".join(f"{k} {_readable(v)}" for k, v in s.evidence.items()),
            )
            for s in self.stages
        ]
        meanings = [(c.title, c.meaning) for c in _COLUMNS]
        return f"{table(_COLUMNS, rows)}\n{legend(meanings + self._evidence())}"

    def _evidence(self) -> list[tuple[str, str]]:
        """The meaning of every measurement that some stage has."""
        names = [name for stage in self.stages for name in stage.evidence]
        return [
            (short, meaning)
            for short, meaning in _EVIDENCE.items()
            if any(name == short or name.startswith(f"{short} ") for name in names)
        ]


def _readable(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class StageMedian(NamedTuple):
    """One stage as the members of an ensemble have it."""

    name: str
    cycle: int
    members: int
    """The number of members that have the stage."""
    start: float
    """The median of its start over these members."""
    end: float
    """The median of its end over these members."""


_MEDIAN_COLUMNS = (
    *_COLUMNS[:2],
    Column("members", "the number of members that have this stage.", 9),
    Column("start", "the median, over these members, of the time it begins.", 10),
    Column("end", "the median, over these members, of the time it ends.", 10),
)


@dataclass(frozen=True, eq=False, repr=False)
class EnsembleStages(AbstractResults[Stages]):
    """The stages of each member of an ensemble, in the order of the members. `print`
    shows the median times of every stage."""

    members: tuple[Stages, ...]

    def __len__(self) -> int:
        return len(self.members)

    def _result(self, index: int) -> Stages:
        return self.members[index]

    @property
    def medians(self) -> tuple[StageMedian, ...]:
        """Every stage that some member has, with the medians of its start and its end
        over the members that have it, in order of the median start.

        Stages of two members correspond if they have the same name and cycle. Where a
        member has several such stages, its first corresponds to the others' first, and
        so on.
        """
        found: dict[tuple[str, int, int], list[Stage]] = {}
        for stages in self.members:
            for key, stage in _numbered(stages):
                found.setdefault(key, []).append(stage)
        medians = [
            StageMedian(
                name,
                cycle,
                len(same),
                float(np.median([stage.start for stage in same])),
                float(np.median([stage.end for stage in same])),
            )
            for (name, cycle, _), same in found.items()
        ]
        return tuple(sorted(medians, key=lambda m: (m.start, m.end)))

    def _summary(self) -> str:
        return f"{len(self)} members: {listed([m.name for m in self.medians])}"

    def _table(self) -> str:
        without = [stages for stages in self.members if not len(stages)]
        if len(without) == len(self):
            return "no stage found in any of " + _members_with_reasons(without)
        rows = [
            (
                m.name,
                str(m.cycle or ""),
                f"{m.members} of {len(self)}",
                f"{m.start:.5g}",
                f"{m.end:.5g}",
            )
            for m in self.medians
        ]
        lines = [table(_MEDIAN_COLUMNS, rows)]
        if without:
            lines.append("no stage found in " + _members_with_reasons(without))
        lines.append(legend([(c.title, c.meaning) for c in _MEDIAN_COLUMNS]))
        return "\n".join(lines)


def _numbered(stages: Sequence[Stage]) -> Iterator[tuple[tuple[str, int, int], Stage]]:
    """Each stage with its name, its cycle and its number among those of both."""
    count: dict[tuple[str, int], int] = {}
    for stage in stages:
        key = stage.name, stage.cycle
        count[key] = count.get(key, 0) + 1
        yield (*key, count[key]), stage


def _members_with_reasons(without: Sequence[Stages]) -> str:
    """How many members have no stage, and the reason of the first."""
    count = len(without)
    some = "1 member" if count == 1 else f"{count} members"
    return f"{some}; the first: {without[0].reason}"
