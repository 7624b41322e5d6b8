"""Attention of queries to keys, and of heads to lags."""

import dataclasses

import numpy as np
import pytest
from figure_parts import levels
from matplotlib.figure import Figure

import gradflow
from gradflow import plotting


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


def test_attention_of_heads_has_a_row_for_each_head_and_lag(heads_flow, ax):
    """Also where heads = lags, and the matrix looks like one of queries and keys."""
    plotting.plot_attention(heads_flow, ax)
    (mesh,) = ax.collections
    softmax = np.exp(heads_flow.params.a)
    softmax /= softmax.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(
        mesh.get_array(), softmax[1:].reshape(20, 9).T, rtol=1e-12
    )
    pairs = [f"{head} → {lag}" for head in (1, 2, 3) for lag in (1, 2, 3)]
    assert [label.get_text() for label in ax.get_yticklabels()] == pairs
    assert ax.get_ylabel() == "head → lag"
    assert levels(ax)[0] == [2.5, 5.5]


def test_attention_of_fewer_heads_than_lags(heads_flow, ax):
    rng = np.random.default_rng(0)
    attention = rng.uniform(size=(len(heads_flow.ts), 2, 18))
    flow = dataclasses.replace(heads_flow, observables={"attention": attention})
    plotting.plot_attention(flow, ax)
    expected = attention[1:, :, :16].reshape(20, 32).T
    np.testing.assert_array_equal(ax.collections[0].get_array(), expected)
    assert ax.get_title(loc="left") == "Attention (first 16 of 18 lags)"


def test_attention_of_heads_in_a_small_axes(heads_flow):
    ax = Figure(figsize=(3, 0.8)).subplots()
    plotting.plot_attention(heads_flow, ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "2", "3"]
    assert ax.get_ylabel() == "head (lags from the top)"


def test_attention_to_positions(ax):
    problem = gradflow.TensorFactorisation(np.eye(2), 3)
    flow = gradflow.integrate(problem, problem.init(scale=0.1), 5.0)
    plotting.plot_attention(flow, ax)
    assert ax.get_ylabel() == "head → position"
    assert len(ax.get_yticklabels()) == 6


def test_a_users_own_square_attention_is_of_queries_and_keys(bowl_flow, ax):
    attention = np.full((len(bowl_flow.ts), 2, 2), 0.5)
    own = dataclasses.replace(bowl_flow, observables={"attention": attention})
    plotting.plot_attention(own, ax)
    assert ax.get_ylabel() == "query → key"
    flat = dataclasses.replace(bowl_flow, observables={"attention": attention[:, 0]})
    with pytest.raises(ValueError, match="needs the observable 'attention', a matrix"):
        plotting.plot_attention(flat, ax)
