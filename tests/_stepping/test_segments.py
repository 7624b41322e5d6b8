"""The solve itself: compiled once, dense between steps, stopped by events."""

import contextlib
import io

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratics import START, exact_quadratic, flat, quadratic

import gradflow
from gradflow import InfiniteContext, MarkovChain, OneLayerTransformer, Problem
from gradflow._core.ravel import Ravel
from gradflow._stepping import _segments as segments
from gradflow.solvers import _internals

#
# Compiled once
#


class _Compilations:
    def __init__(self):
        self.count = 0

    def __call__(self, event, duration, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"


COMPILATIONS = _Compilations()
jax.monitoring.register_event_duration_secs_listener(COMPILATIONS)


@pytest.mark.parametrize("solver", ["auto", "kvaerno5"])
def test_a_second_call_compiles_nothing(solver):
    """Not for other parameters, tolerances, horizons, nor another chain's numbers."""

    def solve(seed, stickiness, t1, rtol):
        chain = MarkovChain.sticky([0.6, 0.3, 0.1], stickiness)
        problem = Problem(OneLayerTransformer(3, 4), InfiniteContext(chain))
        return gradflow.integrate(
            problem, problem.init(seed=seed), t1, rtol=rtol, solver=solver
        )

    first = solve(0, 0.5, 10.0, 1e-6)
    assert first.stats["compile_seconds"] > 0.1
    before = COMPILATIONS.count
    second = solve(1, 0.3, 20.0, 1e-7)
    assert COMPILATIONS.count == before
    assert second.stats["compile_seconds"] < 0.01


@pytest.mark.parametrize("solver", ["ndf", "tsit5", "rk4"])
def test_compiled_solves_can_be_kept_on_disk(solver):
    """JAX keeps none that calls back to Python."""
    equation = segments.Equation(
        gradflow.Loss(bowl),
        Ravel.of(jnp.ones(2)),
        _internals.resolve(solver).solver,
        jnp.asarray(1e-6),
        jnp.asarray(1e-9),
        jnp.asarray(0.1) if solver == "rk4" else None,
    )
    t1 = jnp.asarray(1.0)
    state, steps = segments.start(equation, jnp.ones(2), t1, jnp.asarray(100))
    solve = eqx.filter_jit(segments.plain_advance)
    lowered = solve.lower(equation, state, t1, steps, None)
    assert "callback" not in lowered.as_text()


def test_segments_of_one_solve_share_one_compilation(reference, monkeypatch):
    monkeypatch.setattr(segments, "LARGEST_SEGMENT", 500)
    traces = []

    def counting(params):
        traces.append(1)
        return reference(params)

    gradflow.integrate(counting, reference.init(), 10.0)
    once = len(traces)
    flow = gradflow.integrate(counting, reference.init(), 900.0)
    assert flow.stats["num_accepted_steps"] > 2000
    assert len(flow.dense.pieces) > 4
    assert len(traces) == once


@pytest.mark.parametrize("solver", ["tsit5", "dopri5", diffrax.Bosh3()])
def test_evaluations_are_counted(solver):
    calls = []

    def noisy(x):
        jax.debug.callback(lambda: calls.append(1))
        return 0.5 * jnp.sum(x**2) + 0.3 * jnp.sin(9 * x[0])

    y0, t1 = jnp.array([1.0, 2.0]), jnp.array(3.0)
    method = _internals.resolve(solver).solver
    tolerances = jnp.array(1e-6), jnp.array(1e-9)
    equation = segments.Equation(
        gradflow.Loss(noisy), Ravel.of(y0), method, *tolerances
    )
    state, steps = segments.start(equation, y0, t1, jnp.asarray(10**6))
    segment = segments.advance(equation, state, t1, steps, None)
    jax.effects_barrier()
    attempted = int(segment.accepted + segment.rejected)
    assert segment.state.t == t1
    assert int(segment.rejected) > 0
    # `start` and `advance` each look at the loss once more, for its value.
    assert len(calls) - 2 == _internals.count_evaluations(method, attempted)


#
# Between saved times
#


@pytest.mark.parametrize("dense_memory", [2**28, 0])
def test_at_any_time(dense_memory):
    flow = gradflow.integrate(
        quadratic, START, 3.0, ts=[0.0, 1.0, 3.0], dense_memory=dense_memory
    )
    for t in (0.0, 1e-9, 0.37, 1.0, 2.2, 3.0):
        np.testing.assert_allclose(flat(flow.at(t)), exact_quadratic(t), atol=1e-7)
    stacked = flow.at(np.array([[0.5, 1.0], [1.5, 2.0]]))
    assert stacked["b"][0].shape == (2, 2, 2, 2)
    np.testing.assert_allclose(flat(stacked)[1, 0], exact_quadratic(1.5), atol=1e-7)


def test_dense_output_of_many_segments_is_kept_as_far_as_it_fits(monkeypatch):
    monkeypatch.setattr(segments, "LARGEST_SEGMENT", 20)

    def loss(p):  # another to jit, so that it is compiled with this setting
        return quadratic(p)

    full = gradflow.integrate(loss, START, 3.0)
    assert full.stats["dense_until"] == 3.0
    assert len(full.dense.pieces) > 5
    size = sum(segments.dense_bytes(piece) for piece in full.dense.pieces)
    some = gradflow.integrate(loss, START, 3.0, dense_memory=size // 2)
    assert 0 < some.stats["dense_until"] < 3.0
    for t in (0.123, 1.234, 2.999):
        for flow in (full, some):
            np.testing.assert_allclose(flat(flow.at(t)), exact_quadratic(t), atol=1e-7)
    with pytest.raises(ValueError, match="`t` must lie within the flow"):
        full.at(801.0)


def test_at_before_the_first_saved_time_and_beyond_the_dense_output(reference):
    flow = gradflow.integrate(
        quadratic, START, 3.0, ts=[2.5, 3.0], solver="tsit5", dense_memory=0
    )
    for t in (0.0, 0.7, 2.4, 2.7):
        np.testing.assert_allclose(flat(flow.at(t)), exact_quadratic(t), atol=1e-7)
    with pytest.raises(ValueError, match="`t` must be an array of numbers"):
        flow.at("soon")


#
# Events, failures
#


@pytest.mark.parametrize("solver", ["tsit5", "ndf"])
def test_segments_take_the_steps_of_one_solve(reference, monkeypatch, solver):
    """Short segments, as a large state has them: the controller's proposals pass from
    one to the next, and a rejected step at the end of one does no harm."""
    params = reference.init()
    whole = gradflow.integrate(reference, params, 200.0, solver=solver, observables=())
    monkeypatch.setattr(segments, "SEGMENT_MEMORY", 1)
    monkeypatch.setattr(segments, "SMALLEST_SEGMENT", 3)

    def another(p):  # another loss to jit, so that it is compiled with these settings
        return reference(p)

    parts = gradflow.integrate(another, params, 200.0, solver=solver)
    for count in ("num_accepted_steps", "num_rejected_steps"):
        # The multistep method's choices may turn on rounding.
        few = 0.01 * whole.stats["num_accepted_steps"] if solver == "ndf" else 2
        assert abs(parts.stats[count] - whole.stats[count]) <= few
    np.testing.assert_allclose(parts.final.W0, whole.final.W0, atol=1e-8)
    assert parts.stats["num_rejected_steps"] > 5


@pytest.mark.parametrize("k", [60.0, 20_000.0])
def test_a_trial_step_that_overflows_is_only_a_rejected_step(k):
    """Even the prediction may lie where the gradient is infinite."""

    def cliff(x):
        return jnp.sum(x + 2e-3 * jnp.exp(-k * (x - 1)))

    flow = gradflow.integrate(cliff, jnp.array([2.0]), 3.0, rtol=1e-3, atol=1e-3)
    assert flow.ts[-1] == 3.0
    # At rest where the slope vanishes: k·2e-3·exp(-k(x-1)) = 1.
    assert float(flow.final[0]) == pytest.approx(1 + np.log(2e-3 * k) / k, abs=1e-2)


def test_a_real_event_is_located_on_the_dense_output():
    flow = gradflow.integrate(
        lambda x: 0.5 * jnp.sum(x**2),
        jnp.array([2.0]),
        10.0,
        ts=[0.0, 0.1, 5.0],
        event=lambda x: x[0] - 1.0,
    )
    assert flow.result == diffrax.RESULTS.event_occurred
    assert flow.ts[-1] == pytest.approx(np.log(2), rel=1e-8)
    assert float(flow.final[0]) == pytest.approx(1.0, rel=1e-12)
    np.testing.assert_array_equal(flow.ts[:-1], [0.0, 0.1])
    assert "by its event" in flow.stats["reason"]


def bowl(x):
    return 0.5 * jnp.sum(x**2)


class Level(eqx.Module):
    level: jax.Array

    def __call__(self, x):
        return 1e8 * (x[0] ** 3 + x[1] ** 2 * x[0] - 1.25 * self.level)


@pytest.mark.parametrize("level", [0.1, 0.3, 1 / 3, 0.7, 0.9])
def test_a_real_event_need_not_be_zero_in_rounded_numbers(level):
    """Of a large scale it passes from one side of zero to the other."""
    event = Level(jnp.asarray(level))
    flow = gradflow.integrate(bowl, jnp.array([1.0, 0.5]), 5.0, event=event)
    assert flow.result == diffrax.RESULTS.event_occurred
    assert flow.ts[-1] == pytest.approx(-np.log(level) / 3, rel=1e-8)


def test_a_boolean_event_stops_after_the_step():
    flow = gradflow.integrate(
        lambda x: 0.5 * jnp.sum(x**2),
        jnp.array([2.0]),
        10.0,
        event=lambda x: x[0] < 1.0,
    )
    assert np.log(2) <= flow.ts[-1] < 2.0


def test_an_event_after_many_segments(reference):
    flow = gradflow.integrate(
        reference, reference.init(), 1e4, event=lambda p: reference(p) - 0.57
    )
    assert flow.loss[-1] == pytest.approx(0.57, abs=1e-12)
    assert flow.stats["num_accepted_steps"] > 2000


def test_max_steps(reference):
    with pytest.raises(
        gradflow.FlowError, match=r"gave up at t = .*`max_steps` = 20"
    ) as e:
        gradflow.integrate(reference, reference.init(), 100.0, max_steps=20)
    flow = e.value.flow
    assert flow.result == diffrax.RESULTS.max_steps_reached
    assert flow.stats["num_accepted_steps"] + flow.stats["num_rejected_steps"] == 20
    assert 0 < flow.ts[-1] < 100
    assert len(flow.ts) == len(flow.loss) == len(flow.params.W0)
    returned = gradflow.integrate(
        reference, reference.init(), 100.0, max_steps=20, throw=False
    )
    np.testing.assert_array_equal(returned.ts, flow.ts)


@pytest.mark.parametrize("solver", ["auto", "kvaerno5"])
def test_a_flow_that_runs_into_a_wall_keeps_what_it_has(solver):
    def wall(x):  # falls towards x = 0, where the loss ceases to exist
        return jnp.sum(jnp.sqrt(x))

    with pytest.raises(gradflow.FlowError, match="could not continue from t = ") as e:
        gradflow.integrate(wall, jnp.array([1.0]), 10.0, solver=solver, rtol=1e-6)
    flow = e.value.flow
    assert flow.result == diffrax.RESULTS.dt_min_reached
    # ẋ = -1/(2√x) from 1 reaches 0 at t = 4/3: x = (1 - 3t/4)^(2/3).
    assert flow.ts[-1] == pytest.approx(4 / 3, rel=1e-2)
    before = flow.ts < 1.2
    np.testing.assert_allclose(
        flow.params[before, 0], (1 - 0.75 * flow.ts[before]) ** (2 / 3), rtol=1e-4
    )


def test_progress_bar(reference):
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        gradflow.integrate(reference, reference.init(), 1.0, progress=True)
    assert "100%" in shown.getvalue()
    assert "t = 1, loss 1.386" in shown.getvalue()
    silent = io.StringIO()
    with contextlib.redirect_stderr(silent):
        gradflow.integrate(reference, reference.init(), 1.0)
    assert silent.getvalue() == ""
