"""The implicit multistep method, in `integrate` and in plain diffrax."""

import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import gradflow
from gradflow import InfiniteContext, MarkovChain, OneLayerTransformer, Problem
from gradflow._core.ravel import Ravel
from gradflow._stepping import _segments as segments
from gradflow.problems import as_loss
from gradflow.solvers import LowRankNDF
from gradflow.solvers.ndf import MeshInterpolation


@functools.cache  # always the same loss object, which is compiled once
def stiff_saddle():
    """A quadratic with the eigenvalues `STIFF_SADDLE` in a random basis, a start and
    the exact flow."""
    eigenvalues = STIFF_SADDLE
    rng = np.random.default_rng(0)
    n = len(eigenvalues)
    Q, _ = np.linalg.qr(rng.normal(size=(n, n)))
    H = jnp.asarray(Q @ np.diag(eigenvalues) @ Q.T)
    start = Q @ np.where(np.asarray(eigenvalues) < 0, 1e-3, 1.0)

    def exact(ts):
        modes = np.exp(-np.outer(ts, eigenvalues)) * (Q.T @ start)
        return modes @ Q.T

    return (lambda x: 0.5 * x @ H @ x), jnp.asarray(start), exact


STIFF_SADDLE = np.concatenate(
    [[-1.0, -0.5, 0.0], np.geomspace(1e-2, 1e2, 20), np.geomspace(1e2, 1e4, 6)]
)


@pytest.mark.parametrize("rank", [3, 12, 40])
@pytest.mark.parametrize("rtol", [1e-4, 1e-6, 1e-8])
def test_a_stiff_saddle_is_integrated_to_tolerance(rtol, rank):
    """The eigenvalues of the Jacobian range from -1e4 to +1; `rank` is below, near and
    above the number of large ones."""
    loss, start, exact = stiff_saddle()
    flow = gradflow.integrate(
        loss, start, 10.0, rtol=rtol, solver=LowRankNDF(rank=rank)
    )
    expected = exact(flow.ts)
    assert np.max(np.abs(flow.params - expected)) < 10 * rtol * np.max(np.abs(expected))
    # An explicit method takes about 1e4·10/3 steps.
    assert flow.stats["num_accepted_steps"] < 15_000


@pytest.mark.parametrize("in_segments", [True, False])
def test_conjugate_gradients_where_more_is_stiff_than_is_followed(in_segments):
    """Sixty stiff directions, of which four eigenpairs are followed. Without conjugate
    gradients, Newton's method fails at every step that is longer than an explicit
    method's, and there are 20 times as many steps."""
    rates = np.concatenate([np.linspace(1e3, 3e3, 60), np.linspace(0.01, 1.0, 20)])
    Q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(80, 80)))
    start = Q.T @ np.ones(80)

    def loss(x):
        return 0.5 * jnp.sum(rates * (Q @ x) ** 2)

    solver = LowRankNDF(rank=4, counts_work=in_segments)
    if in_segments:
        flow = gradflow.integrate(loss, start, 30.0, solver=solver, rtol=1e-6)
        assert flow.stats["num_newton_failures"] == 0
        end, steps = flow.final, flow.stats["num_accepted_steps"]
    else:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, x, args: -jax.grad(loss)(x)),
            solver,
            0.0,
            30.0,
            None,
            jnp.asarray(start),
            stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-9),
            max_steps=20_000,
        )
        end, steps = solution.ys[-1], int(solution.stats["num_accepted_steps"])
    assert steps < 1_000
    np.testing.assert_allclose(Q @ np.asarray(end), np.exp(-30 * rates), atol=1e-6)


def test_error_falls_with_the_tolerance():
    """A method of order five: ten times less error for each digit of the tolerance."""
    loss, start, exact = stiff_saddle()
    errors, steps = [], []
    for rtol in (1e-4, 1e-6, 1e-8, 1e-10):
        flow = gradflow.integrate(loss, start, 5.0, rtol=rtol, solver="ndf")
        errors.append(np.max(np.abs(flow.params - exact(flow.ts))))
        steps.append(flow.stats["num_accepted_steps"])
    slopes = np.diff(np.log(errors)) / np.log(1e-2)
    assert np.all(slopes > 0.7)
    # With rtol^(-1/6) there are 2.2 times as many steps for two digits; with order one,
    # 10 times as many.
    assert np.all(np.divide(steps[1:], steps[:-1]) < 3.0)


