"""Singular values over time."""

import dataclasses

import numpy as np
import pytest
from figure_parts import legend

from gradflow import plotting


def expected_singular_values(flow):
    p = flow.params
    svd = [np.linalg.svd(W, compute_uv=False) for W in (p.W0, p.W1, p.WQ @ p.WK.mT)]
    # W_Q W_K^T is 3×3, but of rank 2.
    return [*svd[0].T, *svd[1].T, *svd[2].T[:2]]


@pytest.mark.parametrize("watched", [True, False])
def test_singular_values(flow, unobserved, ax, watched):
    assert plotting.plot_singular_values(flow if watched else unobserved, ax) is ax
    expected = expected_singular_values(flow)
    assert len(ax.lines) == len(expected) == 8
    for line, values in zip(ax.lines, expected, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), flow.ts[1:])
        np.testing.assert_allclose(line.get_ydata(), values[1:], rtol=1e-8, atol=1e-14)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert legend(ax) == ["$W_0$", "$W_1$", r"$W_Q W_K^\top$"]
    assert ax.get_title(loc="left") == "Singular values"


def test_of_many_singular_values_the_largest(flow, ax):
    observables = {
        f"singular_values_{name}": np.tile(np.arange(9.0, 0.0, -1.0), (len(flow.ts), 1))
        for name in ("W0", "W1", "QK")
    }
    watched = dataclasses.replace(flow, params=flow.ts, observables=observables)
    plotting.plot_singular_values(watched, ax)
    assert [line.get_ydata()[0] for line in ax.lines] == [9, 8, 7, 6, 5] * 3
    assert "at most 5 of each" in ax.get_title(loc="left")


def test_singular_values_that_are_zero_leave_a_gap(flow, ax):
    values = np.tile([1.0, 1e-17], (len(flow.ts), 1))
    observables = {f"singular_values_{name}": values for name in ("W0", "W1", "QK")}
    plotting.plot_singular_values(
        dataclasses.replace(flow, observables=observables), ax
    )
    assert np.all(np.isnan(ax.lines[1].get_ydata()))
    assert ax.get_ylim()[0] > 1e-3
