"""The rank-one reduction compared with the full flow."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

import gradflow
from gradflow import (
    InfiniteContext,
    MarkovChain,
    OneLayerParameters,
    OneLayerTransformer,
    Problem,
    RankOneParameters,
    RankOneProblem,
    plotting,
)

# All flows here use the solver that compiles fastest.
SOLVER = "tsit5"


@pytest.fixture(scope="module")
def problem(reference_chain):
    return Problem(OneLayerTransformer(4, 3, 2), InfiniteContext(reference_chain))


@pytest.fixture(scope="module")
def reduction(problem):
    return RankOneProblem(problem.population)


@pytest.fixture(scope="module")
def full(problem):
    """Through condensation, focus and dilution, until a new direction opens."""
    ts = np.append(0.0, np.geomspace(1.0, 500.0, 30))
    start = problem.init(seed=1, scale=1e-4)
    return gradflow.integrate(
        problem, start, 500.0, ts=ts, solver=SOLVER, rtol=1e-9, observables=()
    )


@pytest.fixture(scope="module")
def comparison(full):
    return gradflow.compare_rank_one(full)


def flat(params):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def numpy_distance(state, comparison, t):
    """‖θ - θ'‖/‖θ‖ at time t, in NumPy from the reduced numbers."""
    p, a = comparison.reduced.at(t - comparison.start), comparison.alpha
    both = np.outer(a, comparison.alpha_bar)
    embedded = OneLayerParameters(
        W0=np.outer(p.gamma, a), WQ=p.q * both, WK=p.k * both, W1=np.outer(a, p.beta)
    )
    theta = flat(state)
    return np.linalg.norm(theta - flat(embedded)) / np.linalg.norm(theta)


def test_the_reduction_follows_the_full_flow_until_a_direction_opens(comparison):
    c = comparison
    assert c.times[0] == c.start
    assert c.times[-1] == 500
    assert len(c.times) >= 200
    early, late = c.parted[0.01], c.parted[0.1]
    assert early is not None
    assert late is not None
    assert c.start + 100 < early < late < 500
    following = c.times < early
    # Most of the distance is what is off the manifold, which no reduction can have.
    assert np.max(c.distance[following] / c.off_manifold[following]) < 1.2
    assert np.all(c.distance >= c.off_manifold * (1 - 1e-9))
    for ours, theirs in [
        (c.full_gamma, c.reduced_gamma),
        (c.full_attention, c.reduced_attention),
        (c.full_loss, c.reduced_loss),
    ]:
        np.testing.assert_allclose(ours[following], theirs[following], atol=1e-4)
    # Then the full flow goes where the reduction cannot.
    assert c.full_loss[-1] < c.reduced_loss[-1] - 0.003


def test_dilution(comparison):
    """Frequent and rare embeddings move in opposite senses, the rare lose focus."""
    gamma, attention = comparison.reduced_gamma, comparison.reduced_attention
    assert np.all(np.diff(gamma[:, 0]) > 0)
    assert np.all(gamma[-1, 1:] < gamma[0, 1:] - 0.5)
    assert np.all(gamma[0] > 0)
    assert np.all(gamma[-1, 1:] < 0)
    assert attention[-1, 0] > 0.999
    # The peaks of theory.md.
    np.testing.assert_allclose(
        attention.max(axis=0)[1:], [0.773, 0.754, 0.751], atol=2e-3
    )
    assert np.all(attention[-1, 1:] < 0.5)


def test_what_is_compared(comparison, full, problem):
    c, t = comparison, 321.0
    i = int(np.argmin(np.abs(c.times - t)))
    t = float(c.times[i])
    state = full.at(t)
    assert c.distance[i] == pytest.approx(numpy_distance(state, c, t), rel=1e-9)
    assert c.full_loss[i] == pytest.approx(float(problem(state)), rel=1e-12)
    np.testing.assert_allclose(
        c.full_attention[i], problem.observables["attention"](state)[:, 0], rtol=1e-12
    )
    np.testing.assert_allclose(c.full_gamma[i], np.asarray(state.W0) @ c.alpha)
    np.testing.assert_allclose(c.reduced_loss, c.reduced.loss, rtol=1e-14)
    np.testing.assert_allclose(c.reduced_gamma, c.reduced.params.gamma)
    np.testing.assert_allclose(
        c.reduced_attention, c.reduced.observables["attention"][:, :, 0], rtol=1e-12
    )
    settings = c.reduced.settings
    assert (settings.solver, settings.rtol) == (SOLVER, 1e-9)
    assert settings.atol == full.settings.atol
    np.testing.assert_allclose(c.reduced.ts, c.times - c.start, rtol=1e-12)


