"""Bad input is refused with a sentence, before any work."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow import Problem


def _never(params):
    raise AssertionError("the loss was called")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"t1": 0.0}, "`t1` must be a positive number, got 0.0"),
        ({"t1": -1}, "`t1` must be a positive number"),
        ({"t1": float("inf")}, "`t1` must be a positive number, got inf"),
        ({"t1": "long"}, "`t1` must be a positive number, got 'long'"),
        ({"ts": [0.0, 2.0, 1.0]}, "`ts` must increase strictly, but is not sorted at"),
        ({"ts": [0.0, 0.5, 0.5]}, "but is repeated at index 2"),
        ({"ts": [-1.0, 0.5]}, "`ts` must lie between 0 and `t1` = 1"),
        ({"ts": [0.5, 1.5]}, "`ts` must lie between 0 and `t1` = 1"),
        ({"ts": [np.nan]}, "`ts` must be finite"),
        ({"ts": []}, "`ts` must be a one-dimensional list"),
        ({"solver": "magic"}, "one of auto, ndf, rock4, tsit5, dopri5.*got 'magic'"),
        ({"solver": 5}, "one of auto, ndf, rock4"),
        ({"solver": diffrax.Euler()}, "must estimate its own error; Euler does not"),
        ({"rtol": -1e-8}, "`rtol` must be a positive number"),
        ({"rtol": 0}, "`rtol` must be a positive number"),
        ({"rtol": 1e-16}, "`rtol` must be at least 1e-14"),
        ({"atol": -1.0}, "`atol` must be a finite number, zero or more"),
        ({"max_steps": 0}, "`max_steps` must be a whole number"),
        ({"dense_memory": -1}, "`dense_memory` must be a whole number"),
        ({"t1": "5"}, "`t1` must be a positive number, got '5'"),
        (
            {"params": {"w": np.array([1, 2])}},
            "`params.w` must be a floating array.*int",
        ),
        ({"params": [np.array([1.0, np.nan])]}, r"`params\.0` must be finite"),
        ({"params": {"w": "x"}}, "`params.w` must be a floating array, got str"),
        ({"params": {}}, "`params` must contain at least one number"),
        ({"params": {"w": np.zeros(0)}}, "`params` must contain at least one number"),
        (
            {"loss": Problem},
            "callable on parameters, got the class Problem",
        ),
        (
            {"solver": diffrax.KenCarp4()},
            "must solve an ordinary differential equation",
        ),
        ({"params": np.ones(2) + 0j}, "`params` must be a floating array.*complex"),
        ({"loss": 3.0}, "`loss` must be a callable"),
    ],
)
def test_bad_input(options, message):
    call = {"loss": _never, "params": {"w": np.ones(2)}, "t1": 1.0} | options
    loss, params, t1 = (call.pop(k) for k in ("loss", "params", "t1"))
    with pytest.raises(ValueError, match=message):
        gradflow.integrate(loss, params, t1, **call)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": lambda x: x}, r"`loss` must return a real scalar, got .*\(2,\)"),
        ({"loss": lambda x: (x[0], x[1])}, "`loss` must return a real scalar"),
        ({"loss": lambda x: jnp.sum(x) + 0j}, "`loss` must return a real scalar"),
        ({"loss": lambda x: jnp.sum(jnp.log(x - 2))}, "`loss` must be finite at"),
        ({"loss": lambda x: jnp.sum(jnp.sqrt(x - 1))}, "finite gradient at `params`"),
        ({"observables": ["speed"]}, "it has none"),
        ({"observables": {"x": 3}}, "`observables` must map names to functions"),
        ({"observables": 3}, "`observables` must map names to functions.*got 3"),
        ({"observables": {"loss": jnp.sum}}, "must not use the names ts, loss"),
        ({"observables": {"x": lambda x: None}}, r"`observables\['x'\]` must return"),
        ({"observables": {"x": lambda x: 1j * x}}, "must return real numbers"),
        ({"event": 3}, "`event` must be a function"),
        ({"event": lambda x: jnp.log(-x[0])}, "`event` must be a number at `params`"),
        ({"event": lambda x: x}, "`event` must return a real scalar or a boolean"),
        ({"loss": lambda x: float(x[0])}, "`loss` must be .* JAX can trace.*Concret"),
        ({"loss": lambda x: np.sum(np.asarray(x))}, "`loss` must be .* JAX can trace"),
        (
            {"observables": {"y": jnp.sum, "x": lambda x: "word"}},
            r"`observables\['x'\]` must be .* JAX can trace.*arrays of numbers",
        ),
        ({"observables": {"x": lambda x: int(x[0])}}, r"`observables\['x'\]` must be"),
        ({"event": lambda x: bool(x[0] > 0)}, "`event` must be .* JAX can trace"),
    ],
)
def test_bad_functions(options, message):
    call = {"loss": lambda x: jnp.sum(x**2)} | options
    with pytest.raises(ValueError, match=message):
        gradflow.integrate(call.pop("loss"), jnp.ones(2), 1.0, **call)


def test_unknown_observable_names_the_known(reference):
    with pytest.raises(ValueError, match=r"excess_loss.*got 'mood'"):
        gradflow.integrate(reference, reference.init(), 1.0, observables=["mood"])


def test_modules_and_closures_are_losses_too():
    class Bowl(eqx.Module):
        stiffness: jax.Array

        def __call__(self, x):
            return 0.5 * jnp.sum(self.stiffness * x**2)

    flow = gradflow.integrate(Bowl(jnp.array([1.0, 2.0])), jnp.ones(2), 1.0)
    np.testing.assert_allclose(flow.final, np.exp([-1.0, -2.0]), rtol=1e-7)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_integrate_is_not_traced(transform):
    """The error says what to use instead."""

    def final_loss(x):
        return gradflow.integrate(lambda p: jnp.sum(p**2), x, 1.0).loss[-1]

    with pytest.raises(
        ValueError, match=r"integrate_ensemble.*diffrax\.diffeqsolve.*gradflow\.solvers"
    ):
        transform(final_loss)(jnp.ones((2, 3)))


def test_a_traced_loss_is_refused_too():
    def final_loss(stiffness):
        loss = jax.tree_util.Partial(lambda k, p: k * jnp.sum(p**2), stiffness)
        return gradflow.integrate(loss, jnp.ones(2), 1.0).loss[-1]

    with pytest.raises(ValueError, match="cannot be called inside"):
        jax.grad(final_loss)(1.0)


def test_tiny_losses_are_printed_as_such():
    flow = gradflow.integrate(
        lambda x: 0.5 * jnp.sum(x**2), jnp.array([1e-15]), 1.0, solver="tsit5"
    )
    assert "loss             5.000e-31 → 6.767e-32" in str(flow)
