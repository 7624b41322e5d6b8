"""The reference chain in a model small enough for dense Hessians, and its saddle."""

import oracles
import pytest
from landscape_cases import PI, P

import gradflow


@pytest.fixture(scope="session")
def small():
    """The reference chain with m = 6, k = 3: 84 parameters."""
    model = gradflow.OneLayerTransformer(4, 6, 3)
    chain = gradflow.MarkovChain.sticky(PI, oracles.REFERENCE_STICKINESS)
    return gradflow.Problem(model, gradflow.InfiniteContext(chain))


@pytest.fixture(scope="session")
def first_saddle():
    return oracles.first_saddle(PI, 6, 3)


@pytest.fixture(scope="session")
def kappa(first_saddle):
    """The growth rate of focus at the first saddle."""
    _, gamma, beta = first_saddle
    return oracles.focus_rate(PI, P, gamma, beta)
