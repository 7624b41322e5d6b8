"""The loss over time, its levels, and several losses together."""

import dataclasses
import io
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from figure_parts import drawn, legend, levels
from matplotlib.colors import to_rgba

import gradflow
from gradflow import plotting


def test_loss_over_logarithmic_time(flow, ax):
    assert plotting.plot_loss(flow, ax) is ax
    x, y = ax.lines[0].get_data()
    saved = np.isin(x, flow.ts)
    np.testing.assert_array_equal(x[saved], flow.ts[1:])
    np.testing.assert_array_equal(y[saved], flow.loss[1:])
    assert ax.get_xscale() == "log"
    assert ax.get_xlim() == (flow.ts[1], flow.ts[-1])


def test_loss_levels(flow, ax):
    plotting.plot_loss(flow, ax)
    pi = np.array([0.7, 0.2, 0.06, 0.04])
    P = 0.5 * np.eye(4) + 0.5 * pi
    unigram, rate = -pi @ np.log(pi), -pi @ np.sum(P * np.log(P), axis=1)
    heights, labels = levels(ax)
    np.testing.assert_allclose(heights, [rate, unigram], rtol=1e-12)
    floor = f"floor = best from the last token {rate:.4f}"
    assert labels == [f"best unigram {unigram:.4f}", floor]
    low, high = ax.get_ylim()
    assert low < rate < unigram < flow.loss.max() < high


class Known(gradflow.AbstractLoss):
    """A loss with a floor and baselines of any height."""

    lowest: float | None = None
    compared: dict[str, float] = eqx.field(default_factory=dict)

    def __call__(self, params):
        return jnp.sum(params**2)

    @property
    def floor(self):
        return self.lowest

    @property
    def baselines(self):
        return self.compared


def known(flow, floor, **baselines):
    """The flow with a loss that knows these levels."""
    named = {name.replace("_", " "): loss for name, loss in baselines.items()}
    return dataclasses.replace(flow, problem=Known(floor, named), dense=None)


def test_a_baseline_that_is_the_floor_is_drawn_once(flow, ax):
    levelled = known(flow, 0.7, best_unigram=0.9, best_from_the_last_token=0.7 + 1e-9)
    plotting.plot_loss(levelled, ax)
    heights, labels = levels(ax)
    assert heights == [0.7, 0.9]
    assert labels == ["best unigram 0.9000", "floor = best from the last token 0.7000"]


def test_the_uniform_predictor_has_no_line(flow, ax):
    plotting.plot_loss(known(flow, None, uniform=1.3), ax)
    assert levels(ax) == ([], [])


@pytest.mark.parametrize("gap", [0.2, 0.02, 0.004])
def test_labels_of_levels_do_not_collide(flow, ax, gap):
    plotting.plot_loss(
        known(flow, 0.6, best_unigram=0.6 + 2 * gap, best_other=0.6 + gap), ax
    )
    drawn(ax)
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) == 3
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for box in boxes:
        assert ax.bbox.y0 <= box.y0 < box.y1 <= ax.bbox.y1


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


def test_heads_have_their_floor_and_unigram_entropy(heads_flow, ax):
    plotting.plot_loss(heads_flow, ax)
    heights, labels = levels(ax)
    unigram = heads_flow.problem.baselines["best unigram"]
    assert heights == [heads_flow.problem.floor, unigram]
    assert labels == [f"best unigram {unigram:.4f}", f"floor {heights[0]:.4f}"]
    assert ax.get_ylabel() == "loss $L$ (nats)"


#
# Several flows
#


def curves(ax):
    """The lines of losses, which are not straight across the Axes."""
    return [line for line in ax.lines if list(line.get_xdata()) != [0, 1]]


