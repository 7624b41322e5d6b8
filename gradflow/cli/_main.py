"""`gradflow …`: parsing and printing only."""

import argparse
import io
import os
import sys
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from .. import __version__, solvers
from .._core import checks
from .._core.storage import RunFileError
from .._integrate._integrate import integrate
from ..analysis._saddles import find_saddles
from ..analysis.stages import find_stages
from ..chains import MarkovChain
from ..flows._flow import Flow, FlowError
from ..models import OneLayerTransformer
from ..populations import FiniteContext, InfiniteContext
from ..problems._problem import Problem
from ..sweeps import SweepError, sweep
from . import _sweeps

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

# The reference instance of Focus and Dilution.
STATIONARY = (0.75, 0.19, 0.05, 0.01)
STICKINESS = 0.5


class _BadInput(Exception):
    """A sentence for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own, and return its exit
    code: 0, or 1 for a job that failed on the way, 2 for bad input, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        # Where ∇ cannot be shown it is spelt out: no reason for a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = _parser().parse_args(argv)
        return arguments.command(arguments)
    except _BadInput as error:
        return _complain(str(error), BAD_INPUT)
    except KeyboardInterrupt:
        return _complain("interrupted.", INTERRUPTED)
    except SystemExit as stop:  # how argparse ends --help and --version
        return int(stop.code or 0)


def _complain(sentence: str, code: int) -> int:
    print(f"gradflow: {sentence}", file=sys.stderr)
    return code


#
# gradflow run
#


def _run(arguments: argparse.Namespace) -> int:
    if arguments.set:
        return _run_many(arguments)
    for name in ("workers", "engine"):
        if getattr(arguments, name) is not None:
            raise _BadInput(f"--{name} goes with --set.")
    if arguments.output is None:
        arguments.output = Path("out/run")
    problem = _problem(arguments)
    # Everything is checked under the name that it has here, before any work.
    try:
        horizon = checks.positive_number("--horizon", arguments.horizon)
        rtol = checks.positive_number("--rtol", arguments.rtol)
        atol = arguments.atol
        if atol is not None:
            atol = checks.positive_number("--atol", atol, zero_allowed=True)
        name = solvers.resolve(arguments.solver).name
        step = arguments.step
        if step is not None:
            step = checks.positive_number("--step", step)
            if name not in solvers.FIXED_STEP:
                fixed = " and ".join(solvers.FIXED_STEP)
                raise ValueError(f"`--step` must go with {fixed}, got {name}.")
        start = problem.init(arguments.seed, arguments.scale)
    except ValueError as error:
        raise _BadInput(str(error)) from error
    output = _folder(arguments.output)

    print(_description(arguments, problem), flush=True)
    code = DONE
    try:
        flow = integrate(
            problem,
            start,
            horizon,
            rtol=rtol,
            atol=atol,
            solver=arguments.solver,
            step=step,
            progress=not arguments.no_progress,
        )
    except FlowError as error:
        flow, code = error.flow, FAILED
    except ValueError as error:  # a start so large that the loss is not finite
        raise _BadInput(str(error)) from error
    print(flow)
    if code == DONE:
        _explain(flow)
    return _write(flow, output, code)


def _explain(flow: Flow) -> None:
    """The stages of a flow and the saddles that it passed."""
    stages = find_stages(flow)
    print(f"\n{stages}\n", flush=True)
    if stages.plateaus:
        print(f"{find_saddles(flow, stages=stages)}\n", flush=True)


def _write(flow: Flow, output: Path, code: int) -> int:
    """Write the run file and the figure; a flow that broke off is worth as much."""
    try:
        print(f"run file         {flow.save(output / 'flow.npz')}")
    except OSError as error:
        return _complain(f"the run file could not be written: {error}.", FAILED)
    if code == FAILED:
        _complain(
            f"the flow {flow.stats['reason']}. What was computed until then is in "
            f"{output}.",
            FAILED,
        )
    try:
        print(f"figure           {_draw(flow, output / 'overview.png')}")
    except (OSError, ValueError) as error:
        return _complain(_no_figure(error), FAILED)
    return code


def _draw(flow: Flow, path: Path) -> Path:
    from .. import plotting  # brings matplotlib, which only a figure is worth

    plotting.overview(flow).savefig(path, dpi=150)
    return path


def _no_figure(error: Exception) -> str:
    return f"the figure could not be drawn: {str(error).rstrip('.')}."


def _problem(arguments: argparse.Namespace) -> Problem:
    try:
        chain = _chain(arguments)
        population = (
            InfiniteContext(chain)
            if arguments.context is None
            else FiniteContext(
                chain, checks.whole_number("--context", arguments.context)
            )
        )
        model = OneLayerTransformer(chain.size, arguments.width, arguments.head_width)
        return Problem(model, population)
    except ValueError as error:
        raise _BadInput(str(error)) from error


def _chain(arguments: argparse.Namespace) -> MarkovChain:
    stationary, stickiness = arguments.stationary, arguments.stickiness
    if arguments.matrix is None:
        return MarkovChain.sticky(
            STATIONARY if stationary is None else stationary,
            STICKINESS if stickiness is None else stickiness,
        )
    if stationary is not None or stickiness is not None:
        raise _BadInput(
            "--matrix gives the whole chain and excludes --stationary and --stickiness."
        )
    matrix = _matrix(arguments.matrix)
    try:
        return MarkovChain(matrix)
    except ValueError as error:
        raise _BadInput(f"'{arguments.matrix}' holds no chain: {error}") from error


def _matrix(path: Path) -> np.ndarray:
    """The array in a .npy or .csv file."""
    kind = path.suffix.lower()
    if kind not in (".npy", ".csv"):
        raise _BadInput(f"--matrix reads .npy and .csv files, got '{path}'.")
    try:
        if kind == ".npy":
            return _load_npy(path)
        with warnings.catch_warnings(), path.open(encoding="utf-8-sig") as file:
            warnings.simplefilter("ignore")  # an empty file is refused as no chain
            return np.loadtxt(file, delimiter=",", ndmin=2)
    except OSError as error:
        raise _BadInput(f"'{path}' cannot be read: {error.strerror}.") from error
    except ValueError as error:
        # Without NumPy's advice on its own options.
        reason = str(error).partition("; use")[0].rstrip(".")
        raise _BadInput(
            f"'{path}' is not a table of numbers separated by commas: {reason}."
        ) from error


def _load_npy(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        try:
            array = np.load(file, allow_pickle=False)
        # NumPy's reasons are left out: it advises to unpickle what it cannot read.
        except (ValueError, EOFError, MemoryError, zipfile.BadZipFile):
            array = None
    if not isinstance(array, np.ndarray):
        raise _BadInput(
            f"'{path}' is not a .npy file of one array of numbers, or it was cut short."
        )
    return array


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _BadInput(
            f"--output '{path}' cannot be made a folder: {error.strerror}."
        ) from error
    if not os.access(path, os.W_OK):
        raise _BadInput(f"--output '{path}' cannot be written to.")
    return path


#
# gradflow run --set, gradflow sweep, gradflow status
#


def _run_many(arguments: argparse.Namespace) -> int:
    output = Path("out/sweep") if arguments.output is None else arguments.output
    options = {"store": output, "engine": arguments.engine or "local"}
    if arguments.workers is not None:
        options["workers"] = arguments.workers
    try:
        grid = _sweeps.settings(arguments.set)
        job = _sweeps.run_job(_options(arguments), grid, options)
    except ValueError as error:
        raise _BadInput(str(error)) from error
    return _carry_out(job, not arguments.no_progress)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a run as a task takes them."""
    if arguments.matrix is not None:
        matrix = _chain(arguments).transition  # checked, with the file named
        return {
            **{name: getattr(arguments, name) for name in _sweeps.SETTINGS},
            "stationary": None,
            "matrix": np.asarray(matrix),
        }
    options = {name: getattr(arguments, name) for name in _sweeps.SETTINGS}
    if arguments.stickiness is None:
        options["stickiness"] = STICKINESS
    stationary = arguments.stationary
    options["stationary"] = STATIONARY if stationary is None else stationary
    return {**options, "matrix": None}


