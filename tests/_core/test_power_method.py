"""The power method, against eigenvalues that are known."""

import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from gradflow._core.power_method import power_method, random_vector

EIGENVALUES = np.array([-5.0, -1.0, 0.0, 0.5, 3.0])
MATRIX = oracles.symmetric(EIGENVALUES)
START = random_vector(jnp.zeros(5))


def test_it_finds_the_largest_eigenvalue_in_absolute_value():
    found = power_method(lambda v: jnp.asarray(MATRIX) @ v, START, 60)
    assert found.size == pytest.approx(5.0, rel=1e-12)
    assert int(found.iterations) == 60
    v = np.asarray(found.vector) / np.linalg.norm(found.vector)
    np.testing.assert_allclose(MATRIX @ v, -5.0 * v, atol=1e-10)


def test_it_approaches_the_eigenvalue_from_below():
    sizes = [
        float(power_method(lambda v: jnp.asarray(MATRIX) @ v, START, n).size)
        for n in range(1, 8)
    ]
    assert np.all(np.diff(sizes) > 0)
    assert sizes[-1] < 5.0


def test_a_tolerance_stops_it_early_after_two_products_at_least():
    def product(v):
        return jnp.asarray(MATRIX) @ v

    found = power_method(product, START, 60, tolerance=1e-2)
    assert 2 < int(found.iterations) < 20
    assert found.size == pytest.approx(5.0, rel=0.05)
    again = power_method(product, found.vector, 60, tolerance=0.5)
    assert int(again.iterations) == 2


def test_products_may_be_differences_of_a_nonlinear_map():
    """At y the derivative of sin is diag(cos y)."""
    y, length = jnp.array([0.1, 1.0, 2.0]), jnp.asarray(1e-7)

    def difference(v):
        assert v.shape == (3,)
        return jnp.sin(y + v) - jnp.sin(y)

    found = power_method(difference, random_vector(y), 60, length=length)
    assert found.size == pytest.approx(np.cos(0.1), rel=1e-6)


def test_an_unwanted_search_returns_its_start():
    known = jnp.asarray(7.0)
    found = power_method(
        lambda v: v, START, 60, known_size=known, wanted=jnp.asarray(False)
    )
    assert int(found.iterations) == 0
    assert found.size == 7.0
    np.testing.assert_array_equal(found.vector, START)


@pytest.mark.parametrize(("factor", "size"), [(0.0, 0.0), (np.nan, np.nan)])
def test_a_map_without_an_eigenvalue_keeps_its_vector(factor, size):
    found = power_method(lambda v: factor * v, START, 12)
    np.testing.assert_equal(float(found.size), size)
    np.testing.assert_array_equal(found.vector, START)
