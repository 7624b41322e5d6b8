"""Time against error for gradflow's solvers and those of other libraries.

Every solver runs at a sequence of tolerances (rtol, and atol = 1e-3·rtol) or, if its
step is fixed, at a sequence of steps α/λ_max, until its error is below the smallest
requested error. The error is the largest difference from the reference solution in any
entry at any of 200 logarithmically spaced times; two methods of different kinds agree
on the reference. A first, untimed run counts the work. After that all runs of all
solvers take turns, and the shortest time of each counts. Solvers of other libraries run
on the host and call compiled functions (`_external_solvers.py` says how they were
tuned); gradflow's run in one compiled `diffeqsolve`, and `integrate(auto)` is the whole
of `gradflow.integrate`.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

# Set before NumPy is loaded: on a busy machine LAPACK's threads wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import _external_solvers
import _gradflow_solvers
import _problems
import jax
import numpy as np
from _contestants import Absent, Contestant, GaveUp, Work, each, over
from _problems import Flow
from _timing import duration, footer, interleaved, table
from _truth import Truth, truth
from _work_precision_figure import draw

ERRORS = (1e-4, 1e-6, 1e-8)
PACKAGES: tuple[str, ...] = ("gradflow", "jax", "jaxlib", "diffrax", "numpy", "scipy")
EXTRAS = ("scikit-sundae", "extensisq")
QUICK_SOLVERS = ("auto", "ndf", "integrate(auto)", "LSODA", "CVODE dense", "fixed RK4")


@dataclass(frozen=True)
class Row:
    """The result of a solver at one setting from one seed."""

    problem: str
    seed: int
    solver: str
    ours: bool
    setting: str
    seconds: float
    error: float
    relative_error: float
    compile_seconds: float | None
    work: Work


@dataclass(frozen=True)
class Note:
    """A solver that was not measured, or not to the end, and the reason."""

    problem: str
    solver: str
    reason: str


class Entry:
    """A solver at one setting from one start, which is the unit that is timed."""

    def __init__(
        self,
        solver: Contestant,
        setting: float,
        work: Work,
        y0: np.ndarray,
        known: Truth,
    ):
        self.solver, self.setting, self.work = solver, setting, work
        self.y0, self.known = y0, known
        self.error, self.reason = np.inf, ""

    def __call__(self) -> list[float]:
        """The seconds of a run, infinite if the solver gave up."""
        began = time.perf_counter()
        try:
            ys = self.solver.solve(self.y0, self.setting)
        except GaveUp as reason:
            self.reason = str(reason)
            return [np.inf]
        seconds = time.perf_counter() - began
        self.error = self.known.error(ys)
        return [seconds]


def sweep(
    solver: Contestant,
    starts: list[np.ndarray],
    truths: list[Truth],
    least: float,
    budget: float,
) -> tuple[list[Entry], str]:
    """Runs from loose to tight until the error is below `least` from every start, and
    the reason if they ended before that."""
    y0, known = starts[0], truths[0]
    entries = []
    for setting in solver.settings:
        label = solver.label(setting)
        try:
            work = solver.rehearse(y0, setting, budget)
            entry = Entry(solver, setting, work, y0, known)
            # Not every rehearsal can be stopped in time.
            if entry()[0] > budget:
                raise GaveUp(entry.reason) if entry.reason else over(budget)
        except GaveUp as reason:
            return entries, f"at {label}: {reason}"
        entries.append(entry)
        worst = entry.error
        for other, its_truth in zip(starts[1:], truths[1:], strict=True):
            if worst <= least:
                with contextlib.suppress(GaveUp):  # reported when it is timed
                    error = its_truth.error(solver.solve(other, setting))
                    worst = max(worst, error)
        print(f"  {solver.name}, {label}: {worst:.1e}", file=sys.stderr)
        if worst <= least:
            return entries, ""
    return entries, f"never reached an error of {least:g}"


def measure(
    flow: Flow, options: argparse.Namespace
) -> tuple[list[Row], list[Note], list[Truth]]:
    """Every solver on one problem, from every seed."""
    starts = [flow.start(seed) for seed in range(options.seeds)]
    truths = [truth(flow, y0, options.out) for y0 in starts]
    for seed, known in enumerate(truths):
        print(f"seed {seed}: {known}", flush=True)
    stiffness = max(known.stiffness for known in truths)
    factories = {
        **_gradflow_solvers.contestants(flow, stiffness),
        **_external_solvers.contestants(flow, stiffness),
    }
    if options.solvers:
        if unknown := set(options.solvers) - set(factories):
            raise SystemExit(
                f"Unknown solvers: {', '.join(unknown)}. Choose from: "
                f"{', '.join(factories)}."
            )
        factories = {name: factories[name] for name in options.solvers}
    entries: list[Entry] = []
    notes = [
        Note(
            flow.name, "reference", f"too coarse for errors near {min(options.errors)}"
        )
        for known in truths
        if known.agreement > 0.1 * min(options.errors)
    ]
    for solver in each(factories):
        if isinstance(solver, Absent):
            notes.append(Note(flow.name, solver.name, solver.reason))
            continue
        found, ended = sweep(
            solver, starts, truths, min(options.errors), options.budget
        )
        entries += found
        if ended:
            notes.append(Note(flow.name, solver.name, ended))
    rows = []
    for seed, (y0, known) in enumerate(zip(starts, truths, strict=True)):
        again = {
            str(i): Entry(entry.solver, entry.setting, entry.work, y0, known)
            for i, entry in enumerate(entries)
        }
        seconds = interleaved(again, options.repeats)
        for i, entry in again.items():
            if entry.reason:
                where = f"seed {seed}, {entry.solver.label(entry.setting)}"
                reason = f"{where}: {entry.reason}"
                notes.append(Note(flow.name, entry.solver.name, reason))
            else:
                rows.append(_row(flow, seed, entry, float(seconds[i].min())))
    return rows, notes, truths


def _row(flow: Flow, seed: int, entry: Entry, seconds: float) -> Row:
    solver = entry.solver
    return Row(
        flow.name,
        seed,
        solver.name,
        solver.ours,
        solver.label(entry.setting),
        seconds,
        entry.error,
        entry.error / entry.known.scale,
        solver.compile_seconds,
        entry.work,
    )


def fastest(rows: Iterable[Row], error: float) -> float:
    """The shortest time among runs with an error of at most `error`; infinite if there
    are none."""
    return min((row.seconds for row in rows if row.error <= error), default=np.inf)


def interpolated(rows: Iterable[Row], error: float) -> float:
    """The time at which the solver's curve passes `error`, interpolated on logarithmic
    scales between the two consecutive runs whose errors enclose it."""
    points = [(np.log(row.error), np.log(row.seconds)) for row in rows if row.error > 0]
    times = []
    for (e0, s0), (e1, s1) in itertools.pairwise(points):
        if e1 <= np.log(error) <= e0 and e1 < e0:
            times.append(s0 + (s1 - s0) * (e0 - np.log(error)) / (e0 - e1))
    return float(np.exp(min(times))) if times else np.inf


def comparison(rows: list[Row], errors: Iterable[float], baseline: str) -> str:
    """For each error, each solver's time and its ratio to the baseline's: the median
    over seeds, and the extremes."""
    solvers = list(dict.fromkeys(row.solver for row in rows))
    seeds = sorted({row.seed for row in rows})

    def of(solver: str, seed: int) -> list[Row]:
        return [row for row in rows if (row.solver, row.seed) == (solver, seed)]

    lines = []
    for error in errors:
        base = np.array([fastest(of(baseline, seed), error) for seed in seeds])
        cells = []
        for solver in solvers:
            best = np.array([fastest(of(solver, seed), error) for seed in seeds])
            curve = np.array([interpolated(of(solver, seed), error) for seed in seeds])
            if np.all(np.isinf(best)):
                cells.append((solver, "not reached", "", "", ""))
                continue
            with np.errstate(invalid="ignore"):
                ratios = best / base
            cells.append(
                (
                    solver,
                    _time(float(np.median(best))),
                    _time(float(np.median(curve))),
                    f"{np.median(ratios):.2f}",
                    f"{ratios.min():.2f} … {ratios.max():.2f}",
                )
            )
        header = ("", "fastest run", "interpolated", f"÷ {baseline}", "over seeds")
        lines.append(f"Time for an error of at most {error:g}\n{table(header, cells)}")
    return "\n\n".join(lines)


def _time(seconds: float) -> str:
    return duration(seconds) if np.isfinite(seconds) else "–"


def runs(rows: list[Row]) -> str:
    """A table of all runs of the first seed."""

    def count(number: int | None) -> str:
        return "–" if number is None else f"{number:,}"

    header = (
        *("solver", "setting", "error", "relative", "time", "steps", "evaluations"),
        *("products", "factorised", "compile"),
    )
    cells = [
        (
            row.solver,
            row.setting,
            f"{row.error:.1e}",
            f"{row.relative_error:.1e}",
            duration(row.seconds),
            count(row.work.steps),
            count(row.work.evaluations),
            count(row.work.products),
            count(row.work.factorisations),
            "–" if row.compile_seconds is None else duration(row.compile_seconds),
        )
        for row in rows
        if row.seed == 0
    ]
    return table(header, cells)


def report(
    flow: Flow,
    rows: list[Row],
    notes: list[Note],
    truths: list[Truth],
    options: argparse.Namespace,
) -> None:
    names = {row.solver for row in rows}
    print(f"\n{runs(rows)}\n")
    baseline = options.baseline if options.baseline in names else rows[0].solver
    print(comparison(rows, options.errors, baseline))
    if notes:
        print("\nNot measured, or not to the end:")
        print("\n".join(f"  {note.solver}: {note.reason}" for note in notes))
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"work_precision_{flow.name}"
    draw([asdict(row) for row in rows if row.seed == 0], flow.title, stem)
    about = {
        "problem": flow.title,
        "reference": [str(known) for known in truths],
        "rows": [asdict(row) for row in rows],
        "notes": [asdict(note) for note in notes],
        "machine": _machine(),
    }
    stem.with_suffix(".json").write_text(json.dumps(about, indent=1))
    print(f"\nFigure and rows: {stem}.png, .pdf, .json")


def _machine() -> str:
    from importlib.metadata import PackageNotFoundError, version

    packages = list(PACKAGES)
    for name in EXTRAS:
        try:
            version(name)
            packages.append(name)
        except PackageNotFoundError:
            pass
    threads = os.environ["OPENBLAS_NUM_THREADS"]
    return f"{footer(*packages)}\nOPENBLAS_NUM_THREADS={threads}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--problem", nargs="+", choices=_problems.NAMES, help="default: reference")
    add("--solvers", nargs="+", help="default: all")
    add("--errors", nargs="+", type=float, default=ERRORS)
    add("--seeds", type=int, default=1)
    add("--repeats", type=int, default=5)
    add("--t1", type=float, help="another horizon")
    add("--matrix", type=Path, help="a transition matrix, for the problem `matrix`")
    add("--baseline", default="auto", help="the solver that ratios refer to")
    add("--budget", type=float, default=20.0, help="seconds allowed for a single run")
    add("--out", type=Path, default=Path("out/benchmarks"))
    add("--quick", action="store_true", help="a few solvers, t = 100, one repeat")
    options = parser.parse_args(arguments)
    if not options.problem:
        options.problem = ["matrix" if options.matrix else "reference"]
    if "matrix" in options.problem and not options.matrix:
        parser.error("the problem `matrix` needs --matrix FILE")
    if options.quick:
        options.t1, options.repeats = options.t1 or 100.0, 1
        options.solvers = options.solvers or QUICK_SOLVERS
        options.errors = (1e-4, 1e-6)

    # This makes host calls of small functions three times as fast, and does not affect
    # a solve in one compiled function.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    for name in options.problem:
        flow = _problems.problem(name, options.t1, options.matrix)
        print(f"{flow.title}\n")
        report(flow, *measure(flow, options), options)
    print(
        f"\nTimes are the shortest of {options.repeats} repeats, with all runs taking "
        f"turns; {options.seeds} seed(s). Errors are absolute.\n{_machine()}"
    )


if __name__ == "__main__":
    main()