@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6])
def test_whole_trajectory_is_scipys(reference, scale, weights):
    params = reference.init(seed=1, scale=scale)
    flow = gradflow.integrate(reference, params, 400.0, observables=(), solver="ndf")
    pi = oracles.REFERENCE_LAW
    exact = oracles.scipy_flow(pi, oracles.sticky(pi, 0.5), weights(params), flow.ts)
    found = np.concatenate(
        [getattr(flow.params, n).reshape(len(flow.ts), -1) for n in oracles.SHAPES], 1
    )
    assert np.max(np.abs(found - exact)) < 10 * 1e-8 * np.max(np.abs(exact))


@pytest.fixture(scope="module")
def long_flow(reference):
    return gradflow.integrate(reference, reference.init(), 1e4, solver="ndf")


def test_from_the_first_saddle_to_the_global_minimum(long_flow):
    """There λ_max exceeds 100, and an explicit method takes 500,000 steps."""
    assert long_flow.result == diffrax.RESULTS.successful
    assert long_flow.loss[-1] == pytest.approx(0.553611, abs=5e-7)
    assert long_flow.stats["num_accepted_steps"] < 5_000
    assert long_flow.stats["num_rejected_steps"] < 600
    # A tighter Newton's method rejects a few steps fewer, but takes 7,500 evaluations.
    assert long_flow.stats["num_evaluations"] < 7_200
    assert max(long_flow.certificate.drift.values()) < 2e-9
    assert long_flow.certificate.energy_imbalance < 1e-8
    assert long_flow.certificate.largest_rise < 1e-12


def test_it_agrees_with_the_explicit_method_when_stiff(reference, long_flow):
    explicit = gradflow.integrate(reference, reference.init(), 1000.0, solver="tsit5")
    for t in (300.0, 600.0, 900.0):
        np.testing.assert_allclose(
            long_flow.at(t).W0, explicit.at(t).W0, atol=2e-8 * 4, rtol=0
        )


@pytest.mark.parametrize("seed", range(6))
def test_random_chains(seed):
    """The solver does not stall, whatever the chain and the initial scale, from 1e-2 to
    1e-5."""
    rng = np.random.default_rng(seed)
    pi = rng.dirichlet(np.ones(5)) + 1e-3
    pi /= pi.sum()
    chain = (
        MarkovChain.sticky(pi, rng.uniform(0.2, 0.8)),
        MarkovChain.metropolis(pi),
        MarkovChain.random(pi, seed=seed),
    )[seed % 3]
    problem = Problem(OneLayerTransformer(5, 6), InfiniteContext(chain))
    params = problem.init(seed=seed, scale=10.0 ** -rng.integers(2, 6))
    flow = gradflow.integrate(problem, params, 3000.0, solver="ndf", observables=())
    assert flow.stats["num_accepted_steps"] < 10_000
    assert flow.stats["num_rejected_steps"] < 0.2 * flow.stats["num_accepted_steps"]
    assert max(flow.certificate.drift.values()) < 1e-7


#
# In plain diffrax
#


def solve(loss, start, t1, saveat, rtol=1e-7, **options):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(
            lambda t, y, args: jax.tree.map(jnp.negative, jax.grad(loss)(y))
        ),
        LowRankNDF(),
        0.0,
        t1,
        None,
        start,
        saveat=saveat,
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=1e-10),
        max_steps=20_000,
        **options,
    )


def test_saveat_ts_and_dense():
    loss, start, exact = stiff_saddle()
    ts = jnp.linspace(0.0, 5.0, 77)
    solution = solve(loss, start, 5.0, diffrax.SaveAt(ts=ts, dense=True))
    expected = exact(np.asarray(ts))
    assert np.max(np.abs(solution.ys - expected)) < 1e-6
    dense = jax.vmap(solution.evaluate)(ts)
    np.testing.assert_allclose(dense, solution.ys, atol=1e-12)


def test_pytrees_and_events():
    def loss(p):
        return 0.5 * jnp.sum(p["a"] ** 2) + 50.0 * jnp.sum(p["b"] ** 2)

    start = {"a": jnp.array([2.0]), "b": jnp.ones((2, 2))}
    event = diffrax.Event(lambda t, y, args, **_: y["a"][0] - 1.0)
    solution = solve(loss, start, 5.0, diffrax.SaveAt(t1=True), event=event)
    assert solution.result == diffrax.RESULTS.event_occurred
    assert float(solution.ts[-1]) == pytest.approx(np.log(2), abs=0.2)
    flow = gradflow.integrate(
        loss, start, 5.0, solver="ndf", event=lambda p: p["a"][0] - 1
    )
    assert flow.ts[-1] == pytest.approx(np.log(2), rel=1e-7)


