"""All functions of the room: refused arguments, compilation and documentation."""

import doctest

import jax.numpy as jnp
import numpy as np
import pytest
from landscape_cases import bowl, perturbed

from gradflow._core.compiled import CompileClock
from gradflow.landscape import (
    find_critical_point,
    hessian_spectrum,
    linearised_along,
    linearised_flow,
)

REFUSED = [
    (lambda f: f(bowl, np.array([1.0, np.nan])), "`params` must be finite"),
    (lambda f: f(bowl, np.array([1, 2])), "`params` must be a floating array, got"),
    (lambda f: f(bowl, {"a": np.ones(2), "b": 3}), "`params.b` must be a floating"),
    (lambda f: f(bowl, {}), "`params` must contain at least one number"),
    (lambda f: f(lambda x: x, np.ones(2)), "`loss` must return a real scalar"),
    (lambda f: f(lambda x: 1j * x[0], np.ones(2)), "`loss` must return a real scalar"),
    (lambda f: f(None, np.ones(2)), "`loss` must be a callable"),
    (lambda f: f(lambda x: jnp.log(x[0]), -np.ones(2)), "`loss` must be finite at"),
]


@pytest.mark.parametrize("function", [hessian_spectrum, find_critical_point])
@pytest.mark.parametrize(("call", "says"), REFUSED)
def test_bad_losses_and_points_are_refused(function, call, says):
    with pytest.raises(ValueError, match=says):
        call(function)


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        (hessian_spectrum, {"k": 0}, "`k` must be a whole number of at least 1, got 0"),
        (hessian_spectrum, {"k": 2.5}, "`k` must be a whole number"),
        (hessian_spectrum, {"k": 4}, "`k` must be at most the number of parameters, 3"),
        (hessian_spectrum, {"k": 1, "which": "top"}, "`which` must be one of both, la"),
        (hessian_spectrum, {"which": "largest"}, "`which` = 'largest' needs `k`"),
        (hessian_spectrum, {"k": 1, "tolerance": 0}, "`tolerance` must be a positive"),
        (hessian_spectrum, {"k": 1, "max_products": 0}, "`max_products` must be"),
        (hessian_spectrum, {"k": 1, "seed": -1}, "`seed` must be a whole number"),
        (find_critical_point, {"gap": -1e-3}, "`gap` must be a finite number, zero or"),
        (find_critical_point, {"gap": np.inf}, "`gap` must be a finite number"),
        (find_critical_point, {"tolerance": -1}, "`tolerance` must be a positive"),
        (find_critical_point, {"max_steps": 0}, "`max_steps` must be a whole number"),
        (find_critical_point, {"dense": "yes"}, "`dense` must be True, False or None"),
    ],
)
def test_bad_options_are_refused(function, arguments, says):
    with pytest.raises(ValueError, match=says):
        function(bowl, np.ones(3), **arguments)


def test_a_second_call_compiles_nothing(small, reference, first_saddle):
    def all_of_them(seed):
        start = perturbed(first_saddle[0], 1e-3, seed)
        point = find_critical_point(small, start)
        linearised_flow(small, point, start, np.array([0.0, 1.0 + seed]))
        hessian_spectrum(reference, reference.init(seed), 12)

    all_of_them(1)
    clock = CompileClock()
    all_of_them(2)
    assert clock.seconds() == 0


@pytest.mark.parametrize(
    "function",
    [hessian_spectrum, find_critical_point, linearised_flow, linearised_along],
)
def test_the_examples_in_the_documentation_run(function):
    (example,) = doctest.DocTestFinder(recurse=False).find(function, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
