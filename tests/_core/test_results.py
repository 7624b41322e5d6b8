"""Results that come in numbers behave alike."""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from gradflow._core.result_tables import Column, legend, listed, table
from gradflow.analysis import (
    EnsembleStages,
    Occurrence,
    Occurrences,
    Saddles,
    Stage,
    Stages,
)

STAGES = tuple(Stage(name, 0.0, 1.0, 0, {}) for name in "abc")
SOME = [
    Stages(STAGES, ()),
    EnsembleStages((Stages(STAGES, ()), Stages(STAGES[:1], ()), Stages((), ()))),
    Occurrences(tuple(Occurrence(name, 1.0, True) for name in "abc")),
]


@pytest.mark.parametrize("results", SOME, ids=lambda r: type(r).__name__)
def test_results_are_immutable_sequences(results):
    assert isinstance(results, Sequence)
    first, second, third = results
    assert results[0] is results[-3] is results[np.int64(0)] is first
    assert results[1:] == (second, third)
    assert results.index(second) == 1
    assert list(reversed(results)) == [third, second, first]
    assert third in results
    with pytest.raises(IndexError, match="index 3 is out of range for 3 results"):
        _ = results[3]
    (field, *_) = results.__dataclass_fields__
    with pytest.raises(FrozenInstanceError):
        setattr(results, field, ())


@pytest.mark.parametrize("results", [*SOME, Saddles((), ("why",))])
def test_results_print_as_a_table_and_have_a_short_repr(results):
    assert repr(results).startswith(f"{type(results).__name__}(")
    assert len(repr(results).splitlines()) == 1
    assert len(str(results).splitlines()) >= 1 + len(results) / 3
    assert str(results) != repr(results)


def test_a_table_is_aligned_and_explained():
    columns = [Column("name", "the name.", 6, "<"), Column("t", "the time.", 3)]
    assert table(columns, [("a", "1"), ("longer name", "12345")]) == (
        "name            t\na               1\nlonger name 12345"
    )
    assert legend([(c.title, c.meaning) for c in columns]) == (
        "  name  the name.\n  t     the time."
    )


def test_a_long_list_is_cut():
    assert listed(["a", "b"]) == "a, b"
    assert listed(["a", "b", "c"], most=2) == "a, b, … 3 in all"
