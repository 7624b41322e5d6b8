"""Many flows: a loop over `integrate`, `integrate_ensemble`, and sweeps on two workers.

Each flow is the reference instance (n = 280) to t = 1e4 at rtol 1e-6, with its
certificate and the default observables, from one of N seeds. All contestants are
measured in one run on warm code: each has run before it is timed, and the workers of
the sweeps keep their compiled code. The time of a sweep includes writing and reading
its store.

Targets: an ensemble in one process is at least 2.5 times as fast as the loop, a sweep
over single flows 1.8 times, and a sweep over ensembles 3.8 times; all of them give the
same flows to within the tolerance.

The loop benefits from XLA compiling small loops whole, as gradflow asks it to. The same
loop is also timed in a process with XLA's default options.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _elsewhere import SERVE, Elsewhere, serve
from _timing import duration, footer, table

import gradflow

LAW, STICKINESS = (0.75, 0.19, 0.05, 0.01), 0.5
HORIZON, RTOL = 1e4, 1e-6
BLOCK = 25
"""The number of members of each ensemble in the sweep over ensembles."""
LOOP, PLAIN = "loop over integrate", "the same, XLA's defaults"


def reference() -> gradflow.Problem:
    chain = gradflow.MarkovChain.sticky(LAW, STICKINESS)
    model = gradflow.OneLayerTransformer(4, 10)
    return gradflow.Problem(model, gradflow.InfiniteContext(chain))


def loop(problem: Any, seeds: range) -> list[gradflow.Flow]:
    return [
        gradflow.integrate(
            problem, problem.init(seed=seed), HORIZON, rtol=RTOL, save_params=False
        )
        for seed in seeds
    ]


def losses(problem: Any, seeds: range) -> np.ndarray:
    return np.stack([flow.loss for flow in loop(problem, seeds)])


def elsewhere(process: Elsewhere, seeds: range) -> np.ndarray:
    return np.array(json.loads(process(f"{seeds.start} {seeds.stop}")))


def _loops_on_demand() -> Callable[[str], list]:
    problem = reference()
    return lambda seeds: losses(problem, range(*map(int, seeds.split()))).tolist()


def ensemble(problem: Any, seeds: range, **options: Any) -> gradflow.Ensemble:
    starts = gradflow.stack([problem.init(seed=seed) for seed in seeds])
    return gradflow.integrate_ensemble(
        problem, starts, HORIZON, rtol=RTOL, save_params=False, **options
    )


def one_flow(point: dict[str, Any]) -> dict[str, Any]:
    return {"loss": loop(reference(), range(point["seed"], point["seed"] + 1))[0].loss}


def some_flows(point: dict[str, Any]) -> dict[str, Any]:
    seeds = range(point["seed"], point["seed"] + BLOCK)
    return {"loss": ensemble(reference(), seeds, threads=1).loss}


def swept(task: Any, seeds: range, each: int, workers: Any) -> np.ndarray:
    """The losses of a sweep, read back from its store."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        gradflow.sweep(task, {"seed": seeds[::each]}, store=store, engine=workers)
        data = gradflow.open_store(store)
        return data.loss.values.reshape(len(seeds), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(SERVE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(_loops_on_demand)
        return
    if options.flows % (options.rounds * BLOCK):
        parser.error(f"--flows must be a multiple of {BLOCK} × --rounds")
    problem, targets = reference(), {}
    with (
        gradflow.sweeps.LocalWorkers(2) as single,
        gradflow.sweeps.LocalWorkers(2) as several,
        Elsewhere(__file__) as process,
    ):
        contestants: dict[str, Callable[[range], np.ndarray]] = {
            LOOP: lambda seeds: losses(problem, seeds),
            PLAIN: lambda seeds: elsewhere(process, seeds),
        }
        for threads in sorted({1, options.threads}):
            contestants[f"integrate_ensemble, {threads} threads"] = (
                lambda seeds, n=threads: ensemble(problem, seeds, threads=n).loss
            )
        targets[f"integrate_ensemble, {options.threads} threads"] = 2.5
        contestants["sweep, 2 workers"] = lambda seeds: swept(
            one_flow, seeds, 1, single
        )
        targets["sweep, 2 workers"] = 1.8
        contestants["sweep of ensembles, 2 workers"] = lambda seeds: swept(
            some_flows, seeds, BLOCK, several
        )
        targets["sweep of ensembles, 2 workers"] = 3.8
        for run in contestants.values():  # compiles in every worker
            run(range(4 * BLOCK))
        seconds, errors = measure(contestants, options.flows, options.rounds)

    rows = []
    for name, each in seconds.items():
        # Compared with the loop of the same round: a slow spell hits both.
        ratios = seconds[LOOP] / each
        ratio = float(np.median(ratios))
        aim = targets.get(name)
        met = "" if aim is None else f"{aim} {'met' if ratio >= aim else 'not met'}"
        spread = f"{ratios.min():.2f} … {ratios.max():.2f}"
        least = duration(float(each.min()))
        rows.append((name, least, f"{ratio:.2f}", spread, met, f"{errors[name]:.1e}"))
    header = (
        "",
        "time per flow",
        "speed-up, median",
        "over rounds",
        "target",
        "error of L",
    )
    print(f"\n{options.flows:,} flows of the reference instance to t = {HORIZON:g}\n")
    print(table(header, rows))
    print(footer("gradflow", "jax", "diffrax", "numpy"))


def measure(
    contestants: dict[str, Callable[[range], np.ndarray]], flows: int, rounds: int
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Each contestant's seconds per flow in each round, and the largest difference
    between its losses and the loop's. In a round all of them compute the same flows."""
    size = flows // rounds
    seconds = {name: np.zeros(rounds) for name in contestants}
    errors = dict.fromkeys(contestants, 0.0)
    for i in range(rounds):
        seeds, expected = range(i * size, (i + 1) * size), np.zeros(0)
        for name, run in contestants.items():
            began = time.perf_counter()
            found = run(seeds)
            seconds[name][i] = (time.perf_counter() - began) / size
            expected = found if name == LOOP else expected
            errors[name] = max(errors[name], float(np.max(np.abs(found - expected))))
    return seconds, errors


if __name__ == "__main__":
    main()
