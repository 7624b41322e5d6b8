"""Flows to draw, and Axes to draw them in."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from figure_parts import LABELS
from matplotlib.figure import Figure

import gradflow
from gradflow import (
    HighOrderChain,
    InfiniteContext,
    MarkovChain,
    OneLayerParameters,
    OneLayerTransformer,
    PositionalHeads,
    Problem,
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


@pytest.fixture
def bowl_flow(flow):
    """The flow of a user's own loss, in closed form."""
    x = np.exp(-flow.ts[:, None]) * np.array([1.0, 2.0])
    return dataclasses.replace(
        flow,
        problem=gradflow.Loss(lambda x: 0.5 * jnp.sum(x**2)),
        params=x,
        loss=0.5 * np.sum(x**2, axis=1),
        observables={},
        dense=None,
    )


@pytest.fixture
def ax():
    return Figure(layout="constrained").subplots()


@pytest.fixture
def unobserved(flow):
    """The same flow without observables."""
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
        dense=None,
    )


@pytest.fixture(scope="module")
def heads_flow():
    """Three heads on three lags: attention that is square but has no queries."""
    chain = HighOrderChain.random(3, [1, 1, 1], seed=0)
    problem = Problem(PositionalHeads(3, 3, 3), gradflow.AllContexts(chain))
    ts = np.append(0.0, np.geomspace(0.1, 100, 20))
    start = problem.init(scale=0.1)
    return gradflow.integrate(problem, start, 100.0, ts=ts, rtol=1e-5)
