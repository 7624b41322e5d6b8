import contextlib
import io
import math

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import scipy.linalg

import gradflow
from gradflow import InfiniteContext, MarkovChain, OneLayerTransformer, Problem
from gradflow._core.ravel import Ravel
from gradflow._integrate._integrate import default_atol
from gradflow._stepping import _segments as segments


def quadratic(params):
    """½ xᵀHx on a pytree: H has eigenvalues from -1 (a saddle) to 20."""
    x = jnp.concatenate([params["a"], jnp.ravel(params["b"][0])])
    return 0.5 * x @ jnp.asarray(HESSIAN) @ x


def _hessian():
    rng = np.random.default_rng(0)
    Q, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    return Q @ np.diag([-1.0, 0.0, 0.3, 1.0, 5.0, 20.0]) @ Q.T


HESSIAN = _hessian()
START = {"a": np.array([1.0, -0.5]), "b": (np.array([[0.3, 2.0], [-1.0, 0.7]]),)}


def flat(params):
    a, b = np.asarray(params["a"]), np.asarray(params["b"][0])
    return np.concatenate([a, b.reshape(*b.shape[:-2], 4)], axis=-1)


def exact_quadratic(t):
    return scipy.linalg.expm(-HESSIAN * t) @ flat(START)


def flat_weights(flow):
    return np.concatenate(
        [getattr(flow.params, n).reshape(len(flow.ts), -1) for n in oracles.SHAPES], 1
    )


#
# Right
#


@pytest.mark.parametrize("solver", ["tsit5", "dopri8", diffrax.Dopri5()])
@pytest.mark.parametrize("rtol", [1e-5, 1e-8])
def test_quadratic_flow_is_the_matrix_exponential(solver, rtol):
    flow = gradflow.integrate(quadratic, START, 3.0, solver=solver, rtol=rtol)
    exact = np.stack([exact_quadratic(t) for t in flow.ts])
    error = np.abs(flat(jax.tree.map(np.asarray, flow.params)) - exact)
    assert np.max(error) < 10 * rtol * np.max(np.abs(exact))
    np.testing.assert_allclose(
        flow.loss,
        0.5 * np.einsum("ti,ij,tj->t", exact, HESSIAN, exact),
        atol=1e2 * rtol,
    )
    np.testing.assert_allclose(
        flow.speed, np.linalg.norm(exact @ HESSIAN, axis=1), rtol=1e3 * rtol
    )


