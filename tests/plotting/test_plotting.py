import dataclasses
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

import gradflow
from gradflow import (
    FiniteContext,
    InfiniteContext,
    MarkovChain,
    OneLayerParameters,
    OneLayerTransformer,
    Problem,
    plotting,
)

LABELS = ("the", "$x$", "_", " ")
PANELS = (
    plotting.plot_loss,
    plotting.plot_singular_values,
    plotting.plot_attention,
    plotting.plot_embeddings,
)


@pytest.fixture(scope="module")
def flow():
    """Through condensation and into focus, at a rough tolerance."""

    def problem(labels=None):
        chain = MarkovChain.sticky([0.7, 0.2, 0.06, 0.04], 0.5, labels=labels)
        model = OneLayerTransformer(4, 3, head_width=2)
        return Problem(model, InfiniteContext(chain))

    # Shapes and (default) labels as in test_cli.py: one compilation serves both.
    ts = np.append(0.0, np.geomspace(0.1, 150, 20))
    start = problem().init(scale=0.01)
    flow = gradflow.integrate(problem(), start, 150.0, ts=ts, rtol=1e-5)
    return dataclasses.replace(flow, problem=problem(LABELS))


def bowl(x):
    return 0.5 * jnp.sum(x**2)


@pytest.fixture
def bowl_flow(flow):
    """A user's own loss, whose flow needs no solver."""
    x = np.exp(-flow.ts[:, None]) * np.array([1.0, 2.0])
    return dataclasses.replace(
        flow, problem=bowl, params=x, loss=0.5 * np.sum(x**2, axis=1), observables={}
    )


@pytest.fixture
def ax():
    return Figure(layout="constrained").subplots()


@pytest.fixture
def unobserved(flow):
    """The same flow of a user who watched nothing that a figure shows."""
    return dataclasses.replace(flow, observables={})


@pytest.fixture
def many(flow):
    """Twelve tokens whose attention was made up."""
    law = np.arange(1.0, 13.0) / 78
    chain = MarkovChain.sticky(law, 0.5, labels=[f"t{i}" for i in range(12)])
    problem = Problem(OneLayerTransformer(12, 2), InfiniteContext(chain))
    rng = np.random.default_rng(0)
    shapes = problem.model.shapes.items()
    return dataclasses.replace(
        flow,
        problem=problem,
        params=OneLayerParameters(
            **{name: rng.normal(size=(len(flow.ts), *shape)) for name, shape in shapes}
        ),
        observables={"attention": rng.uniform(size=(len(flow.ts), 12, 12))},
    )


def with_embeddings(flow, start, end):
    """The flow with embeddings that move from `start` to `end` in straight lines."""
    share = np.linspace(0, 1, len(flow.ts))[:, None, None]
    W0 = (1 - share) * np.array(start) + share * np.array(end)
    times, d, m = W0.shape
    WQ, W1 = np.zeros((times, m, 1)), np.zeros((times, m, d))
    params = OneLayerParameters(W0=W0, WQ=WQ, WK=WQ, W1=W1)
    return dataclasses.replace(flow, params=params)


def drawn(ax):
    """Lay the figure out, as saving it would."""
    ax.figure.draw_without_rendering()
    return ax


def levels(ax):
    """The heights of the horizontal lines across the Axes, and their labels."""
    across = [line for line in ax.lines if list(line.get_xdata()) == [0, 1]]
    return sorted(line.get_ydata()[0] for line in across), [
        text.get_text() for text in ax.texts
    ]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


#
# Loss
#


def test_loss_over_logarithmic_time(flow, ax):
    assert plotting.plot_loss(flow, ax) is ax
    x, y = ax.lines[0].get_data()
    np.testing.assert_array_equal(x, flow.ts[1:])
    np.testing.assert_array_equal(y, flow.loss[1:])
    assert ax.get_xscale() == "log"
    assert ax.get_xlim() == (flow.ts[1], flow.ts[-1])


