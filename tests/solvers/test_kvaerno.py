"""Kvaerno's methods with their three repairs, and the defect of diffrax's versions."""

import functools

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

from gradflow.solvers import Kvaerno3, Kvaerno5
from gradflow.solvers._kvaerno import PatientChord

MENDED = (
    "diffrax's VeryChord now keeps iterating: delete PatientChord and Kvaerno3 from "
    "gradflow/solvers/_kvaerno.py, and let Kvaerno5 use diffrax's root finder."
)


#
# The root finder
#


def slowly_solved(y, args):
    """The error of the chord method, started from 1, halves with each iteration."""
    return 0.5 * jnp.arctan(y - 2.0) + 0.25 * (y - 2.0)


def find(finder, fn=slowly_solved, start=1.0):
    return optx.root_find(fn, finder, jnp.array(start), max_steps=100, throw=False)


def test_the_defect_of_diffrax():
    """With diffrax 0.7.2 and optimistix 0.1.0. This test fails once it is fixed."""
    found = find(diffrax.VeryChord(rtol=1e-6, atol=1e-6))
    assert found.result == optx.RESULTS.nonlinear_divergence, MENDED
    assert found.stats["num_steps"] == 2, MENDED


def test_patience():
    found = find(PatientChord(rtol=1e-6, atol=1e-6))
    assert found.result == optx.RESULTS.successful
    assert found.value == pytest.approx(2.0, abs=1e-6)
    assert found.stats["num_steps"] > 2
    # It still reports divergence and running out of steps.
    found = find(PatientChord(rtol=1e-6, atol=1e-6), lambda y, _: jnp.arctan(y), 5.0)
    assert found.result == optx.RESULTS.nonlinear_divergence
    few = optx.root_find(
        slowly_solved,
        PatientChord(rtol=1e-6, atol=1e-6),
        jnp.array(1.0),
        max_steps=3,
        throw=False,
    )
    assert few.result == optx.RESULTS.nonlinear_max_steps_reached


#
# Solves
#


def ill_conditioned(t, y, args):
    """The gradient flow of a curved valley (Rosenbrock's)."""
    return jax.tree.map(
        jnp.negative,
        jax.grad(lambda y: (1 - y[0]) ** 2 + 100 * (y[1] - y[0] ** 2) ** 2)(y),
    )


@functools.partial(jax.jit, static_argnames=("vector_field", "solver"))
def solve(vector_field, start, ts, rtol, solver, args=None):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(vector_field),
        solver,
        0.0,
        ts[-1],
        None,
        start,
        args,
        saveat=diffrax.SaveAt(ts=ts),
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=1e-3 * rtol),
        max_steps=20_000,
    )


def test_steps_are_not_rejected_for_want_of_patience():
    start, ts = jnp.array([-1.2, 1.0]), jnp.array([50.0])
    mended = solve(ill_conditioned, start, ts, 1e-4, Kvaerno5())
    assert mended.stats["num_rejected_steps"] < 0.5 * mended.stats["num_accepted_steps"]
    # The same method with another root finder.
    impatient = diffrax.with_stepsize_controller_tols(diffrax.VeryChord)()
    defective = solve(ill_conditioned, start, ts, 1e-4, Kvaerno5(root_finder=impatient))
    assert defective.stats["num_steps"] > 2 * mended.stats["num_steps"], MENDED
    for stock in (diffrax.Kvaerno3(), diffrax.Kvaerno5()):
        assert isinstance(stock.root_finder, diffrax.VeryChord), MENDED


def eigenvalues(kind):
    saddle = [[-1.0, -0.5, 0.0], np.geomspace(1e-2, 1e2, 20), np.geomspace(2e2, 1e4, 7)]
    return np.concatenate(saddle) if kind == "saddle" else np.geomspace(1e-3, 1e3, 30)


def linear(t, y, H):
    return -(H @ y)


