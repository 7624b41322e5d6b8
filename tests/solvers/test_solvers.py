"""The choice of a solver, fixed steps, tolerances and their errors."""

import functools

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow.solvers import _choice, _internals

PUBLIC = ["Kvaerno3", "Kvaerno5", "LowRankNDF", "RK4", "ROCK4", "names"]
ADAPTIVE = sorted(set(gradflow.solvers.names()) - set(_internals.FIXED_STEP))


@functools.cache  # always the same loss object, which is compiled once
def saddle():
    """A quadratic with eigenvalues -1 … 100 in a random basis, a start and the exact
    flow."""
    eigenvalues = np.concatenate([[-1.0, -0.3, 0.0], np.geomspace(1e-2, 1e2, 12)])
    rng = np.random.default_rng(1)
    Q, _ = np.linalg.qr(rng.normal(size=(15, 15)))
    H = jnp.asarray(Q @ np.diag(eigenvalues) @ Q.T)
    start = Q @ np.where(eigenvalues < 0, 1e-2, 1.0)

    def exact(ts):
        return (np.exp(-np.outer(ts, eigenvalues)) * (Q.T @ start)) @ Q.T

    return (lambda x: 0.5 * x @ H @ x), jnp.asarray(start), exact


def test_the_room_lists_its_solvers_and_nothing_else():
    assert dir(gradflow.solvers) == PUBLIC
    assert sorted(gradflow.solvers.__all__) == PUBLIC
    for name in set(PUBLIC) - {"names"}:
        assert issubclass(getattr(gradflow.solvers, name), diffrax.AbstractSolver)


def test_every_solver_states_its_memory():
    """A solver that counts its work knows its memory; for others it is estimated from
    their kind. An implicit solver holds matrices."""
    n = 1_000
    for name in gradflow.solvers.names():
        solver = _internals.resolve(name).solver
        memory = _internals.memory(solver, n)
        assert (memory > 8 * n**2) == isinstance(solver, diffrax.AbstractDIRK)
        if isinstance(solver, _internals.AbstractCountingSolver):
            assert memory == solver.memory(n)


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_the_error_stays_near_the_tolerance(solver):
    loss, start, exact = saddle()
    for rtol in (1e-4, 1e-6, 1e-8):
        flow = gradflow.integrate(loss, start, 6.0, rtol=rtol, solver=solver)
        expected = exact(flow.ts)
        error = np.max(np.abs(flow.params - expected))
        assert error < 10 * rtol * np.max(np.abs(expected))


@pytest.mark.parametrize(("solver", "order"), [("rk4", 4), ("euler", 1)])
def test_fixed_steps_converge_at_their_order(solver, order):
    loss, start, exact = saddle()
    errors = []
    for step in (0.004, 0.002, 0.001):
        ts = np.arange(1, 11) * 0.1  # at the ends of steps, without interpolation
        flow = gradflow.integrate(loss, start, 1.0, ts=ts, solver=solver, step=step)
        assert flow.stats["num_accepted_steps"] == pytest.approx(1 / step, abs=1)
        errors.append(np.max(np.abs(flow.params - exact(ts))))
    slopes = -np.diff(np.log2(errors))
    np.testing.assert_allclose(slopes, order, rtol=0.15)


def test_a_fixed_step_is_stable_at_the_start_unless_given():
    loss, start, _ = saddle()
    flow = gradflow.integrate(loss, start, 1.0, solver="rk4")
    assert flow.settings.step == pytest.approx(1e-2, rel=1e-2)  # 1/λ_max
    assert flow.stats["num_evaluations"] == 4 * flow.stats["num_accepted_steps"]
    assert "rk4 with steps of 0.01" in str(flow)


def test_a_step_beyond_the_edge_of_stability_says_so():
    loss, start, _ = saddle()
    with pytest.raises(gradflow.FlowError, match="overflowed after t = ") as e:
        gradflow.integrate(loss, start, 100.0, solver="euler", step=0.05)
    assert 0 < e.value.flow.ts[-1] < 100.0
    assert np.all(np.isfinite(e.value.flow.params))


