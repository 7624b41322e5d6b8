"""The paths of token embeddings."""

import dataclasses

import numpy as np
import pytest
from figure_parts import drawn, legend
from matplotlib.colors import to_rgba

from gradflow import OneLayerParameters, plotting


def with_embeddings(flow, start, end):
    """The flow with embeddings that move from `start` to `end` in straight lines."""
    share = np.linspace(0, 1, len(flow.ts))[:, None, None]
    W0 = (1 - share) * np.array(start) + share * np.array(end)
    times, d, m = W0.shape
    WQ, W1 = np.zeros((times, m, 1)), np.zeros((times, m, d))
    params = OneLayerParameters(W0=W0, WQ=WQ, WK=WQ, W1=W1)
    return dataclasses.replace(flow, params=params)


def test_embedding_paths(flow, ax):
    assert plotting.plot_embeddings(flow, ax) is ax
    _, _, Vt = np.linalg.svd(flow.params.W0[-1])
    expected = flow.params.W0 @ Vt[:2].T
    assert len(ax.lines) == 3 * 4
    drawn_ends = np.array([line.get_xydata()[-1] for line in ax.lines[::3]])
    signs = np.sign(drawn_ends * expected[-1])
    np.testing.assert_array_equal(signs, np.tile(signs[0], (4, 1)))
    assert np.all(drawn_ends[np.abs(drawn_ends).argmax(axis=0), [0, 1]] > 0)
    for token in range(4):
        path, start, end = ax.lines[3 * token : 3 * token + 3]
        np.testing.assert_allclose(
            path.get_xydata(), expected[:, token] * signs[0], atol=1e-12
        )
        np.testing.assert_array_equal(start.get_xydata(), path.get_xydata()[:1])
        np.testing.assert_array_equal(end.get_xydata(), path.get_xydata()[-1:])
        assert start.get_markerfacecolor() == "white"
        assert end.get_markerfacecolor() == path.get_color()


def test_embedding_labels(flow, ax):
    plotting.plot_embeddings(flow, ax)
    names = ("the", r"\$x\$", "_", "' '")
    law = (0.7, 0.2, 0.06, 0.04)
    assert legend(ax) == [
        rf"{n}  ($\pi$ = {p:.3g})" for n, p in zip(names, law, strict=True)
    ]
    colours = [to_rgba(line.get_color()) for line in ax.lines[::3]]
    handles = [to_rgba(h.get_color()) for h in ax.get_legend().legend_handles]
    assert colours == handles
    assert len(set(colours)) == 4


def test_embeddings_of_many_tokens_are_those_of_the_most_frequent(many, ax):
    plotting.plot_embeddings(many, ax)
    assert len(ax.lines) == 3 * 8
    expected = [f"t{i}" for i in range(11, 3, -1)]
    assert [label.split()[0] for label in legend(ax)] == expected
    assert ax.get_title(loc="left") == "Token embeddings (8 most frequent of 12)"
    # A rotation keeps lengths.
    ends = np.array([line.get_xydata()[-1] for line in ax.lines[::3]])
    norms = np.linalg.norm(many.params.W0[-1, 11:3:-1], axis=1)
    np.testing.assert_allclose(np.linalg.norm(ends, axis=1), norms, rtol=1e-12)


@pytest.mark.parametrize(
    ("height", "stretch"), [(1.0, 1), (0.1, 5), (1e-6, 10), (0.0, 1)]
)
def test_embeddings_are_to_scale_unless_near_a_line(flow, ax, height, stretch):
    moving = with_embeddings(flow, np.zeros((2, 2)), [[1.0, 0.0], [0.0, height]])
    drawn(plotting.plot_embeddings(moving, ax))
    assert ax.get_aspect() == stretch
    assert (f"stretched {stretch}×" in ax.get_ylabel()) == (stretch > 1)


def test_embeddings_of_width_one_and_of_a_flow_at_rest(flow, ax):
    W0 = [[1.0], [-2.0]]
    drawn(plotting.plot_embeddings(with_embeddings(flow, W0, W0), ax))
    ends = [line.get_xydata()[-1].tolist() for line in ax.lines[::3]]
    assert ends == [[-1, 0], [2, 0]]
    assert legend(ax) == ["0", "1"]  # the chain has four tokens: it is not theirs
