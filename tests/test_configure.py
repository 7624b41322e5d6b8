"""What XLA is asked for, and that a user's own wish stands."""

import os

import pytest

from gradflow import _configure as _xla

OURS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, OURS),
        (
            "--xla_cpu_enable_fast_math=false",
            f"--xla_cpu_enable_fast_math=false {OURS}",
        ),
        ("--xla_backend_extra_options=a=1", "--xla_backend_extra_options=a=1"),
        (OURS, OURS),
    ],
)
def test_small_loops(given, expected, monkeypatch):
    if given is None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    else:
        monkeypatch.setenv("XLA_FLAGS", given)
    _xla.compile_small_loops_whole()
    assert os.environ["XLA_FLAGS"] == expected