def test_parting_is_located_between_times(comparison, full):
    for threshold in (0.01, 0.1, 0.03):
        t = comparison.parts_at(threshold)
        found = numpy_distance(full.at(t), comparison, t)
        assert found == pytest.approx(threshold, rel=1e-6)
        assert t not in comparison.times
    assert comparison.parts_at(0.01) == comparison.parted[0.01]
    assert comparison.parts_at(2.0) is None
    assert comparison.parts_at(1e-9) == comparison.start


def test_it_starts_nearest_to_the_manifold(comparison, full, reduction):
    """By a finer scan than the saved times, each of which is farther."""

    def off(t):
        state = full.at(float(t))
        return float(reduction.distance(state)), float(
            reduction.attention_distance(state)
        )

    here, attention = off(comparison.start)
    assert attention == pytest.approx(comparison.attention_off_manifold, rel=1e-9)
    assert attention < 0.1
    assert comparison.start not in full.ts
    around = comparison.start * np.linspace(0.8, 1.2, 21)
    for t in [*around, *full.ts[1:]]:
        distance, attention = off(t)
        assert attention > 0.1 or distance >= here * (1 - 1e-7)


def test_a_window_of_ones_own(full):
    c = gradflow.compare_rank_one(full, start=100.0, end=150.0)
    assert (c.start, c.times[0], c.times[-1]) == (100, 100, 150)
    assert c.parted == {0.01: None, 0.1: None}
    assert c.reduced.ts[-1] == 50


def test_printed(comparison):
    lines = str(comparison).splitlines()
    assert lines[0] == (
        f"Rank-one reduction from t = {comparison.start:.6g} to t = 500 "
        "(10 numbers for 36)"
    )
    assert f"apart by 1 %     at t = {comparison.parted[0.01]:.6g}" in lines
    assert f"apart by 10 %    at t = {comparison.parted[0.1]:.6g}" in lines
    assert max(map(len, lines)) <= 100


def test_a_flow_on_the_manifold_never_parts(problem, reduction):
    start = RankOneParameters(
        gamma=np.array([1.9, 0.5, 0.13, 0.03]),
        beta=np.array([1.0, 0.3, -0.4, -0.9]),
        q=np.array(0.1),
        k=np.array(0.12),
    )
    alpha, alpha_bar = np.array([2.0, -1.0, 0.5]), np.array([-1.0, 3.0])
    wide = gradflow.integrate(
        problem,
        reduction.embed(start, 3, 2, alpha, alpha_bar),
        150.0,
        ts=np.linspace(0.0, 150.0, 16),
        solver=SOLVER,
        rtol=1e-9,
        observables=(),
    )
    both = gradflow.compare_rank_one(wide)
    assert both.start == 0
    assert both.distance.max() < 1e-7
    assert both.parted == {0.01: None, 0.1: None}
    assert "apart by 10 %    at no time" in str(both)


#
# Refused flows and windows
#


def test_flows_that_cannot_be_compared(full, comparison):
    with pytest.raises(ValueError, match="`flow` must be a Flow, got int"):
        gradflow.compare_rank_one(3)
    with pytest.raises(ValueError, match=r"OneLayerTransformer.*is a RankOneProblem"):
        gradflow.compare_rank_one(comparison.reduced)
    bare = dataclasses.replace(full, problem=None)
    with pytest.raises(ValueError, match=r"compare_rank_one` needs the loss"):
        gradflow.compare_rank_one(bare)
    nameless = full.settings._replace(solver="own")
    unknown = dataclasses.replace(full, settings=nameless, solver=None)
    with pytest.raises(ValueError, match=r"by 'own'.*Flow\.load\(path, solver="):
        gradflow.compare_rank_one(unknown)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"end": 501.0}, "`end` must lie within the flow, which ends at 500, got 501"),
        ({"end": -1.0}, "`end` must be a positive number"),
        ({"start": 500.0}, "`start` must lie before the end of the comparison, 500"),
        ({"start": 9.0, "end": 9.0}, "`start` must lie before .* 9, got 9"),
        ({"start": float("nan")}, "`start` must be a finite number"),
        ({"end": 30.0}, "`start` must be given: .*WQ and WK of this flow are never"),
    ],
)
def test_windows_that_are_refused(full, window, message):
    with pytest.raises(ValueError, match=message):
        gradflow.compare_rank_one(full, **window)


