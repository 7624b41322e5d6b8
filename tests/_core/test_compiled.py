"""Compiled code does not fill a process's memory mappings."""

import sys

import jax
import jax.numpy as jnp
import pytest

from gradflow._core import compiled as _compile_clock


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are counted on Linux")
def test_compiled_code_is_forgotten_before_it_fills_the_mappings(monkeypatch):
    monkeypatch.setattr(_compile_clock, "_LOOK_EVERY", 1)
    compiled = [jax.jit(lambda x, i=i: jnp.sin(x) * i) for i in range(40)]

    def run():
        clock = _compile_clock.CompileClock()
        for function in compiled:
            function(jnp.ones(3))
        return clock.seconds()

    assert run() > 0
    before = _compile_clock._mappings()
    # All is kept while there is room, and what is kept is not compiled again.
    monkeypatch.setattr(_compile_clock, "_most_mappings", lambda: 3 * before)
    assert not _compile_clock.make_room_for_code()
    assert run() == 0
    monkeypatch.setattr(_compile_clock, "_looked_at", 0)
    monkeypatch.setattr(_compile_clock, "_most_mappings", lambda: before)
    assert _compile_clock.make_room_for_code()
    assert _compile_clock._mappings() < before - 40
    assert run() > 0


def test_a_look_is_not_worth_it_where_nothing_was_compiled(monkeypatch):
    monkeypatch.setattr(_compile_clock, "_looked_at", len(_compile_clock._intervals))
    monkeypatch.setattr(_compile_clock, "_most_mappings", lambda: 0)
    assert not _compile_clock.make_room_for_code()


def test_where_nobody_counts_mappings(monkeypatch):
    monkeypatch.setattr(_compile_clock, "_LOOK_EVERY", 0)
    monkeypatch.setattr(_compile_clock, "_mappings", lambda: 0)
    assert not _compile_clock.make_room_for_code()