def test_flows_overlay(flow, ax):
    later = dataclasses.replace(flow, ts=10 * flow.ts, loss=flow.loss + 1, dense=None)
    plotting.plot_loss(flow, ax)
    alone = levels(ax)
    plotting.plot_loss(later, ax)
    first, second = curves(ax)
    assert to_rgba(first.get_color()) != to_rgba(second.get_color())
    assert levels(ax) == alone  # not drawn again
    assert ax.get_xlim() == (flow.ts[1], later.ts[-1])
    low, high = ax.get_ylim()
    assert low < flow.loss.min() < later.loss.max() < high
    assert ax.get_title(loc="left") == "Loss"
    assert ax.get_legend() is None


def test_an_earlier_flow_is_not_changed_by_a_later_one(flow, heads_flow, ax):
    plotting.plot_loss(heads_flow, ax)
    colour, limits = curves(ax)[0].get_color(), ax.get_xlim()
    plotting.plot_loss(flow, ax)
    assert curves(ax)[0].get_color() == colour
    assert ax.get_xlim() == (limits[0], flow.ts[-1])
    assert len(levels(ax)[0]) == 4  # another problem has other levels


def test_labels_make_a_legend(flow, ax):
    plotting.plot_loss(flow, ax, label="_first")
    plotting.plot_loss(flow, ax)
    plotting.plot_loss(flow, ax, label="third")
    assert legend(ax) == ["_first", "third"]
    handles = [h.get_color() for h in ax.get_legend().legend_handles]
    assert handles == [curves(ax)[i].get_color() for i in (0, 2)]


@pytest.mark.parametrize("falls", [1, 18])
@pytest.mark.parametrize("order", [1, -1])
def test_a_diverged_training_does_not_flatten_the_rest(flow, ax, order, falls):
    diverging = np.geomspace(flow.loss[0], 1e300, len(flow.ts))
    diverging[:falls] = flow.loss[:falls]
    diverged = dataclasses.replace(flow, loss=diverging, dense=None)
    for each in (flow, diverged)[::order]:
        plotting.plot_loss(each, ax)
    low, high = ax.get_ylim()
    assert low < flow.loss.min()
    assert flow.loss[0] < high < flow.loss[0] + np.ptp(flow.loss)
    ax.figure.savefig(io.BytesIO())


def test_noise_is_not_cut_off(flow, ax):
    """A run that starts near its best loss and fluctuates above it is shown whole."""
    noise = 2 + np.random.default_rng(0).uniform(size=len(flow.ts))
    noise[:2] = noise[-1] = 2.2
    plotting.plot_loss(dataclasses.replace(flow, loss=noise, dense=None), ax)
    assert ax.get_ylim()[1] > noise.max()


#
# Sharp transitions
#


def test_sharp_transitions_are_drawn_from_the_dense_output(flow, ax):
    coarse = dataclasses.replace(
        flow,
        **{
            name: getattr(flow, name)[[0, 1, 12, 20]]
            for name in ("ts", "loss", "speed")
        },
        params=jax.tree.map(lambda x: x[[0, 1, 12, 20]], flow.params),
        observables={},
    )
    plotting.plot_loss(coarse, ax)
    x, y = ax.lines[0].get_data()
    assert np.all(np.diff(x) > 0)
    assert np.all(np.isin(coarse.ts[1:], x))
    assert len(x) <= 3 + 400
    assert np.max(np.abs(np.diff(y))) < 0.05 * np.ptp(y)
    exact = [flow.problem(flow.at(float(t))) for t in x[1:-1:7]]
    np.testing.assert_allclose(y[1:-1:7], exact, rtol=1e-12)
    loaded = dataclasses.replace(coarse, dense=None)
    plotting.plot_loss(loaded, ax)
    np.testing.assert_array_equal(curves(ax)[1].get_xdata(), coarse.ts[1:])


def test_a_training_is_drawn_at_its_iterates(ax):
    def bowl(x):
        return 0.5 * jnp.sum(x**2)

    training = gradflow.train(bowl, jnp.array([1.0, 2.0]), 0.5, 20)
    plotting.plot_loss(training, ax)
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), training.ts[1:])