#
# The figure
#


def test_figure(comparison):
    c = comparison
    figure = plotting.plot_rank_one(c)
    loss, distance, embeddings, attention = figure.axes
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == [
        "(a) Loss",
        "(b) Distance",
        "(c) Embeddings",
        "(d) Attention",
    ]
    full_lines = [line.get_ydata() for line in loss.lines[:2]]
    np.testing.assert_array_equal(full_lines, [c.full_loss, c.reduced_loss])
    assert distance.get_yscale() == "log"
    np.testing.assert_array_equal(distance.lines[0].get_ydata(), c.distance)
    np.testing.assert_array_equal(distance.lines[1].get_ydata(), c.off_manifold)
    for ax, ours, theirs in [
        (embeddings, c.full_gamma, c.reduced_gamma),
        (attention, c.full_attention, c.reduced_attention),
    ]:
        drawn = np.array([line.get_ydata() for line in ax.lines[:8]])
        np.testing.assert_array_equal(drawn[::2], ours.T)
        np.testing.assert_array_equal(drawn[1::2], theirs.T)
        assert all(line.get_linestyle() == "--" for line in ax.lines[1:8:2])
    for ax in figure.axes:
        assert ax.get_xscale() == "log"
        assert ax.get_xlim() == (c.times[0], c.times[-1])
        dotted = [
            x
            for line in ax.lines
            if line.get_linestyle() == ":"
            for x in line.get_xdata()[:1]
        ]
        assert dotted == list(c.parted.values())
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[0] == r"0  ($\pi$ = 0.75)"
    assert names[-2:] == ["rank-one reduction", "apart by 1 %, 10 %"]


@pytest.fixture
def many(comparison):
    """Ten tokens with long names, whose curves are made up."""
    law = np.arange(10.0, 0.0, -1.0) / 55
    chain = MarkovChain.sticky(
        law, 0.5, labels=[f"token number {i}" for i in range(10)]
    )
    problem = Problem(OneLayerTransformer(10, 2), InfiniteContext(chain))
    curves = np.random.default_rng(0).uniform(size=(4, len(comparison.times), 10))
    names = ("full_gamma", "reduced_gamma", "full_attention", "reduced_attention")
    return dataclasses.replace(
        comparison,
        full=dataclasses.replace(comparison.full, problem=problem),
        **dict(zip(names, curves, strict=True)),
    )


@pytest.mark.parametrize("which", ["comparison", "many"])
def test_figure_clips_and_overlaps_nothing(which, request):
    figure = plotting.plot_rank_one(request.getfixturevalue(which))
    figure.draw_without_rendering()
    canvas = figure.bbox.padded(1)
    legend = figure.legends[0].get_window_extent()
    assert canvas.x0 <= legend.x0 < legend.x1 <= canvas.x1
    for ax in figure.axes:
        box = ax.get_tightbbox()
        assert canvas.x0 <= box.x0 < box.x1 <= canvas.x1
        assert canvas.y0 <= box.y0 < box.y1 <= canvas.y1
        assert not box.overlaps(legend)
        shown = [
            label.get_window_extent()
            for label in ax.get_xticklabels(which="both")
            if label.get_text() and ax.bbox.x0 <= label.get_window_extent().x1
        ]
        shown.sort(key=lambda b: b.x0)
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(shown))


def test_figure_of_many_tokens_shows_the_most_frequent(many):
    figure = plotting.plot_rank_one(many)
    assert figure.axes[2].get_title(loc="left") == (
        "(c) Embeddings (8 most frequent of 10)"
    )
    assert len(figure.legends[0].get_texts()) == 8 + 2
    drawn = [line.get_ydata() for line in figure.axes[2].lines[:16:2]]
    np.testing.assert_array_equal(drawn, many.full_gamma.T[:8])
    for ax in figure.axes[2:]:  # a dashed line is seen on every solid one
        pairs = zip(ax.lines[:16:2], ax.lines[1:16:2], strict=True)
        assert all(to_rgba(a.get_color()) != to_rgba(b.get_color()) for a, b in pairs)


def test_figure_in_a_figure_of_ones_own(comparison):
    own = Figure(figsize=(9, 7))
    assert plotting.plot_rank_one(comparison, own) is own
    assert len(own.axes) == 4
    assert own.axes[3].get_legend() is not None  # no layout makes room for it outside
    left, _ = Figure(layout="constrained").subfigures(1, 2)
    assert plotting.plot_rank_one(comparison, left) is left
    assert len(left.legends) == 1
