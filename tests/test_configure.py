"""Small loops are compiled whole, unless the user has XLA options of their own."""

import os

import pytest

from gradflow import _configure

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
    _configure.configure()
    assert os.environ["XLA_FLAGS"] == expected
