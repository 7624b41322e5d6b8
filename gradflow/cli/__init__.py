"""The command `gradflow`: parsing and printing."""

from ._main import main as main
