"""Competition and cooperation: one stage for each pattern that heads acquire."""

from collections.abc import Iterator

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ...problems import AbstractLoss
from .._crossing import crossing
from ._clock import Clock
from ._stage import Acquisition, Stage

HALF = 0.5


class _Shares(eqx.Module):
    """The share of each head in each pattern, and the least cosine of two heads."""

    loss: AbstractLoss

    def __call__(self, t: Float[Array, ""], params: PyTree) -> dict[str, Array]:
        observables = self.loss.observables
        return {
            "shares": observables["pattern_shares"](params),
            "overlap": jnp.min(observables["head_overlap"](params)),
        }


def competition_and_cooperation(
    clock: Clock,
) -> tuple[list[Stage], list[Acquisition], str]:
    """The stages and the acquisitions, or none and the reason why."""
    acquired = sorted(_acquisitions(clock), key=lambda a: a.t)
    if not acquired:
        return (
            [],
            [],
            f"until t = {clock.end:g} no pattern is acquired: every share stays below "
            "one half",
        )
    watch = _Shares(clock.loss)

    def apart(i: int) -> float | None:
        """The time between acquisitions i - 1 and i at which the heads come apart."""
        before, after = acquired[i - 1], acquired[i]
        if (before.overlap > HALF) == (after.overlap > HALF):
            return None
        return crossing(
            clock.flow, watch, before.t, after.t, lambda seen: seen["overlap"] - HALF
        )

    stages = []
    for members, start, end in clock.stretches([a.t for a in acquired], apart):
        group = [acquired[i] for i in members]
        stages.append(
            Stage(
                "competitive" if group[0].overlap > HALF else "cooperative",
                start,
                end,
                members[-1] + 1,
                {
                    "acquires": " and ".join(map(_described, group)),
                    "at": group[0].t,
                    "overlap": group[0].overlap,
                },
            )
        )
    return stages, acquired, ""


def _described(acquisition: Acquisition) -> str:
    heads = ", ".join(str(1 + k) for k in sorted(acquisition.heads))
    by = f"head{'s' if len(acquisition.heads) > 1 else ''} {heads}"
    return f"pattern {1 + acquisition.pattern} by {by}"


def _acquisitions(clock: Clock) -> Iterator[Acquisition]:
    """The acquisition of each pattern that is learned, in the order of the patterns."""
    watch = _Shares(clock.loss)
    total = _total(clock.flow.along(watch, clock.mesh))
    for j in range(total.shape[1]):
        learned = total[:, j] > HALF
        if learned[0] or not np.any(learned):
            continue
        i = int(np.argmax(learned))
        begin, end = clock.mesh[i - 1 : i + 1]
        t = crossing(
            clock.flow, watch, begin, end, lambda seen, j=j: _total(seen)[:, j] - HALF
        )
        seen = clock.flow.along(watch, np.array([t]))
        held = seen["shares"][0, :, j]
        most_first = np.argsort(-held, kind="stable")
        yield Acquisition(
            pattern=j,
            heads=tuple(int(k) for k in most_first if held[k] >= HALF * held.max()),
            t=t,
            overlap=float(seen["overlap"][0]),
        )


def _total(seen: dict[str, np.ndarray]) -> Float[np.ndarray, "times patterns"]:
    """The share of all heads together in each pattern."""
    return seen["shares"].sum(axis=1)
