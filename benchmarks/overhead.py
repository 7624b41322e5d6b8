"""What `integrate` costs beyond the evaluations of the vector field that it makes.

    overhead = solve time ÷ (evaluations × time of one evaluation in a compiled loop)

on the reference instance (d = 4, m = 10, ε = 1e-3) with the explicit default solver
and warm code: for the bare solve (its `advance` segments), and for the whole call with
its certificate, snapshots and dense output. Wanted: at most 1.5.
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from _timing import (
    duration,
    footer,
    interleaved,
    stopwatch,
    table,
    undisturbed,
    verdict,
)
from jaxtyping import Array, Float, Int

import gradflow
from gradflow import _integrate, _record, _segments
from gradflow._ravel import Ravel

WANTED = 1.5
PARTS = {
    "solver": (_integrate, "advance"),
    "certificate": (_record, "balance"),
    "snapshots": (_record.Watch, "snapshots"),
}
"""What `integrate` calls once for each segment."""


@_segments.compiled
def evaluations(
    equation: _segments.Equation,
    y: Float[Array, " n"],
    step: Float[Array, ""],
    count: Int[Array, ""],
) -> Float[Array, " n"]:
    """The vector field `count` times, each at a state that needs the last value."""
    return jax.lax.fori_loop(
        0, count, lambda _, y: y + step * equation.vector_field(0.0, y), y
    )


class Integration:
    """A call of `integrate` whose parts are timed from within."""

    def __init__(self, problem: gradflow.Problem, params: Any, t1: float):
        self.integrate = lambda: gradflow.integrate(problem, params, t1)
        self.flow = self.integrate()
        self.labels: list[str] = []

    def __call__(self) -> list[float]:
        """The seconds of each part as it was called, and of all else together."""
        labels, seconds = [], []

        def timed(label: str, function: Callable) -> Callable:
            def call(*args: Any) -> Any:
                began = time.perf_counter()
                out = jax.block_until_ready(function(*args))
                seconds.append(time.perf_counter() - began)
                labels.append(label)
                return out

            return call

        with contextlib.ExitStack() as patches:
            for label, (owner, name) in PARTS.items():
                patch = mock.patch.object(
                    owner, name, timed(label, getattr(owner, name))
                )
                patches.enter_context(patch)
            total = stopwatch(self.integrate)
        self.labels = [*labels, "the rest"]
        return [*seconds, total - sum(seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--horizon", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()

    chain = gradflow.MarkovChain.sticky([0.75, 0.19, 0.05, 0.01], 0.5)
    model = gradflow.OneLayerTransformer(vocabulary=4, width=10)
    problem = gradflow.Problem(model, gradflow.InfiniteContext(chain))
    params = problem.init(seed=0, scale=1e-3)

    integration = Integration(problem, params, options.horizon)
    flow = integration.flow
    count = flow.stats["num_evaluations"]
    integration()
    segments = integration.labels.count("solver")
    ravel = Ravel.of(params)
    tolerances = (jnp.asarray(flow.settings.rtol), jnp.asarray(flow.settings.atol))
    equation = _segments.Equation(problem, ravel, flow.solver, *tolerances)  # pyright: ignore
    y0, step = ravel.ravel(params), jnp.asarray(1e-3)
    share = jnp.asarray(-(-count // segments))

    def reference() -> list[float]:
        """As many evaluations as a segment makes, as often as there are segments."""
        evaluate = lambda: evaluations(equation, y0, step, share).block_until_ready()  # noqa: E731
        return [stopwatch(evaluate) for _ in range(segments)]

    seconds = interleaved(
        {"reference": reference, "integrate": integration}, options.rounds
    )
    alone = undisturbed(seconds["reference"])
    labels = np.array(integration.labels)

    def row(name: str, time: float) -> tuple[str, ...]:
        return name, duration(time), f"{time / alone:.2f}"

    parts = {
        label: undisturbed(seconds["integrate"][:, labels == label])
        for label in (*PARTS, "the rest")
    }
    whole = sum(parts.values())
    stats = flow.stats
    print(
        f"{stats['solver']} to t = {options.horizon:g}: {stats['num_accepted_steps']:,}"
        f" steps, {stats['num_rejected_steps']:,} rejected, {segments} segments, "
        f"{count:,} evaluations of {duration(alone / (segments * int(share)))}\n"
    )
    print(
        table(
            ("", "time", "÷ evaluations"),
            [
                row(f"{count:,} evaluations in a compiled loop", alone),
                row("bare solve (`advance`)", parts["solver"]),
                row(
                    f"certificate ({stats['num_certificate_evaluations']:,} "
                    "evaluations more)",
                    parts["certificate"],
                ),
                row(f"snapshots ({len(flow.ts)} times)", parts["snapshots"]),
                row("the rest, on the host", parts["the rest"]),
                row("whole of gradflow.integrate", whole),
            ],
        )
    )
    print(f"\nbare solve {parts['solver'] / alone:.2f}, ", end="")
    print(verdict(parts["solver"] / alone, WANTED))
    print(f"whole      {whole / alone:.2f}, {verdict(whole / alone, WANTED)}")
    plain = {name: float(s.sum(axis=1).min()) for name, s in seconds.items()}
    print(
        f"\nEach segment at its fastest of {options.rounds} rounds. The fastest whole "
        f"round took {duration(plain['integrate'])}\nagainst "
        f"{duration(plain['reference'])} for the evaluations: "
        f"{plain['integrate'] / plain['reference']:.2f}."
    )
    print(footer("gradflow", "jax", "jaxlib", "diffrax", "equinox"))


if __name__ == "__main__":
    main()
