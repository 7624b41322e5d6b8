"""All figures of a flow together, and the names of the room."""

import dataclasses
import inspect
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from figure_parts import legend

from gradflow import plotting

PANELS = (
    plotting.plot_loss,
    plotting.plot_singular_values,
    plotting.plot_attention,
    plotting.plot_embeddings,
)


def test_overview(flow):
    figure: Any = plotting.plot_overview(flow)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[:4] == [
        "(a) Loss",
        "(b) Singular values",
        "(c) Attention",
        "(d) Token embeddings",
    ]
    assert figure.axes[4].get_ylabel() == "attention"  # the colour bar
    assert np.all(np.isin(flow.loss[1:], figure.axes[0].lines[0].get_ydata()))
    # pyplot does not know the figure, and a notebook can show it.
    assert not plt.get_fignums()
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("which", ["flow", "many", "bowl_flow", "heads_flow"])
def test_overview_clips_nothing(which, request):
    figure = plotting.plot_overview(request.getfixturevalue(which))
    figure.draw_without_rendering()
    canvas = figure.bbox.padded(1)
    for ax in figure.axes:
        box = ax.get_tightbbox()
        assert box is not None
        assert canvas.x0 <= box.x0 < box.x1 <= canvas.x1
        assert canvas.y0 <= box.y0 < box.y1 <= canvas.y1


def test_overview_labels_every_row_of_eight_tokens(many):
    attention = plotting.plot_overview(many).axes[2]
    assert len(attention.get_yticklabels()) == 64


def test_overview_of_a_plain_function_is_its_loss(bowl_flow):
    (ax,) = plotting.plot_overview(bowl_flow).axes
    assert ax.get_title(loc="left") == "Loss"


def test_overview_of_heads_is_their_loss_and_attention(heads_flow):
    figure = plotting.plot_overview(heads_flow)
    assert [ax.get_title(loc="left") for ax in figure.axes[:2]] == [
        "(a) Loss",
        "(b) Attention",
    ]
    assert figure.axes[1].get_ylabel() == "head → lag"


def test_overview_of_a_users_loss_on_the_model(flow):
    figure = plotting.plot_overview(
        dataclasses.replace(flow, problem=None, observables={})
    )
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "(a) Loss",
        "(b) Singular values",
        "(c) Token embeddings",
    ]
    assert legend(figure.axes[2]) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("plot", "named"),
    [
        (plotting.plot_singular_values, "observables singular_values_W0, "),
        (plotting.plot_attention, "observable 'attention'"),
        (plotting.plot_embeddings, "W0"),
    ],
)
def test_a_figure_that_does_not_apply_says_what_it_needs(bowl_flow, plot, named):
    with pytest.raises(ValueError, match=f"`{plot.__name__}` needs .*{named}.*: integ"):
        plot(bowl_flow)
    assert not plt.get_fignums()


@pytest.mark.parametrize("plot", PANELS)
def test_without_axes_pyplot_makes_them(flow, plot):
    ax = plot(flow)
    try:
        assert plt.gcf() is ax.figure
    finally:
        plt.close(ax.figure)


def test_the_room_shows_its_public_names_only():
    assert dir(plotting) == sorted(plotting.__all__)
    functions = [
        name for name in dir(plotting) if inspect.isfunction(getattr(plotting, name))
    ]
    assert [name for name in functions if not name.startswith("plot_")] == [
        "stage_colour"
    ]