def check_quadratic(solver, kind, t1, rtol):
    """Check a solver's error along the whole trajectory, and return the number of
    steps."""
    values = eigenvalues(kind)
    Q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(30, 30)))
    modes = np.where(values < 0, 1e-3, 1.0)
    ts = np.append(0.0, np.geomspace(1e-5 * t1, t1, 200))
    exact = (np.exp(-np.outer(ts, values)) * modes) @ Q.T
    H, start = jnp.asarray(Q @ np.diag(values) @ Q.T), jnp.asarray(Q @ modes)
    solution = solve(linear, start, jnp.asarray(ts), rtol, solver, H)
    assert np.max(np.abs(solution.ys - exact)) < 10 * rtol * np.max(np.abs(exact))
    return solution.stats["num_steps"]


@pytest.mark.parametrize("rtol", [1e-4, 1e-6, 1e-8, 1e-10])
@pytest.mark.parametrize(("kind", "t1"), [("saddle", 10.0), ("bowl", 1000.0)])
def test_kvaerno5_to_tolerance(kind, t1, rtol):
    steps = check_quadratic(Kvaerno5(), kind, t1, rtol)
    assert steps < 100 * (1e-4 / rtol) ** 0.2


@pytest.mark.parametrize("rtol", [1e-4, 1e-6])
@pytest.mark.parametrize(("kind", "t1"), [("saddle", 10.0), ("bowl", 1000.0)])
def test_kvaerno3_to_tolerance(kind, t1, rtol):
    check_quadratic(Kvaerno3(), kind, t1, rtol)


def coupled(t, y, args):
    """An equation that is neither linear nor autonomous: a = exp(sin t), b = 1/a."""
    a, b = y["a"], y["b"]
    return {"a": a * jnp.cos(t), "b": -(b**2) * a * jnp.cos(t)}


START = {"a": jnp.array(1.0), "b": jnp.array(1.0)}


@pytest.mark.parametrize(("solver", "order"), [(Kvaerno3, 3), (Kvaerno5, 5)])
def test_order_of_convergence(solver, order):
    """At the steps; between them the dense output is of order at least four."""
    finder = PatientChord(rtol=1e-13, atol=1e-13)
    ts = np.linspace(0.0, 2.0, 334)

    @jax.jit
    def solve(h):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(coupled),
            solver(root_finder=finder, root_find_max_steps=30),
            0.0,
            2.0,
            h,
            START,
            saveat=diffrax.SaveAt(ts=jnp.asarray(ts)),
        )

    errors, between = [], []
    for steps in (10, 20, 40):
        error = np.abs(solve(2.0 / steps).ys["b"] - np.exp(-np.sin(ts)))
        errors.append(error[-1])
        between.append(np.max(error))
    assert np.all(np.diff(np.log2(errors)) < 0.4 - order)
    # The dense output's local error is O(h⁵); that of Hermite's cubic is O(h⁴).
    assert np.all(np.diff(np.log2(between)) < 0.5 - order)


def test_dense_events_and_pytrees():
    ts = jnp.linspace(0.0, 0.7, 33)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(coupled),
        Kvaerno5(),
        0.0,
        2.0,
        None,
        START,
        saveat=diffrax.SaveAt(ts=ts, t1=True, dense=True),
        stepsize_controller=diffrax.PIDController(rtol=1e-7, atol=1e-9),
        event=diffrax.Event(
            lambda t, y, args, **_: y["a"] - 2.0, optx.Newton(1e-10, 1e-10)
        ),
        max_steps=256,
    )
    assert solution.result == diffrax.RESULTS.event_occurred
    assert solution.ts[33] == pytest.approx(np.arcsin(np.log(2)), abs=1e-6)
    dense = jax.vmap(solution.evaluate)(ts)
    np.testing.assert_allclose(dense["a"], np.exp(np.sin(ts)), atol=1e-6)
    np.testing.assert_allclose(dense["b"], solution.ys["b"][:33], atol=1e-12)


def test_vmap_and_backwards_time():
    def final(scale):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: -(y**3)),
            Kvaerno5(),
            1.0,
            0.0,
            None,
            scale * jnp.array([0.1, 0.2]),
            stepsize_controller=diffrax.PIDController(rtol=1e-8, atol=1e-10),
        ).ys[0]

    scales = np.array([1.0, 2.0, 0.5])
    end = scales[:, None] * np.array([0.1, 0.2])
    batched = jax.vmap(final)(jnp.asarray(scales))
    np.testing.assert_allclose(batched, end / np.sqrt(1 - 2 * end**2), rtol=1e-7)