@pytest.mark.parametrize("scale", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_whole_trajectory_is_scipys(reference, scale, weights):
    params = reference.init(seed=1, scale=scale)
    flow = gradflow.integrate(reference, params, 400.0, observables=())
    exact = oracles.scipy_flow(
        oracles.REFERENCE_LAW,
        oracles.sticky(oracles.REFERENCE_LAW, 0.5),
        weights(params),
        flow.ts,
    )
    error = np.max(np.abs(flat_weights(flow) - exact))
    assert error < 10 * 1e-8 * np.max(np.abs(exact))
    assert flow.loss[-1] < 0.66  # past condensation (0.727) and into focus
    # With an absolute tolerance that followed nothing, a start at 1e-6 would lose its
    # digits at the first saddle; this one keeps them relative to its own size.
    early = flow.ts < 10
    assert np.max(np.abs(flat_weights(flow) - exact)[early]) < 1e-6 * np.max(
        np.abs(exact[early])
    )


@pytest.mark.parametrize("seed", range(3))
def test_conserved_quantities_drift_by_less_than_1e_9(reference, seed):
    flow = gradflow.integrate(reference, reference.init(seed=seed), 600.0)
    assert set(flow.certificate.drift) == set(reference.conserved(flow.final))
    assert max(flow.certificate.drift.values()) < 1e-9
    # The certificate against a second computation of the same drift, by hand.
    W0, WQ, WK, W1 = (getattr(flow.params, n) for n in oracles.SHAPES)
    gram = {"W0": np.einsum("tdi,tdj->tij", W0, W0)}
    gram |= {
        name: np.einsum("tid,tjd->tij", w, w)
        for name, w in (("W1", W1), ("WQ", WQ), ("WK", WK))
    }
    balance = gram["W0"] - gram["W1"] - gram["WQ"] - gram["WK"]
    drift = np.max(np.abs(balance - balance[0]))
    scale = max(np.max(np.abs(g)) for g in gram.values())
    assert flow.certificate.drift["embedding_balance"] == pytest.approx(
        drift / scale, rel=1e-2
    )


def test_energy_balance(reference_flow):
    certificate = reference_flow.certificate
    assert certificate.energy_released == pytest.approx(
        reference_flow.loss[0] - reference_flow.loss[-1], rel=1e-14
    )
    assert certificate.energy_imbalance < 1e-8
    assert certificate.quadrature_error < 1e-8
    assert certificate.largest_rise == 0.0


def test_certificate_of_a_loose_flow_is_worse(reference, reference_flow):
    loose = gradflow.integrate(reference, reference.init(), 400.0, rtol=1e-4)
    tight = reference_flow.certificate
    assert loose.certificate.energy_imbalance > 100 * tight.energy_imbalance
    assert max(loose.certificate.drift.values()) > 100 * max(tight.drift.values())


def test_energy_balance_against_the_exact_energy_of_a_quadratic():
    flow = gradflow.integrate(quadratic, START, 2.0)
    x0, x1 = exact_quadratic(0.0), exact_quadratic(2.0)
    released = 0.5 * (x0 @ HESSIAN @ x0 - x1 @ HESSIAN @ x1)
    assert flow.certificate.energy_released == pytest.approx(released, rel=1e-7)
    assert flow.certificate.energy_imbalance < 1e-6 * released
    assert flow.certificate.drift == {}


def test_a_rise_of_the_loss_is_reported():
    """A vector field that is no gradient: the loss's derivative is told a lie."""

    @jax.custom_jvp
    def climbing(x):
        return jnp.sum(x**2)

    climbing.defjvp(lambda x, v: (climbing(x[0]), -jnp.sum(x[0] * v[0])))
    flow = gradflow.integrate(climbing, jnp.ones(2), 1.0, ts=[0.0, 0.5, 1.0])
    exact = 2 * np.exp(2 * np.array([0.5, 1.0]))
    assert flow.certificate.largest_rise == pytest.approx(exact[1] - exact[0], rel=1e-6)
    assert flow.certificate.energy_imbalance > 1


def test_uniform_law_stays_on_its_plateau():
    chain = MarkovChain.sticky(np.full(4, 0.25), 0.5)
    problem = Problem(OneLayerTransformer(4, 10), InfiniteContext(chain))
    flow = gradflow.integrate(problem, problem.init(), 300.0)
    np.testing.assert_allclose(flow.loss, np.log(4), rtol=1e-6)
    assert np.max(flow.observables["singular_values_W0"]) < 0.05
    assert flow.result == diffrax.RESULTS.successful


def test_zero_start_stays_at_zero(reference):
    flow = gradflow.integrate(reference, reference.init(scale=0.0), 10.0)
    assert flow.settings.atol == 1e-3 * 1e-8 * 1e-8
    np.testing.assert_allclose(flow.loss, np.log(4), rtol=1e-15)


def test_atol_follows_the_initial_scale(reference):
    params = reference.init(scale=1e-5)
    flow = gradflow.integrate(reference, params, 1.0, rtol=1e-6, observables=())
    leaves = [np.ravel(x) for x in jax.tree.leaves(params)]
    rms = np.sqrt(np.mean(np.concatenate(leaves) ** 2))
    assert flow.settings.atol == pytest.approx(1e-3 * 1e-6 * rms, rel=1e-12)


def test_atol_of_starts_whose_squares_are_no_numbers():
    y0 = np.array([[3.0, -4.0], [3e200, -4e200], [3e-200, 4e-200], [0.0, 0.0]])
    rms, least = math.sqrt(12.5), 1e-8
    wanted = 1e-9 * np.array([rms, 1e200 * rms, least, least])
    np.testing.assert_allclose(default_atol(y0, 1e-6), wanted, rtol=1e-15)
    for start, atol in zip(y0, wanted, strict=True):
        assert default_atol(start, 1e-6) == pytest.approx(atol, rel=1e-15)


def test_single_precision_parameters_flow_in_double(reference):
    params = jax.tree.map(lambda x: x.astype(np.float32), reference.init())
    flow = gradflow.integrate(reference, params, 1.0)
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(flow.params))


#
# What is saved
#


