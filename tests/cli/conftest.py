"""Command lines that are refused, or that stop where the flow would be integrated."""

import pytest

from gradflow.cli import main
from gradflow.sweeps import _runs


@pytest.fixture
def asked(monkeypatch):
    """The arguments of `integrate`, which is interrupted at once."""
    calls = {}

    def record(problem, params, t1, **options):
        calls.update(problem=problem, params=params, t1=t1, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(_runs, "integrate", record)
    return calls


@pytest.fixture
def refusal(capsys):
    """A function that returns the one sentence with which arguments are refused."""

    def refuse(arguments):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("gradflow: ")
        assert captured.err.endswith(".\n")
        assert captured.err.count("\n") == 1
        return captured.err

    return refuse
