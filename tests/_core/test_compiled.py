"""Compiled code does not fill a process's memory mappings."""

import sys

import jax
import jax.numpy as jnp
import pytest

from gradflow._core import compiled as compilation
from gradflow._core.compiled import CompileClock, jit, make_room_for_code


def seconds_of(functions):
    """The time that a call of all functions spends compiling."""
    clock = CompileClock()
    for function in functions:
        function(jnp.ones(3))
    return clock.seconds()


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are counted on Linux")
def test_own_code_is_forgotten_before_it_fills_the_mappings(monkeypatch):
    monkeypatch.setattr(compilation, "_LOOK_EVERY", 1)
    monkeypatch.setattr(compilation, "_own", [*compilation._own])
    ours = [jit(lambda x, i=i: jnp.sin(x) * i) for i in range(40)]
    theirs = [jax.jit(lambda x, i=i: jnp.cos(x) * i) for i in range(3)]
    assert seconds_of(ours) > 0
    assert seconds_of(theirs) > 0
    before = compilation._mappings()
    # Everything is kept while there is room, and is then not compiled again.
    monkeypatch.setattr(compilation, "_most_mappings", lambda: 3 * before)
    assert not make_room_for_code()
    assert seconds_of(ours) == 0
    monkeypatch.setattr(compilation, "_looked_at", 0)
    monkeypatch.setattr(compilation, "_most_mappings", lambda: before)
    assert make_room_for_code()
    assert compilation._mappings() < before - 40
    assert seconds_of(theirs) == 0  # a user's functions stay compiled
    assert seconds_of(ours) > 0


def test_mappings_are_not_counted_if_nothing_was_compiled(monkeypatch):
    monkeypatch.setattr(compilation, "_looked_at", len(compilation._intervals))
    monkeypatch.setattr(compilation, "_most_mappings", lambda: 0)
    assert not make_room_for_code()


def test_systems_that_do_not_count_mappings(monkeypatch):
    monkeypatch.setattr(compilation, "_LOOK_EVERY", 0)
    monkeypatch.setattr(compilation, "_mappings", lambda: 0)
    assert not make_room_for_code()
