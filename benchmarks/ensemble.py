"""Many flows: a loop over `integrate`, `integrate_ensemble`, and sweeps on two workers.

The reference instance (n = 280) from N seeds to t = 1e4 at rtol 1e-6, with certificates
and the default observables. All in one run, on warm code: each contestant has run
before it is timed, the sweeps in workers that keep what they compiled. A sweep's time
has the writing of its store in it, and the reading.

Wanted: an ensemble in one process ≥ 2.5 × as fast as the loop, a sweep over single
flows ≥ 1.8 ×, a sweep over ensembles ≥ 3.8 ×; the same flows to the tolerance.

The loop has the good of loops that XLA compiles whole, as gradflow asks it to; beside
it stands the loop in a process where XLA compiles them as it does by itself.
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
"""Members of an ensemble that is a point of a sweep."""
LOOP, PLAIN = "loop over integrate", "the same, XLA as it comes"


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
    """The losses, through a store."""
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
    problem, wanted = reference(), {}
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
        wanted[f"integrate_ensemble, {options.threads} threads"] = 2.5
        contestants["sweep, 2 workers"] = lambda seeds: swept(
            one_flow, seeds, 1, single
        )
        wanted["sweep, 2 workers"] = 1.8
        contestants["sweep of ensembles, 2 workers"] = lambda seeds: swept(
            some_flows, seeds, BLOCK, several
        )
        wanted["sweep of ensembles, 2 workers"] = 3.8
        for run in contestants.values():  # compiles, in every worker
            run(range(4 * BLOCK))
        seconds, errors = measure(contestants, options.flows, options.rounds)

    rows = []
    for name, each in seconds.items():
        # In each round against the loop of that round: a slow spell hits both.
        ratios = seconds[LOOP] / each
        ratio = float(np.median(ratios))
        aim = wanted.get(name)
        met = "" if aim is None else f"{aim} {'met' if ratio >= aim else 'not met'}"
        spread = f"{ratios.min():.2f} … {ratios.max():.2f}"
        least = duration(float(each.min()))
        rows.append((name, least, f"{ratio:.2f}", spread, met, f"{errors[name]:.1e}"))
    header = (
        "",
        "a flow, least",
        "× loop, median",
        "of rounds",
        "wanted",
        "error of L",
    )
    print(f"\n{options.flows:,} flows of the reference instance to t = {HORIZON:g}\n")
    print(table(header, rows))
    print(footer("gradflow", "jax", "diffrax", "numpy"))


def measure(
    contestants: dict[str, Callable[[range], np.ndarray]], flows: int, rounds: int
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Seconds a flow of each contestant in each round, in which all of them compute the
    same flows in turn, and the largest difference of the losses from the loop's."""
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