def test_default_times_are_zero_and_a_geometric_grid(reference_flow):
    ts = reference_flow.ts
    assert ts[0] == 0
    assert ts[-1] == 400.0
    ratios = ts[2:] / ts[1:-1]
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-9)


def test_given_times_are_kept_as_they_are():
    ts = [0.1, 0.2, 1.5]
    flow = gradflow.integrate(quadratic, START, 2.0, ts=ts)
    np.testing.assert_array_equal(flow.ts[:3], ts)
    assert len(flow.ts) == 4  # where the flow ended comes last
    assert flow.ts[-1] == 2.0


def test_observables_are_those_of_the_saved_parameters(reference, reference_flow):
    index = 150
    params = jax.tree.map(lambda x: jnp.asarray(x[index]), reference_flow.params)
    for name, function in reference.observables.items():
        np.testing.assert_allclose(
            reference_flow.observables[name][index], function(params), atol=1e-10
        )
    assert reference_flow.loss[index] == pytest.approx(float(reference(params)), 1e-14)


def test_chosen_observables(reference):
    params = reference.init()
    named = gradflow.integrate(reference, params, 1.0, observables=["alignment"])
    assert set(named.observables) == {"alignment"}
    own = gradflow.integrate(
        reference, params, 1.0, observables={"norm": lambda p: jnp.sum(p.W0**2)}
    )
    np.testing.assert_allclose(
        own.observables["norm"], np.sum(own.params.W0**2, axis=(1, 2)), rtol=1e-12
    )
    assert gradflow.integrate(reference, params, 1.0, observables=()).observables == {}


def test_large_observables_must_be_asked_for():
    d = 300
    chain = MarkovChain.sticky(np.full(d, 1 / d), 0.5)
    problem = Problem(OneLayerTransformer(d, 2), InfiniteContext(chain))
    params, ts = problem.init(), [0.0, 1.0]
    short = {"ts": ts, "solver": "tsit5"}
    default = gradflow.integrate(problem, params, 1.0, **short)
    assert "attention" not in default.observables
    assert "attention_entropy" in default.observables
    asked = gradflow.integrate(problem, params, 1.0, observables=["attention"], **short)
    assert asked.observables["attention"].shape == (2, d, d)


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
        bowl,
        Ravel.of(jnp.ones(2)),
        gradflow.solvers.resolve(solver).solver,
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
    method = gradflow.solvers.resolve(solver).solver
    tolerances = jnp.array(1e-6), jnp.array(1e-9)
    equation = segments.Equation(noisy, Ravel.of(y0), method, *tolerances)
    state, steps = segments.start(equation, y0, t1, jnp.asarray(10**6))
    segment = segments.advance(equation, state, t1, steps, None)
    jax.effects_barrier()
    attempted = int(segment.accepted + segment.rejected)
    assert segment.state.t == t1
    assert int(segment.rejected) > 0
    # `start` and `advance` each look at the loss once more, for its value.
    assert len(calls) - 2 == gradflow.solvers.count_evaluations(method, attempted)


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

    with pytest.raises(gradflow.FlowError, match="could not go on from t = ") as e:
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


#
# Bad input: a sentence, before any work
#


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
        ({"params": {}}, "`params` must hold at least one number"),
        ({"params": {"w": np.zeros(0)}}, "`params` must hold at least one number"),
        ({"loss": Problem}, "`loss` must be an object, got the class Problem"),
        ({"solver": diffrax.KenCarp4()}, "must take an ordinary differential equation"),
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
        ({"observables": {"loss": jnp.sum}}, "must have other names than ts, loss"),
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


@pytest.mark.parametrize(("rtol", "most"), [(1e-4, 2.0), (1e-6, 0.9)])
def test_energy_balance_is_as_fine_as_the_tolerance_asks_for(reference, rtol, most):
    """Its quadrature is well below the imbalance that it is to show, by few evaluations
    a step: split down to rounding it takes more."""
    flow = gradflow.integrate(
        reference, reference.init(), 1e3, rtol=rtol, observables=()
    )
    certificate, stats = flow.certificate, flow.stats
    assert 0 < certificate.quadrature_error < 0.1 * certificate.energy_imbalance
    assert certificate.energy_imbalance < rtol
    per_step = stats["num_certificate_evaluations"] / stats["num_accepted_steps"]
    assert per_step < most
