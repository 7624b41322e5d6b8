"""`gradflow run`: one flow, or with `--set` a sweep over its options."""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from .. import __version__
from ..analysis import find_saddles, find_stages
from ..flows import AbstractTrajectory, Flow, FlowError
from ..sweeps._runs import PreparedRun, Run
from . import _sweep
from ._common import DONE, FAILED, BadInput, bad_input, complain
from ._show import draw, no_figure
from ._transition_matrix import agreed_labels, read_matrix


def run(arguments: argparse.Namespace) -> int:
    """Integrate the flow that `arguments` describe, print it and write its files."""
    wanted = read_options(arguments)
    if arguments.set:
        return _sweep.run_settings(wanted, arguments)
    for name in ("workers", "engine"):
        if getattr(arguments, name) is not None:
            raise BadInput(f"--{name} needs --set.")
    with bad_input():
        prepared = wanted.prepare()
    output = _folder(arguments.output or Path("out/run"))
    print(_description(prepared), flush=True)
    try:
        with bad_input():  # the loss of a start that is too large is not finite
            flow = prepared.integrate(progress=not arguments.no_progress)
    except FlowError as error:
        print(error.flow)
        return _write(error.flow, output, FAILED)
    print(flow)
    _print_stages(flow)
    return _write(flow, output, DONE)


def read_options(arguments: argparse.Namespace) -> Run:
    """The options on the command line; those left out keep their defaults."""
    names = [field.name for field in dataclasses.fields(Run)]
    given: dict[str, Any] = {
        name: value for name in names if (value := getattr(arguments, name)) is not None
    }
    path = given.get("matrix")
    if path is None:
        return Run(**given)
    if "stationary" in given or "stickiness" in given:
        raise BadInput(
            "--matrix defines the whole chain and excludes --stationary and "
            "--stickiness."
        )
    matrix, header = read_matrix(path)
    labels = agreed_labels(path, header, arguments.labels)
    chain = {"matrix": matrix, "labels": labels, "stationary": None, "stickiness": None}
    options = Run(**{**given, **chain})
    try:
        options.chain()
    except ValueError as error:
        raise BadInput(f"'{path}' does not define a chain: {error}") from error
    return options


def _description(prepared: PreparedRun) -> str:
    model, options = prepared.problem.model, prepared.run
    context = "infinite" if options.context is None else f"{options.context} tokens"
    return (
        f"gradflow {__version__}: {model.vocabulary} tokens, width {model.width}, "
        f"head width {model.head_width}, context {context}, scale "
        f"{options.scale:g}, seed {options.seed}, to t = {options.horizon:g}"
    )


def _print_stages(flow: Flow) -> None:
    """Print the stages of a flow and the saddles that it passed."""
    stages = find_stages(flow)
    print(f"\n{stages}\n", flush=True)
    if stages.plateaus:
        print(f"{find_saddles(flow, stages=stages)}\n", flush=True)


def _write(flow: AbstractTrajectory, output: Path, code: int) -> int:
    """Write the run file and the figure, also of a flow that stopped early."""
    try:
        print(f"run file         {flow.save(output / 'flow.npz')}")
    except OSError as error:
        return complain(f"the run file could not be written: {error}.", FAILED)
    if code == FAILED:
        complain(
            f"the flow {flow.stats.reason}. Everything computed before that is in "
            f"{output}.",
            FAILED,
        )
    try:
        print(f"figure           {draw(flow, output / 'overview.png')}")
    except (OSError, ValueError) as error:
        return complain(no_figure(error), FAILED)
    return code


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"the folder --output '{path}' cannot be made: {error.strerror}."
        ) from error
    if not os.access(path, os.W_OK):
        raise BadInput(f"the folder --output '{path}' is not writable.")
    return path
