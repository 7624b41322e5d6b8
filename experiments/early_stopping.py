"""Experiment 16: with a finite sample, stopping early stops on a lower rung.

Definitions. The flow is the exact gradient flow of the *empirical* loss on N examples
(a context and the token after it) drawn from the chain: equal contexts are merged and
weighted by how often they occur. The population loss M, over all contexts under the
chain's stationary distribution, is only observed. The best stopping time is
t* = argmin M(θ(t)), located where dM/dt = ⟨∇M, θ̇⟩ changes sign on the solver's dense
output. The rung at t* is the j for which the teacher with its j strongest blocks is
nearest to the student in KL, as in experiment 15.

Claims. In the median over samples, (1) the rung at t* does not decrease with N; (2) t*
grows with N while there is a rung left to climb, up to the first N whose median rung is
the last; (3) for every sample smaller than that, M(t*) is below M at the end, because
the flow goes on to fit features of the sample that the chain does not have.

What fails. (2) and (3) were first claimed for all N, where they are false. Once on the
last rung, t* no longer grows: its median is the end of the flow at N = 4,096 and
16,384, and 2.1e4 at 65,536. Of the 36 samples with N ≥ 1,024, 21 never get worse: M
falls until the end, and t* is the end. A flow counts as getting worse if
M(end) - M(t*) > 1e-9, a threshold chosen after the gains were known; most of them are
above 1e-6 or below 1e-13.

Instance. One chain: vocabulary 5, spans 1, 1, 1, r = 1.7, centred matrices, entries of
A_1 of size 1. Three heads, initial scale 1e-3, horizon 1e6. A sample consists of N/64
sequences with 64 examples each; a seed determines the sample and the start. `--quick`:
vocabulary 4.
"""

from typing import Any, NamedTuple

import numpy as np
from _common import Claim, Measurement, run
from _students import COLOURS, Ladder, SampleOnAllContexts, teacher
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import gradflow

RATIO, STRENGTH, SCALE, HORIZON = 1.7, 1.0, 1e-3, 1e6
EXAMPLES = 64
"""The number of examples in one sequence of a sample."""
RESOLUTION = 1e-9
"""The resolution of the population loss at the tolerances of the flow."""
SHOWN = np.geomspace(1e-1, HORIZON, 300)


class Stop(NamedTuple):
    """The flow on one sample, and its best stopping time."""

    size: int
    seed: int
    distinct: int
    t: float
    rung: int
    loss: float
    """The population loss at t."""
    final_loss: float
    """The population loss at the end."""
    empirical_loss: float
    """The loss on the sample at the end."""
    curve: Any
    """The population loss at `SHOWN`."""

    @property
    def gets_worse(self) -> bool:
        return self.final_loss - self.loss > RESOLUTION


def measure(quick: bool) -> Measurement:
    d, spans = (4, (1, 1, 1)) if quick else (5, (1, 1, 1))
    sizes = [4**k for k in (range(3, 8) if quick else range(2, 9))]
    seeds = range(3) if quick else range(9)
    chain = teacher(d, spans, ratio=RATIO, size=STRENGTH)
    source = gradflow.AllContexts(chain)
    stops = [_stop(chain, source, n, seed) for n in sizes for seed in seeds]
    by_size = {n: [s for s in stops if s.size == n] for n in sizes}
    medians = {
        key: [float(np.median([getattr(s, key) for s in by_size[n]])) for n in sizes]
        for key in ("t", "rung", "loss", "final_loss", "distinct")
    }
    # Up to the first size whose median sample reaches the last rung.
    climbing = 1 + int(np.argmax(np.array(medians["rung"]) == chain.blocks))
    small = [s for s in stops if s.size in sizes[: climbing - 1]]
    claims = [
        Claim(
            "largest median rung over all sizes",
            chain.blocks,
            max(medians["rung"]),
            0,
        ),
        Claim(
            "sizes at which the median rung is below that of a smaller sample",
            0,
            _falls(medians["rung"]),
            0,
        ),
        Claim(
            "climbing sizes at which the median t* is below that of a smaller sample",
            0,
            _falls(medians["t"][:climbing]),
            0,
        ),
        Claim(
            "smaller samples with a lower loss at t* than at the end",
            len(small),
            sum(s.gets_worse for s in small),
            0,
        ),
    ]
    numbers = {
        "vocabulary": d,
        "spans": spans,
        "sizes": sizes,
        "seeds": len(seeds),
        "horizon": HORIZON,
        "entropy_rate": chain.entropy_rate,
        "medians": medians,
        "climbing": sizes[:climbing],
        "getting_worse": [sum(s.gets_worse for s in by_size[n]) for n in sizes],
        "stops": [
            {k: v for k, v in s._asdict().items() if k != "curve"} for s in stops
        ],
    }
    table = _table(sizes, by_size, medians, chain.entropy_rate)
    return Measurement(claims, numbers, (by_size, medians, chain), table)


def _falls(values: list[float]) -> int:
    return int(np.sum(np.array(values[1:]) < np.maximum.accumulate(values)[:-1]))


