"""The command `gradflow`."""

from ._main import main as main