def test_loss_levels(flow, ax):
    plotting.plot_loss(flow, ax)
    pi = np.array([0.7, 0.2, 0.06, 0.04])
    P = 0.5 * np.eye(4) + 0.5 * pi
    unigram, rate = -pi @ np.log(pi), -pi @ np.sum(P * np.log(P), axis=1)
    heights, labels = levels(ax)
    np.testing.assert_allclose(heights, [rate, unigram], rtol=1e-12)
    assert labels == [f"unigram entropy {unigram:.4f}", f"entropy rate {rate:.4f}"]
    low, high = ax.get_ylim()
    assert low < rate < unigram < flow.loss.max() < high


def test_loss_shows_a_floor_that_is_not_the_entropy_rate(flow, ax):
    population = FiniteContext(flow.problem.population.chain, 2, start="uniform")
    problem = Problem(flow.problem.model, population)
    plotting.plot_loss(dataclasses.replace(flow, problem=problem), ax)
    heights, labels = levels(ax)
    assert len(heights) == 3
    assert problem.floor in heights
    assert f"floor {problem.floor:.4f}" in labels


def test_loss_of_a_plain_function_has_no_levels(bowl_flow, ax):
    plotting.plot_loss(bowl_flow, ax)
    assert levels(ax) == ([], [])
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), bowl_flow.loss[1:])


def test_a_flow_without_two_times_after_zero_is_refused(bowl_flow):
    short = dataclasses.replace(
        bowl_flow,
        **{n: getattr(bowl_flow, n)[:2] for n in ("ts", "params", "loss", "speed")},
    )
    with pytest.raises(ValueError, match=r"two saved times after 0.* has 1"):
        plotting.plot_loss(short)
    assert not plt.get_fignums()


#
# Singular values
#


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


#
# Attention
#


@pytest.mark.parametrize("watched", [True, False])
def test_attention(flow, unobserved, ax, watched):
    assert plotting.plot_attention(flow if watched else unobserved, ax) is ax
    (mesh,) = ax.collections
    expected = flow.observables["attention"][1:].reshape(20, 16).T
    np.testing.assert_allclose(mesh.get_array(), expected, rtol=1e-12)
    assert np.ptp(expected) > 0.5
    assert mesh.get_clim() == (0, 1)
    # Rows are read from the top, and times lie within their cells.
    assert ax.get_ylim() == (15.5, -0.5)
    edges = mesh.get_coordinates()[0, :, 0]
    assert np.all((edges[:-1] < flow.ts[1:]) & (flow.ts[1:] < edges[1:]))


def test_attention_rows_are_grouped_by_query(flow, ax):
    plotting.plot_attention(flow, ax)
    assert levels(ax)[0] == [3.5, 7.5, 11.5]
    names = ["the", r"\$x\$", "_", "' '"]
    expected = [f"{query} → {key}" for query in names for key in names]
    assert [label.get_text() for label in ax.get_yticklabels()] == expected
    np.testing.assert_array_equal(ax.get_yticks(), np.arange(16))
    assert ax.get_ylabel() == "query → key"


def test_attention_in_a_small_axes_labels_the_queries(flow):
    ax = Figure(figsize=(3, 1.5)).subplots()
    plotting.plot_attention(flow, ax)
    assert len(ax.get_yticklabels()) == 4
    np.testing.assert_array_equal(ax.get_yticks(), [1.5, 5.5, 9.5, 13.5])
    assert ax.get_ylabel() == "query (keys in the same order)"


@pytest.mark.parametrize("watched", [True, False])
def test_attention_of_many_tokens_shows_the_most_frequent(many, ax, watched):
    if not watched:
        many = dataclasses.replace(many, observables={})
    plotting.plot_attention(many, ax)
    assert ax.get_title(loc="left") == "Attention (8 most frequent of 12)"
    frequent = np.arange(11, 3, -1)
    if watched:
        attention = many.observables["attention"]
    else:
        p, pi = many.params, many.problem.population.chain.stationary
        weights = pi * np.exp(p.W0 @ p.WQ @ p.WK.mT @ p.W0.mT)
        attention = weights / weights.sum(axis=-1, keepdims=True)
    expected = attention[1:, frequent][:, :, frequent].reshape(20, 64).T
    np.testing.assert_allclose(ax.collections[0].get_array(), expected, rtol=1e-9)