def _sweep(arguments: argparse.Namespace) -> int:
    defaults = _options(_parser().parse_args(["run"]))
    try:
        job = _sweeps.read_config(arguments.config, defaults)
    except ValueError as error:
        raise _BadInput(str(error)) from error
    return _carry_out(job, not arguments.no_progress)


def _carry_out(job: _sweeps.Job, progress: bool) -> int:
    store = job.options["store"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all that they say is in the report
            report = sweep(job.task, job.grid, **job.options, progress=progress)
    except ValueError as error:
        raise _BadInput(str(error)) from error
    except SweepError as error:
        return _complain(str(error), FAILED)
    except KeyboardInterrupt:
        sentence = f"interrupted. What was computed is in {store}; the same command"
        return _complain(f"{sentence} goes on from there.", INTERRUPTED)
    print(report)
    return FAILED if report.failures else DONE


def _status(arguments: argparse.Namespace) -> int:
    try:
        text, sound = _sweeps.status(
            arguments.store, check=arguments.check, traceback=arguments.traceback
        )
    except ValueError as error:
        raise _BadInput(str(error)) from error
    print(text)
    return DONE if sound else FAILED


def _description(arguments: argparse.Namespace, problem: Problem) -> str:
    model = problem.model
    context = "infinite" if arguments.context is None else f"{arguments.context} tokens"
    return (
        f"gradflow {__version__}: {model.vocabulary} tokens, width {model.width}, "
        f"head width {model.head_width}, context {context}, scale "
        f"{arguments.scale:g}, seed {arguments.seed}, to t = {arguments.horizon:g}"
    )


#
# gradflow show
#


def _show(arguments: argparse.Namespace) -> int:
    try:
        flow = Flow.load(arguments.file)
    except RunFileError as error:
        raise _BadInput(str(error)) from error
    try:
        figure = None if arguments.figure is None else _draw(flow, arguments.figure)
    except (OSError, ValueError) as error:
        raise _BadInput(_no_figure(error)) from error
    print(flow)
    if figure is not None:
        print(f"figure           {figure}")
    return DONE


#
# The command line
#


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _BadInput(f"{message} (see {self.prog} --help).")


def _law(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be numbers separated by commas, got {text!r}"
        ) from error


def _parser() -> _Parser:
    parser = _Parser(
        prog="gradflow",
        description="The exact gradient flow of small Transformers on Markov data.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"gradflow {__version__}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run",
        help="integrate a flow; without options, that of the reference instance",
        description="Integrate the gradient flow of a one-layer Transformer on a "
        "Markov chain, print a summary with its certificate, and write the run file "
        "(flow.npz) and a figure (overview.png).",
        allow_abbrev=False,
    )
    run.set_defaults(command=_run)
    chain = run.add_argument_group("chain")
    chain.add_argument(
        "--stationary",
        type=_law,
        metavar="P1,P2,…",
        help="stationary law π of a sticky chain P = λI + (1-λ)1πᵀ (default: "
        f"{','.join(map(str, STATIONARY))})",
    )
    chain.add_argument(
        "--stickiness",
        type=float,
        metavar="λ",
        help=f"λ of the sticky chain (default: {STICKINESS})",
    )
    chain.add_argument(
        "--matrix",
        type=Path,
        metavar="FILE",
        help="transition matrix of any irreducible chain instead, .npy or .csv",
    )
    chain.add_argument(
        "--context",
        type=int,
        metavar="LENGTH",
        help="length of the contexts (default: infinite)",
    )
    model = run.add_argument_group("model")
    model.add_argument(
        "--width", type=int, default=10, metavar="M", help="width (default: 10)"
    )
    model.add_argument(
        "--head-width",
        type=int,
        metavar="K",
        help="width of the attention head (default: the width)",
    )
    model.add_argument(
        "--scale",
        type=float,
        default=1e-3,
        metavar="ε",
        help="standard deviation of the initial parameters (default: 1e-3)",
    )
    model.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed (default: 0)"
    )
    flow = run.add_argument_group("flow")
    flow.add_argument(
        "--horizon",
        type=float,
        default=1e4,
        metavar="T",
        help="final time (default: 1e4)",
    )
    flow.add_argument(
        "--rtol",
        type=float,
        default=1e-8,
        metavar="R",
        help="relative tolerance (default: 1e-8)",
    )
    flow.add_argument(
        "--atol",
        type=float,
        metavar="A",
        help="absolute tolerance (default: follows the initial scale)",
    )
    flow.add_argument(
        "--solver",
        default="auto",
        metavar="NAME",
        help=f"one of {', '.join(solvers.names())} (default: auto)",
    )
    flow.add_argument(
        "--step",
        type=float,
        metavar="H",
        help=f"length of a step of {' and '.join(solvers.FIXED_STEP)} "
        "(default: 1/λ_max at the start)",
    )
    run.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for flow.npz and overview.png (default: out/run), or with --set "
        "for the store (default: out/sweep)",
    )
    many = run.add_argument_group("many flows")
    many.add_argument(
        "--set",
        action="append",
        metavar="NAME=A,B,…",
        help="compute a flow for each of these values of an option, and for each "
        "combination if given several times, into a store",
    )
    many.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="flows computed at once (default: one for each core)",
    )
    many.add_argument("--engine", metavar="NAME", help="local (default) or ray")
    run.add_argument("--no-progress", action="store_true", help="no progress bar")

    show = commands.add_parser(
        "show",
        help="print the summary of a run file",
        description="Print the summary of a run file and, if asked, draw its figure.",
        allow_abbrev=False,
    )
    show.set_defaults(command=_show)
    show.add_argument("file", type=Path, metavar="FILE", help="what a run wrote")
    show.add_argument(
        "--figure", type=Path, metavar="PATH", help="write the overview figure here"
    )
    _add_sweeps(commands)
    return parser


def _add_sweeps(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="compute a task at every point of a grid",
        description="Compute what a TOML file describes: `store`, a folder; `task`, as "
        "module:function or file.py:function, or else `[run]`, options of `gradflow "
        "run`; and `[grid]`, with axes such as [1, 2], { range = [0, 5] }, { linear = "
        "[0, 1, 11] } or { logarithmic = [1e-4, 1, 9] }; or `[[points]]`; or "
        "`[draws]`, with `count`, `seed` and `laws`, such as { a = { log_uniform = "
        "[1e-3, 1] } }. What is in the store already is not computed again.",
        allow_abbrev=False,
    )
    sweep.set_defaults(command=_sweep)
    sweep.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
    sweep.add_argument("--no-progress", action="store_true", help="no progress bar")

    status = commands.add_parser(
        "status",
        help="say what a store holds",
        description="Print what a store holds and what failed. The exit code is 0 if "
        "every point has its result.",
        allow_abbrev=False,
    )
    status.set_defaults(command=_status)
    status.add_argument("store", type=Path, metavar="STORE", help="a folder")
    status.add_argument(
        "--check", action="store_true", help="read every result and name the damaged"
    )
    status.add_argument(
        "--traceback", action="store_true", help="show the tracebacks of failures"
    )
