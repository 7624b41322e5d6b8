"""`gradflow run --set`, `gradflow sweep` and `gradflow status`."""

import argparse
import warnings
from pathlib import Path

from ..sweeps import SweepError, status, sweep
from ..sweeps._runs import SETTINGS, Run
from ._common import DONE, FAILED, INTERRUPTED, BadInput, bad_input, complain
from ._config import Job, read_config, sweep_of_runs


def run_settings(fixed: Run, arguments: argparse.Namespace) -> int:
    """`gradflow run --set`: a flow for each combination of the settings."""
    options = {
        "store": arguments.output or Path("out/sweep"),
        "engine": arguments.engine or "local",
    }
    if arguments.workers is not None:
        options["workers"] = arguments.workers
    with bad_input():
        job = sweep_of_runs(fixed, parse_settings(arguments.set), options)
    return _carry_out(job, not arguments.no_progress)


def run_config(arguments: argparse.Namespace) -> int:
    """`gradflow sweep`: the sweep that a TOML file describes."""
    with bad_input():
        job = read_config(arguments.config)
    return _carry_out(job, not arguments.no_progress)


def print_status(arguments: argparse.Namespace) -> int:
    """`gradflow status`: the contents of a store."""
    with bad_input():
        found = status(arguments.store, check=arguments.check)
    print(found.table(tracebacks=arguments.traceback))
    return DONE if found.is_complete else FAILED


def parse_settings(texts: list[str]) -> dict[str, list[float | int | str]]:
    """The grid in the arguments `name=a,b,c` of `--set`."""
    grid: dict[str, list[float | int | str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in SETTINGS:
            allowed = ", ".join(SETTINGS)
            raise BadInput(
                f"--set must be NAME=A,B,C where NAME is one of {allowed}, got "
                f"{text!r}."
            )
        if name in grid:
            raise BadInput(f"--set must give {name} only once, got it twice.")
        kind = SETTINGS[name]
        try:
            grid[name] = [kind(value.strip()) for value in values.split(",")]
        except ValueError as error:
            raise BadInput(
                f"--set {name} must be values of type {kind.__name__} separated by "
                f"commas, got {values!r}."
            ) from error
    return grid


def _carry_out(job: Job, progress: bool) -> int:
    store = job.options["store"]
    try:
        with warnings.catch_warnings(), bad_input():
            warnings.simplefilter("ignore")  # the report says the same
            report = sweep(job.task, job.grid, **job.options, progress=progress)
    except SweepError as error:
        return complain(str(error), FAILED)
    except KeyboardInterrupt:
        return complain(
            f"interrupted. The results computed so far are in {store}; the same "
            "command continues from there.",
            INTERRUPTED,
        )
    print(report)
    return FAILED if report.failures else DONE
