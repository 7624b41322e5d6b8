"""The command line's grammar and its help."""

import argparse
from pathlib import Path
from typing import NoReturn

from .. import __version__
from ..solvers._internals import FIXED_STEP, names as solver_names
from ..sweeps._runs import Run
from ._common import BadInput
from ._run import run
from ._show import show
from ._sweep import print_status, run_config
from ._transition_matrix import parse_labels

_DEFAULTS = Run()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (see {self.prog} --help).")


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `command` is the function to call."""
    parser = _Parser(
        prog="gradflow",
        description="The exact gradient flow of small Transformers on Markov data.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"gradflow {__version__}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_show(commands)
    _add_sweep(commands)
    _add_status(commands)
    return parser


#
# gradflow run
#


def _add_run(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "run",
        help="integrate a flow, by default that of the reference instance",
        description="Integrate the gradient flow of a one-layer Transformer on a "
        "Markov chain. Prints a summary with the flow's certificate, its stages and "
        "saddles, and writes a run file (flow.npz) and a figure (overview.png).",
        allow_abbrev=False,
    )
    command.set_defaults(command=run)
    _add_chain(command.add_argument_group("chain"))
    _add_model(command.add_argument_group("model"))
    _add_flow(command.add_argument_group("flow"))
    _add_many(command.add_argument_group("many flows"))
    command.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for flow.npz and overview.png (default: out/run); with --set, "
        "folder of the store (default: out/sweep)",
    )
    _add_no_progress(command)


# Options that are left out are None here: their defaults are those of `Run`.


def _add_chain(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--stationary",
        type=_numbers,
        metavar="P1,P2,…",
        help="stationary distribution π of a sticky chain P = λI + (1-λ)1πᵀ (default: "
        f"{','.join(map(str, _DEFAULTS.stationary or ()))})",
    )
    group.add_argument(
        "--stickiness",
        type=float,
        metavar="λ",
        help=f"λ of the sticky chain (default: {_DEFAULTS.stickiness})",
    )
    group.add_argument(
        "--matrix",
        type=Path,
        metavar="FILE",
        help="transition matrix of an irreducible chain, instead of a sticky chain: a "
        ".npy file, or a .csv file whose header row, if there is one, gives the labels",
    )
    group.add_argument(
        "--labels",
        type=parse_labels,
        metavar="A,B,…",
        help="a name for each token (default: the header row of --matrix, or 0,1,…)",
    )
    group.add_argument(
        "--context",
        type=int,
        metavar="LENGTH",
        help="length of the contexts (default: infinite)",
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--width",
        type=int,
        metavar="M",
        help=f"width of the model (default: {_DEFAULTS.width})",
    )
    group.add_argument(
        "--head-width",
        type=int,
        metavar="K",
        help="width of the attention head (default: the model's width)",
    )
    group.add_argument(
        "--scale",
        type=float,
        metavar="ε",
        help="standard deviation of the initial parameters (default: "
        f"{_short(_DEFAULTS.scale)})",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help=f"seed of the initial parameters (default: {_DEFAULTS.seed})",
    )


def _add_flow(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--horizon",
        type=float,
        metavar="T",
        help=f"final time (default: {_short(_DEFAULTS.horizon)})",
    )
    group.add_argument(
        "--rtol",
        type=float,
        metavar="R",
        help=f"relative tolerance (default: {_short(_DEFAULTS.rtol)})",
    )
    group.add_argument(
        "--atol",
        type=float,
        metavar="A",
        help="absolute tolerance (default: proportional to the initial scale)",
    )
    group.add_argument(
        "--solver",
        metavar="NAME",
        help=f"one of {', '.join(solver_names())} (default: {_DEFAULTS.solver})",
    )
    group.add_argument(
        "--step",
        type=float,
        metavar="H",
        help=f"step size of {' and '.join(FIXED_STEP)} (default: 1/λ_max of "
        "the Hessian at the start)",
    )


def _add_many(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--set",
        action="append",
        metavar="NAME=A,B,…",
        help="integrate a flow for each of these values of an option and keep them all "
        "in a store; repeat --set for all combinations of several options",
    )
    group.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of flows computed at once (default: one per core)",
    )
    group.add_argument("--engine", metavar="NAME", help="local (default) or ray")


def _short(power: float) -> str:
    """A power of ten, such as 1e-8."""
    return f"{power:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be numbers separated by commas, got {text!r}"
        ) from error


#
# gradflow show, gradflow sweep, gradflow status
#


def _add_show(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "show",
        help="print the summary of a run file",
        description="Print the summary of a run file and, with --figure, draw it.",
        allow_abbrev=False,
    )
    command.set_defaults(command=show)
    command.add_argument(
        "file", type=Path, metavar="FILE", help="a run file, such as flow.npz"
    )
    command.add_argument(
        "--figure", type=Path, metavar="PATH", help="file to draw the overview into"
    )


def _add_sweep(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "sweep",
        help="compute a task at every point of a grid",
        description="Carry out the sweep that a TOML file describes. Its keys are "
        "`store`, a folder; `task`, written module:function or file.py:function, or "
        "`[run]`, a table with options of `gradflow run`; and one of three "
        "descriptions of the points: `[grid]`, with axes such as [1, 2], { range = "
        "[0, 5] }, { linear = [0, 1, 11] } or { logarithmic = [1e-4, 1, 9] }; "
        "`[[points]]`; or `[draws]`, with `count`, `seed` and `distributions`, such "
        "as { a = { log_uniform = [1e-3, 1] } }. Results that are already in the "
        "store are not computed again.",
        allow_abbrev=False,
    )
    command.set_defaults(command=run_config)
    command.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
    _add_no_progress(command)


def _add_status(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "status",
        help="describe the contents of a store",
        description="Print how many points of a store have a result and which failed. "
        "The exit code is 0 if every point has its result.",
        allow_abbrev=False,
    )
    command.set_defaults(command=print_status)
    command.add_argument("store", type=Path, metavar="STORE", help="a store's folder")
    command.add_argument(
        "--check", action="store_true", help="read every result and list damaged ones"
    )
    command.add_argument(
        "--traceback", action="store_true", help="print the tracebacks of failures"
    )


def _add_no_progress(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--no-progress", action="store_true", help="show no progress bar"
    )
