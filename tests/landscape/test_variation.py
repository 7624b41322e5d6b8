"""Deviations from a reference trajectory of any kind. Their accuracy along flows of
several heads is tested in `tests/problems/test_symmetric_heads.py`."""

import jax.numpy as jnp
import numpy as np
import pytest
from landscape_cases import Quadratic

import gradflow
from gradflow.landscape import Trajectory, linearised_along

RATES = np.array([-0.5, 0.0, 3.0])
LOSS = Quadratic(np.diag(RATES))
START = jnp.array([1.0, -2.0, 0.5])
TIMES = np.array([0.0, 0.3, 2.0])


class Still:
    """A trajectory that stays at one point."""

    def at(self, t):
        return jnp.zeros((len(t), 3))


@pytest.mark.parametrize("kind", ["function", "object with at", "flow"])
def test_any_trajectory_may_be_the_reference(kind):
    """About a quadratic every deviation is multiplied by exp(-λt)."""
    references = {
        "function": lambda: Still().at,
        "object with at": Still,
        "flow": lambda: gradflow.integrate(LOSS, jnp.ones(3), 2.0),
    }
    reference = references[kind]()
    assert isinstance(reference, Trajectory) == (kind != "function")
    found = linearised_along(LOSS, reference, START, TIMES)
    expected = np.exp(-np.outer(TIMES, RATES)) * np.asarray(START)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_without_curvature_a_deviation_stays():
    """One step is enough: the Jacobian is zero."""
    calls = []

    def reference(t):
        calls.append(t)
        return jnp.zeros((len(t), 3))

    found = linearised_along(jnp.sum, reference, START, [0.0, 1e6])
    np.testing.assert_array_equal(found, np.tile(START, (2, 1)))
    assert sum(len(t) == 3 for t in calls) == 1


# An array of JAX has an attribute `at` that is not a function of time.
@pytest.mark.parametrize("reference", [3, None, jnp.zeros((2, 3))])
def test_other_references_are_refused(reference):
    with pytest.raises(ValueError, match="`reference` must be a Flow or a function"):
        linearised_along(LOSS, reference, START, TIMES)
