"""What `integrate` costs beyond the evaluations of the vector field that it makes.

    overhead = solve time ÷ ((evaluations + Hessian products)
                             × time of one evaluation in a compiled loop)

as a Hessian product of `ndf` is a difference of two values of the vector field, one of
which serves all products at that state and is counted with them,
on the reference instance (d = 4, m = 10, ε = 1e-3) and warm code: for the bare solve
(its `advance` segments), and for the whole call with its certificate, snapshots and
dense output. Wanted: at most 1.5 by `tsit5`, 1.6 by `auto`.
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
from gradflow import _record, _segments, _solve
from gradflow._ravel import Ravel

WANTED = {"auto": 1.6}
WANTED_ELSE = 1.5
PARTS = {
    "solver": (_solve, "advance"),
    "certificate": (_record, "balance"),
    "snapshots": (_record.Watch, "snapshots"),
}
"""What `integrate` calls for each segment of a solve: where, and by what name."""
REST = "rest"


class Integration:
    """A call of `integrate` on the reference instance, timed part by part."""

    def __init__(self, t1: float, solver: str):
        chain = gradflow.MarkovChain.sticky([0.75, 0.19, 0.05, 0.01], 0.5)
        model = gradflow.OneLayerTransformer(vocabulary=4, width=10)
        self.problem = gradflow.Problem(model, gradflow.InfiniteContext(chain))
        self.params = self.problem.init(seed=0, scale=1e-3)
        self.integrate = lambda: gradflow.integrate(
            self.problem, self.params, t1, solver=solver
        )
        self.flow = self.integrate()
        self.labels: list[str] = []
        self()

    def __call__(self) -> list[float]:
        """The seconds of each part every time it was called, then of all the rest."""
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
                replacement = timed(label, getattr(owner, name))
                patches.enter_context(mock.patch.object(owner, name, replacement))
            total = stopwatch(self.integrate)
        self.labels = [*labels, REST]
        return [*seconds, total - sum(seconds)]


class Reference:
    """The same number of evaluations alone, in as many pieces as the solve has."""

    def __init__(self, integration: Integration):
        flow = integration.flow
        ravel = Ravel.of(integration.params)
        tolerances = (jnp.asarray(flow.settings.rtol), jnp.asarray(flow.settings.atol))
        solver: Any = flow.solver
        self.equation = _segments.Equation(
            integration.problem, ravel, solver, *tolerances
        )
        self.y0 = ravel.ravel(integration.params)
        self.pieces = integration.labels.count("solver")
        self.count = _all_evaluations(flow) // self.pieces

    def __call__(self) -> list[float]:
        arguments = (self.equation, self.y0, jnp.asarray(1e-3), jnp.asarray(self.count))
        return [
            stopwatch(lambda: _evaluations(*arguments).block_until_ready())
            for _ in range(self.pieces)
        ]


def _all_evaluations(flow: gradflow.Flow) -> int:
    """With those that Hessian products are made of."""
    return flow.stats["num_evaluations"] + (flow.stats["num_hessian_products"] or 0)


def _in_one_thread(function: Any) -> Any:
    """As a solve of this size is compiled."""
    return _segments.compiled(function, one_thread=True)


@_in_one_thread
def _evaluations(
    equation: _segments.Equation,
    y: Float[Array, " n"],
    step: Float[Array, ""],
    count: Int[Array, ""],
) -> Float[Array, " n"]:
    """The vector field `count` times, each at a state that needs the last value."""

    def advance(_: Any, y: Float[Array, " n"]) -> Float[Array, " n"]:
        return y + step * equation.vector_field(0.0, y)

    return jax.lax.fori_loop(0, count, advance, y)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--horizon", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--solver", default="auto")
    options = parser.parse_args()
    wanted = WANTED.get(options.solver, WANTED_ELSE)

    integration = Integration(options.horizon, options.solver)
    reference = Reference(integration)
    seconds = interleaved(
        {"reference": reference, "integrate": integration}, options.rounds
    )
    stats, times = integration.flow.stats, len(integration.flow.ts)
    count, more = (
        _all_evaluations(integration.flow),
        stats["num_certificate_evaluations"],
    )
    once = undisturbed(seconds["reference"]) / (reference.pieces * reference.count)
    alone = count * once
    labels = np.array(integration.labels)
    part = {
        label: undisturbed(seconds["integrate"][:, labels == label])
        for label in (*PARTS, REST)
    }
    whole = sum(part.values())

    print(
        f"{stats['solver']} to t = {options.horizon:g}: "
        f"{stats['num_accepted_steps']:,} steps, {stats['num_rejected_steps']:,} "
        f"rejected, {reference.pieces} segments; one evaluation {duration(once)}\n"
    )
    rows = {
        f"{count:,} evaluations in a compiled loop": alone,
        "bare solve (`advance`)": part["solver"],
        f"certificate ({more:,} evaluations more)": part["certificate"],
        f"snapshots ({times} times)": part["snapshots"],
        "all the rest, on the host": part[REST],
        "whole of `gradflow.integrate`": whole,
    }
    print(
        table(
            ("", "time", "÷ these"),
            [(k, duration(v), f"{v / alone:.2f}") for k, v in rows.items()],
        )
    )
    certified = whole / (alone + more * once)
    for what, ratio in (
        ("bare solve", part["solver"] / alone),
        ("whole", whole / alone),
        ("whole, with the certificate's evaluations counted", certified),
    ):
        print(f"{what}: {ratio:.2f}, {verdict(ratio, wanted)}")
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