def _stop(
    chain: gradflow.HighOrderChain, source: gradflow.AllContexts, size: int, seed: int
) -> Stop:
    count = max(1, size // EXAMPLES)
    tokens = chain.sample(size // count + chain.lags, 1000 * seed + 1, count)
    sample = gradflow.Sample(tokens, chain.lags, source=source)
    model = gradflow.PositionalHeads(chain.size, chain.lags, chain.blocks)
    problem = gradflow.Problem(model, SampleOnAllContexts(sample))
    whole = gradflow.Problem(model, source)
    start = problem.init(seed, SCALE)
    flow = gradflow.integrate(problem, start, HORIZON, observables=())
    t = gradflow.best_stopping_time(flow)
    ends = np.array([t, HORIZON])
    loss, final_loss = flow.observe(whole, ends)
    if not final_loss - loss > RESOLUTION:
        t = HORIZON
    D = flow.observe(Ladder(whole), np.array([t, HORIZON]))
    return Stop(
        size,
        seed,
        sample.size,
        t,
        1 + int(np.argmin(D[0])),
        float(loss),
        float(final_loss),
        float(flow.loss[-1]),
        flow.observe(whole, SHOWN),
    )


def _table(sizes: Any, by_size: Any, medians: Any, entropy_rate: float) -> str:
    lines = [
        f"{'N':>7} {'contexts':>9} {'median t*':>10} {'rung':>5}  "
        f"{'runs on rung 1, 2, …':<21} {'get worse':>9} {'M(t*) - H':>10} "
        f"{'M(end) - H':>11}"
    ]
    top = max(s.rung for stops in by_size.values() for s in stops)
    for i, n in enumerate(sizes):
        counts = [sum(s.rung == j for s in by_size[n]) for j in range(1, top + 1)]
        lines.append(
            f"{n:>7} {medians['distinct'][i]:>9g} {medians['t'][i]:>10.4g} "
            f"{medians['rung'][i]:>5g}  {', '.join(map(str, counts)):<21} "
            f"{sum(s.gets_worse for s in by_size[n]):>9} "
            f"{medians['loss'][i] - entropy_rate:>10.2e} "
            f"{medians['final_loss'][i] - entropy_rate:>11.2e}"
        )
    return "\n".join(lines)


def draw(measurement: Measurement) -> Figure:
    by_size, medians, chain = measurement.data
    figure = Figure(figsize=(11.5, 8.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # pyright: ignore
    (curves, times), (rungs, losses) = figure.subplots(2, 2)
    _draw_curves(curves, by_size, chain)
    sizes = np.array(list(by_size))
    every = [s for stops in by_size.values() for s in stops]
    x = np.array([s.size for s in every])
    t, worse = np.array([s.t for s in every]), np.array([s.gets_worse for s in every])
    times.plot(x[worse], t[worse], "o", color=COLOURS[0], alpha=0.4)
    times.plot(
        x[~worse],
        t[~worse],
        "^",
        color=COLOURS[1],
        markerfacecolor="none",
        label="never gets worse",
    )
    times.plot(sizes, medians["t"], color=COLOURS[0], label="median")
    times.axhline(HORIZON, color="0.5", linestyle=":", label="end of the flow")
    times.set(yscale="log", ylabel="best stopping time $t^*$")
    times.set_title("(b) Best stopping time", loc="left")
    _draw_rungs(rungs, by_size, medians, chain.blocks)
    H = chain.entropy_rate
    for key, label, colour in (
        ("loss", "at $t^*$", COLOURS[0]),
        ("final_loss", f"at the end, $t = 10^{{{np.log10(HORIZON):.0f}}}$", COLOURS[1]),
    ):
        y = np.array([getattr(s, key) for s in every]) - H
        losses.plot(x, y, "o", color=colour, alpha=0.35, markersize=4)
        losses.plot(sizes, np.array(medians[key]) - H, color=colour, label=label)
    losses.set(yscale="log", ylabel="population loss - entropy rate (nats)")
    losses.set_title("(d) The gain from stopping early", loc="left")
    for ax in (times, rungs, losses):
        ax.set(xscale="log", xlabel="examples in the sample, $N$")
    for ax in (times, losses):
        ax.legend(fontsize="small")
    return figure


def _draw_curves(ax: Axes, by_size: Any, chain: Any) -> None:
    sizes = list(by_size)
    some = sizes[:: max(1, len(sizes) // 5)][:6]
    for n, colour in zip(some, COLOURS, strict=False):
        stop = by_size[n][0]
        ax.plot(SHOWN, stop.curve - chain.entropy_rate, color=colour, label=f"{n:,}")
        ax.plot([stop.t], [stop.loss - chain.entropy_rate], "o", color=colour)
    ax.set(xscale="log", yscale="log", xlabel="time $t$")
    ax.set_xlim(SHOWN[0], SHOWN[-1])
    ax.set_ylabel("population loss - entropy rate (nats)")
    ax.set_title("(a) Population loss, seed 0; dots at $t^*$", loc="left")
    ax.legend(title="$N$", fontsize="small", loc="lower left")


def _draw_rungs(ax: Axes, by_size: Any, medians: Any, h: int) -> None:
    sizes = np.array(list(by_size), dtype=float)
    for n, stops in by_size.items():
        for j in range(1, h + 1):
            count = sum(s.rung == j for s in stops)
            if count:
                ax.scatter(
                    [n],
                    [j],
                    s=260 * count / len(stops),
                    color=COLOURS[j - 1],
                    alpha=0.6,
                    linewidths=0,
                )
    ax.plot(sizes, medians["rung"], color="black", linewidth=1, label="median")
    ax.set_yticks(range(1, h + 1))
    ax.set_ylim(0.5, h + 0.5)
    ax.set_ylabel("rung at $t^*$")
    ax.set_title("(c) Rung at $t^*$; areas are numbers of runs", loc="left")
    ax.legend(fontsize="small", loc="lower right")


if __name__ == "__main__":
    run(__doc__, measure, draw)
