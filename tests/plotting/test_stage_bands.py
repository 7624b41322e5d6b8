"""Stages as bands behind figures over time."""

from typing import Any

import numpy as np
import pytest
from figure_parts import STAGES, band_names, bands
from matplotlib.figure import Figure

from gradflow import plotting

OVER_TIME = (
    plotting.plot_loss,
    plotting.plot_singular_values,
    plotting.plot_attention,
)


@pytest.mark.parametrize("scale", ["log", "linear"])
def test_a_band_for_each_stage_with_its_name_in_its_middle(ax, scale):
    ax.set_xscale(scale)
    ax.set_xlim(1.0, 100.0)
    plotting.plot_stages(STAGES, ax)
    # The first begins before the axis does and the last ends after it.
    edges = np.array([1.0, 30.0, 80.0, 100.0])
    np.testing.assert_allclose(
        bands(ax), np.stack([edges[:-1], edges[1:]], 1), rtol=1e-12
    )
    names = band_names(ax)
    assert list(names) == ["condensation", "focus", "dilution"]
    middles = (edges[1:] + edges[:-1]) / 2
    if scale == "log":
        middles = np.sqrt(edges[1:] * edges[:-1])
    np.testing.assert_allclose(list(names.values()), middles, rtol=1e-12)
    assert ax.get_xlim() == (1.0, 100.0)
    assert len({p.get_facecolor() for p in ax.patches}) == 3


def test_stages_beyond_the_axis_are_left_out(ax):
    ax.set_xlim(40.0, 70.0)
    plotting.plot_stages(STAGES, ax)
    assert bands(ax) == [(40.0, 70.0)]
    assert list(band_names(ax)) == ["focus"]


def test_of_several_axes_the_first_carries_the_names():
    first, second = Figure(layout="constrained").subplots(2, 1)
    for ax in (first, second):
        ax.set_xlim(0.0, 150.0)
    plotting.plot_stages(STAGES, [first, second])
    assert bands(first) == bands(second) == [(0, 30), (30, 80), (80, 150)]
    assert len(band_names(first)) == 3
    assert not second.child_axes


@pytest.mark.parametrize("plot", OVER_TIME)
def test_stages_in_every_plot_over_time(flow, ax, plot):
    plot(flow, ax, stages=STAGES)
    assert list(band_names(ax)) == ["condensation", "focus", "dilution"]
    if plot is plotting.plot_attention:  # which hides what lies beneath it
        across = [line.get_xdata()[0] for line in ax.lines[-2:]]
        assert across == [30.0, 80.0]
        assert not ax.patches
    else:
        assert [end for _, end in bands(ax)] == [30.0, 80.0, flow.ts[-1]]
    assert ax.get_xlim() == (flow.ts[1], flow.ts[-1])


def test_names_of_stages_cover_neither_the_title_nor_the_data(flow):
    figure: Any = plotting.plot_overview(flow, stages=STAGES)
    figure.draw_without_rendering()
    for ax in figure.axes[:3]:
        (above,) = ax.child_axes
        title = ax._left_title.get_window_extent()
        for label in above.get_xticklabels():
            box = label.get_window_extent()
            assert ax.bbox.y1 <= box.y0 + 1 < box.y1 <= title.y0 + 1
            assert box.x1 <= figure.bbox.x1
    assert not figure.axes[3].child_axes


def test_only_stages_are_drawn(ax):
    with pytest.raises(ValueError, match=r"`stages` must be a result of .* with a str"):
        plotting.plot_stages(["focus"], ax)


def test_stages_of_one_name_have_one_colour():
    named = ["condensation", "focus", "anti-focus", "dilution", "new direction"]
    assert len({plotting.stage_colour(name) for name in named}) == 5
    assert plotting.stage_colour("plateau") == (1, 1, 1)
    assert min(plotting.stage_colour("whatever")) > 0.8