def test_vmap():
    loss, start, exact = stiff_saddle()
    scales = jnp.array([1.0, 2.0, 0.5])
    batched = jax.jit(
        jax.vmap(lambda s: solve(loss, s * start, 2.0, diffrax.SaveAt(t1=True)).ys[0])
    )(scales)
    expected = np.asarray(scales)[:, None] * exact(np.array([2.0]))
    np.testing.assert_allclose(batched, expected, atol=1e-6)


def test_time_may_run_backwards():
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: -y),
        LowRankNDF(),
        1.0,
        0.0,
        None,
        jnp.array([1.0, 2.0]),
        stepsize_controller=diffrax.PIDController(rtol=1e-8, atol=1e-10),
    )
    np.testing.assert_allclose(solution.ys[0], np.e * np.array([1.0, 2.0]), rtol=1e-7)


@pytest.mark.parametrize(
    ("loss", "exact"),
    [
        (lambda x: jnp.sum(x) * 0.0, lambda x, t: x + 0 * t),
        (lambda x: jnp.sum(x), lambda x, t: x - t),
        (lambda x: jnp.sum(x**4), lambda x, t: x / np.sqrt(1 + 8 * x**2 * t)),
    ],
)
def test_losses_without_curvature(loss, exact):
    start = np.array([1.0, 2.0, 3.0])
    flow = gradflow.integrate(loss, jnp.asarray(start), 2.0, solver="ndf")
    expected = exact(start[None, :], flow.ts[:, None])
    assert np.max(np.abs(flow.params - expected)) < 10 * 1e-8 * np.max(np.abs(expected))


def stored_on_mesh(loss, start, t1, rtol, steps):
    """The pieces of dense output of a solve in segments of `steps` steps."""
    ravel = Ravel.of(start)
    tolerances = jnp.asarray(rtol), jnp.asarray(1e-3 * rtol)
    solver = LowRankNDF(counts_work=True)
    equation = segments.Equation(as_loss(loss), ravel, solver, *tolerances)
    end = jnp.asarray(t1)
    state, _ = segments.start(equation, ravel.ravel(start), end, jnp.asarray(10**6))
    pieces = []
    while float(state.t) < t1:
        segment = segments.advance(equation, state, end, steps, None)
        pieces.append((float(state.t), float(segment.state.t), segment.dense))
        state = segment.state
    return pieces


@pytest.mark.parametrize("steps", [3, 64, 4096])
def test_the_mesh_alone_is_dense_output_of_the_methods_own_order(steps):
    """The flow is as accurate between steps as at them, whatever the segments."""
    loss, start, exact = stiff_saddle()
    pieces = stored_on_mesh(loss, start, 5.0, 1e-7, steps)
    assert all(isinstance(dense, MeshInterpolation) for *_, dense in pieces)
    assert len(pieces) > 300 or steps > 3
    at = jax.jit(lambda dense, ts: jax.vmap(dense.evaluate)(ts))
    # From the length of the first step to the horizon.
    times = np.geomspace(1e-7, 5.0, 4001)
    worst = 0.0
    for begin, end, dense in pieces:
        inside = times[(times >= begin) & (times <= end)]
        padded = np.pad(inside, (0, 4001 - len(inside)), constant_values=end)
        found = at(dense, jnp.asarray(padded))[: len(inside)]
        worst = max(worst, np.max(np.abs(found - exact(inside)), initial=0.0))
    assert worst < 1e-6
    begin, end, dense = pieces[0]
    np.testing.assert_array_equal(dense.evaluate(jnp.asarray(0.0)), start)
    last = int(dense.ts_size) - 1
    np.testing.assert_array_equal(dense.evaluate(dense.ts[last]), dense.ys[last])


def test_a_segment_without_a_step_knows_its_start():
    loss, start, _ = stiff_saddle()
    (_, _, dense), *_ = stored_on_mesh(loss, start, 1e-3, 1e-7, 4096)
    stuck = eqx.tree_at(lambda d: d.ts_size, dense, jnp.ones((), int))
    np.testing.assert_array_equal(stuck.evaluate(jnp.asarray(0.0)), start)
    np.testing.assert_array_equal(stuck.recent.ys, np.tile(start, (6, 1)))


@pytest.mark.parametrize("given", [{"rank": 0}, {"refresh_every": 0}])
def test_bad_settings_are_refused(given):
    with pytest.raises(ValueError, match="must be a whole number of at least 1, got 0"):
        LowRankNDF(**given)
