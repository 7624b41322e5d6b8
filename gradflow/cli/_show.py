"""`gradflow show`, and the figure of a flow."""

import argparse
from pathlib import Path

from .._core.file_format import RunFileError
from ..flows import AbstractTrajectory, trajectory_of
from ..flows._contents import read
from ._common import DONE, BadInput


def show(arguments: argparse.Namespace) -> int:
    """Print the summary of a flow or training run and, on request, draw its figure."""
    try:
        flow = read(arguments.file, trajectory_of)
    except RunFileError as error:
        raise BadInput(str(error)) from error
    try:
        figure = None if arguments.figure is None else draw(flow, arguments.figure)
    except (OSError, ValueError) as error:
        raise BadInput(no_figure(error)) from error
    print(flow)
    if figure is not None:
        print(f"figure           {figure}")
    return DONE


def draw(flow: AbstractTrajectory, path: Path) -> Path:
    """Draw the overview of `flow` into the file at `path`."""
    from .. import plotting  # imports matplotlib, which is slow

    plotting.plot_overview(flow).savefig(path, dpi=150)
    return path


def no_figure(error: Exception) -> str:
    return f"the figure could not be drawn: {str(error).rstrip('.')}."