def test_a_step_is_for_solvers_of_fixed_steps():
    loss, start, _ = saddle()
    with pytest.raises(ValueError, match=r"`step` is only for .*\(rk4, euler\)"):
        gradflow.integrate(loss, start, 1.0, step=0.1)
    with pytest.raises(ValueError, match="`step` must be a positive"):
        gradflow.integrate(loss, start, 1.0, solver="rk4", step=-0.1)


def test_a_flow_of_fixed_steps_is_saved_and_goes_on(tmp_path):
    loss, start, exact = saddle()
    flow = gradflow.integrate(loss, start, 1.0, solver="rk4", step=1e-3)
    loaded = gradflow.Flow.load(flow.save(tmp_path / "flow.npz"), loss=loss)
    assert loaded.settings == flow.settings
    np.testing.assert_allclose(loaded.at(0.77), exact([0.77])[0], atol=1e-8)


def test_the_stats_say_which_solver_was_chosen_and_why():
    loss, start, _ = saddle()
    flow = gradflow.integrate(loss, start, 1.0)
    assert flow.stats["solver"] == "ndf"
    assert "fastest" in flow.stats["choice"]
    assert "n = 15" in flow.stats["choice"]
    named = gradflow.integrate(loss, start, 1.0, solver="tsit5")
    assert named.stats["choice"] == "requested by name"


def test_auto_avoids_eigenvectors_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(_choice, "available_memory", lambda: 10**9)
    assert _internals.resolve("auto", 10**5).name == "ndf"
    choice = _internals.resolve("auto", 10**7)
    assert choice.name == "rock4"
    assert "1 GB" in choice.reason


def test_the_stated_memory_is_that_of_the_compiled_solve():
    """As reported by the compiler, for a vector field that takes none."""
    solver = gradflow.solvers.LowRankNDF(counts_work=True)
    for n in (1_000, 100_000):

        def solve(y0):
            return diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: -y),
                solver,
                0.0,
                1.0,
                None,
                y0,
                stepsize_controller=_internals.ResumableController(1e-6, 1e-9),
                max_steps=None,
                throw=False,
            ).ys

        compiled = jax.jit(solve).lower(jnp.ones(n)).compile()
        taken = compiled.memory_analysis().temp_size_in_bytes
        assert 0.3 * solver.memory(n) < taken < 1.2 * solver.memory(n)


def test_converged():
    loss, start, exact = saddle()
    flow = gradflow.integrate(loss, start, 5.0, rtol=1e-6)
    seen = gradflow.converged(flow)
    assert seen
    true = np.max(np.abs(flow.params - exact(flow.ts)), axis=1)
    # The finer flow is a hundred times as accurate, and shows the error to 10 %.
    assert np.max(np.abs(seen.error - true)) < 0.1 * np.max(true)
    assert "converged: observed error" in str(seen)
    other = gradflow.converged(flow, solver="kvaerno5")
    assert np.max(np.abs(other.error - true)) < 0.5 * np.max(true)
    assert "by kvaerno5" in str(other)


def test_converged_sees_a_flow_that_is_not():
    loss, start, _ = saddle()
    flow = gradflow.integrate(loss, start, 1.0, solver="euler", step=0.01)
    seen = gradflow.converged(flow)
    assert not seen
    assert "NOT CONVERGED" in str(seen)
    assert "a step of 0.005" in str(seen)


def test_converged_refuses(tmp_path):
    loss, start, _ = saddle()
    flow = gradflow.integrate(loss, start, 1.0)
    with pytest.raises(ValueError, match="`tighter` must be below one"):
        gradflow.converged(flow, tighter=2.0)
    with pytest.raises(ValueError, match="`flow` must be a Flow, got float"):
        gradflow.converged(1.0)
    loaded = gradflow.Flow.load(flow.save(tmp_path / "flow.npz"))
    with pytest.raises(ValueError, match="converged` needs the loss"):
        gradflow.converged(loaded)
