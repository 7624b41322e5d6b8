"""The overhead of `integrate` over its evaluations of the vector field.

    overhead = solve time ÷ ((evaluations + Hessian products)
                             × time of one evaluation in a compiled loop)

It is measured on the reference instance (d = 4, m = 10, ε = 1e-3) with warm code, for
the bare solve (its `advance` segments) and for the whole call with its certificate,
snapshots and dense output. A Hessian product of `ndf` is a difference of two values of
the vector field, one of which serves all products at that state and is counted with
them. Targets: at most 1.5 for `tsit5` and 1.6 for `auto`.

The loop is compiled in the same way as the solve, and again in another process with
XLA's default options, which is the cost of an evaluation without gradflow.
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
from _elsewhere import SERVE, Elsewhere, serve
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
from gradflow._core.compiled import compiled
from gradflow._core.ravel import Ravel
from gradflow._integrate import _run
from gradflow._stepping import Equation, _record

TARGETS = {"auto": 1.6}
OTHER_TARGET = 1.5
PARTS = {
    "solver": (_run, "advance"),
    "certificate": (_record, "balance"),
    "snapshots": (_record.Watch, "snapshots"),
}
"""The functions that `integrate` calls for each segment: their owners and names."""
REST = "rest"
ELSEWHERE = 2_000
"""The number of evaluations in each piece of the other process."""


def _reference_problem() -> gradflow.Problem:
    chain = gradflow.MarkovChain.sticky([0.75, 0.19, 0.05, 0.01], 0.5)
    model = gradflow.OneLayerTransformer(vocabulary=4, width=10)
    return gradflow.Problem(model, gradflow.InfiniteContext(chain))


class Integration:
    """A call to `integrate` on the reference instance, timed part by part."""

    def __init__(self, t1: float, solver: str):
        problem = _reference_problem()
        params = problem.init(seed=0, scale=1e-3)
        self.integrate = lambda: gradflow.integrate(problem, params, t1, solver=solver)
        self.flow = self.integrate()
        self.labels: list[str] = []
        self()

    def __call__(self) -> list[float]:
        """The seconds of each call to each part, followed by those of the rest."""
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
    """Evaluations alone: `pieces` pieces of `count` evaluations each."""

    def __init__(self, pieces: int, count: int):
        problem = _reference_problem()
        params = problem.init(seed=0, scale=1e-3)
        ravel = Ravel.of(params)
        unused: Any = None
        self.equation = Equation(problem, ravel, unused, unused, unused)
        self.y0 = ravel.ravel(params)
        self.pieces, self.count = pieces, count

    def __call__(self) -> list[float]:
        arguments = (self.equation, self.y0, jnp.asarray(1e-3), jnp.asarray(self.count))
        return [
            stopwatch(lambda: _evaluations(*arguments).block_until_ready())
            for _ in range(self.pieces)
        ]

    @property
    def evaluations(self) -> int:
        return self.pieces * self.count


def _evaluations_on_demand() -> Callable[[str], float]:
    alone = Reference(1, ELSEWHERE)
    return lambda _: alone()[0]


def _all_evaluations(flow: gradflow.Flow) -> int:
    """The evaluations of a flow, including those in Hessian products."""
    return flow.stats["num_evaluations"] + (flow.stats["num_hessian_products"] or 0)


def _in_one_thread(function: Any) -> Any:
    """`function`, compiled with the options of a solve of this size."""
    return compiled(function, one_thread=True)


@_in_one_thread
def _evaluations(
    equation: Equation,
    y: Float[Array, " n"],
    step: Float[Array, ""],
    count: Int[Array, ""],
) -> Float[Array, " n"]:
    """Evaluate the vector field `count` times, each at a state that depends on the
    previous value."""

    def advance(_: Any, y: Float[Array, " n"]) -> Float[Array, " n"]:
        return y + step * equation.vector_field(0.0, y)

    return jax.lax.fori_loop(0, count, advance, y)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--horizon", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--solver", default="auto")
    parser.add_argument(SERVE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(_evaluations_on_demand)
        return
    target = TARGETS.get(options.solver, OTHER_TARGET)

    integration = Integration(options.horizon, options.solver)
    pieces = integration.labels.count("solver")
    reference = Reference(pieces, _all_evaluations(integration.flow) // pieces)
    with Elsewhere(__file__) as elsewhere:
        seconds = interleaved(
            {
                "reference": reference,
                "elsewhere": lambda: [float(elsewhere("again"))],
                "integrate": integration,
            },
            options.rounds,
        )
    stats, times = integration.flow.stats, len(integration.flow.ts)
    count = _all_evaluations(integration.flow)
    more = stats["num_certificate_evaluations"]
    once = undisturbed(seconds["reference"]) / reference.evaluations
    once_elsewhere = undisturbed(seconds["elsewhere"]) / ELSEWHERE
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
        f"rejected, {pieces} segments; one evaluation takes {duration(once)}, with "
        f"XLA's default options {duration(once_elsewhere)}\n"
    )
    rows = {
        f"{count:,} evaluations in a compiled loop": alone,
        "bare solve (`advance`)": part["solver"],
        f"certificate ({more:,} more evaluations)": part["certificate"],
        f"snapshots ({times} times)": part["snapshots"],
        "everything else, on the host": part[REST],
        "all of `gradflow.integrate`": whole,
    }
    print(
        table(
            ("", "time", "÷ evaluations"),
            [(k, duration(v), f"{v / alone:.2f}") for k, v in rows.items()],
        )
    )
    certified = whole / (alone + more * once)
    for what, ratio in (
        ("bare solve", part["solver"] / alone),
        (
            "bare solve, relative to evaluations with XLA's default options",
            part["solver"] / (count * once_elsewhere),
        ),
        ("all of `integrate`", whole / alone),
        ("all of `integrate`, counting the certificate's evaluations", certified),
    ):
        print(f"{what}: {ratio:.2f}, {verdict(ratio, target)}")
    plain = {name: float(s.sum(axis=1).min()) for name, s in seconds.items()}
    print(
        f"\nThe times are sums of each segment's fastest of {options.rounds} rounds. "
        f"The fastest whole round took\n{duration(plain['integrate'])}, compared with "
        f"{duration(plain['reference'])} for the evaluations: "
        f"{plain['integrate'] / plain['reference']:.2f}."
    )
    print(footer("gradflow", "jax", "jaxlib", "diffrax", "equinox"))


if __name__ == "__main__":
    main()