#
# Embeddings
#


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


#
# All together
#


def test_overview(flow):
    figure: Any = plotting.overview(flow)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[:4] == [
        "(a) Loss",
        "(b) Singular values",
        "(c) Attention",
        "(d) Token embeddings",
    ]
    assert figure.axes[4].get_ylabel() == "attention"  # the colour bar
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_ydata(), flow.loss[1:])
    # It is the caller's alone, and a notebook can show it.
    assert not plt.get_fignums()
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("which", ["flow", "many", "bowl_flow"])
def test_overview_clips_nothing(which, request):
    figure = plotting.overview(request.getfixturevalue(which))
    figure.draw_without_rendering()
    canvas = figure.bbox.padded(1)
    for ax in figure.axes:
        box = ax.get_tightbbox()
        assert box is not None
        assert canvas.x0 <= box.x0 < box.x1 <= canvas.x1
        assert canvas.y0 <= box.y0 < box.y1 <= canvas.y1


def test_overview_labels_every_row_of_eight_tokens(many):
    attention = plotting.overview(many).axes[2]
    assert len(attention.get_yticklabels()) == 64


def test_overview_of_a_plain_function_is_its_loss(bowl_flow):
    (ax,) = plotting.overview(bowl_flow).axes
    assert ax.get_title(loc="left") == "Loss"


def test_overview_of_a_users_loss_on_the_model(flow):
    figure = plotting.overview(dataclasses.replace(flow, problem=None, observables={}))
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
def test_what_does_not_apply_is_refused(bowl_flow, plot, named):
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


#
# Stages
#

STAGES = (
    gradflow.Stage("condensation", 0.0, 30.0, 0, {}),
    gradflow.Stage("focus", 30.0, 80.0, 1, {}),
    gradflow.Stage("dilution", 80.0, 150.0, 1, {}),
)


def bands(ax):
    """The extent of each band, left and right."""
    return [(p.get_x(), p.get_x() + p.get_width()) for p in ax.patches]


def band_names(ax):
    """Each name and the time it stands at."""
    (above,) = ax.child_axes
    texts = [label.get_text() for label in above.get_xticklabels()]
    return dict(zip(texts, above.get_xticks(), strict=True))


@pytest.mark.parametrize("scale", ["log", "linear"])
def test_a_band_for_each_stage_with_its_name_in_its_middle(ax, scale):
    ax.set_xscale(scale)
    ax.set_xlim(1.0, 100.0)
    plotting.shade(ax, STAGES)
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
    plotting.shade(ax, STAGES)
    assert bands(ax) == [(40.0, 70.0)]
    assert list(band_names(ax)) == ["focus"]


def test_of_several_axes_the_first_carries_the_names():
    first, second = Figure(layout="constrained").subplots(2, 1)
    for ax in (first, second):
        ax.set_xlim(0.0, 150.0)
    plotting.shade([first, second], STAGES)
    assert bands(first) == bands(second) == [(0, 30), (30, 80), (80, 150)]
    assert len(band_names(first)) == 3
    assert not second.child_axes


@pytest.mark.parametrize("plot", PANELS[:3])
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
    figure: Any = plotting.overview(flow, stages=STAGES)
    figure.draw_without_rendering()
    for ax in figure.axes[:3]:
        (above,) = ax.child_axes
        title = ax._left_title.get_window_extent()
        for label in above.get_xticklabels():
            box = label.get_window_extent()
            assert ax.bbox.y1 <= box.y0 + 1 < box.y1 <= title.y0 + 1
            assert box.x1 <= figure.bbox.x1
    assert not figure.axes[3].child_axes


def test_what_is_no_stage_is_refused(ax):
    with pytest.raises(ValueError, match=r"`stages` must be those of .*, got str"):
        plotting.shade(ax, ["focus"])


def test_stages_of_one_name_have_one_colour():
    named = ["condensation", "focus", "anti-focus", "dilution", "new direction"]
    assert len({plotting.stage_colour(name) for name in named}) == 5
    assert plotting.stage_colour("plateau") == (1, 1, 1)
    assert min(plotting.stage_colour("whatever")) > 0.8
