"""The stabilised explicit method: its coefficients, and its use in plain diffrax."""

import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import oracles
import pytest

from gradflow.solvers import ROCK4
from gradflow.solvers._rock4 import SAFETY
from gradflow.solvers._rock4_coefficients import DAMPING, family, method

#
# Coefficients
#

STAGES = [5, 6, 7, 8, 11, 20, 47, 150]


def tableau(m):
    """The whole method as a Butcher tableau, A and b."""
    n = len(m.mu) + 4
    g = [np.zeros(n), np.zeros(n)]
    for j in range(len(m.mu)):
        g.append((1 + m.kappa[j]) * g[-1] - m.kappa[j] * g[-2] + m.mu[j] * np.eye(n)[j])
    last = g[-1] + np.hstack([np.zeros((5, n - 4)), m.a[:, :4]])
    A = np.vstack([*g[1:-1], last])
    return A[:-1], A[-1]


def trees(A, b):
    """The elementary weights of b for the eight trees of at most four nodes."""
    c = A.sum(1)
    d = A @ c
    columns = [np.ones_like(c), c, c**2, d, c**3, c * d, A @ c**2, A @ d]
    return np.array([b @ column for column in columns])


ORDER_FOUR = np.array([1, 1 / 2, 1 / 3, 1 / 6, 1 / 4, 1 / 8, 1 / 12, 1 / 24])
POWERS = np.array([1, 2, 3, 3, 4, 4, 4, 4])


@pytest.mark.parametrize("stages", STAGES)
def test_order_conditions(stages):
    m = method(stages)
    A, b = tableau(m)
    assert A.shape == (stages, stages)
    np.testing.assert_allclose(trees(A, b), ORDER_FOUR, atol=1e-13)
    np.testing.assert_allclose(m.c, A.sum(1)[:-4], atol=1e-13)
    np.testing.assert_allclose(m.c_last, np.append(A.sum(1)[-4:], 1), atol=1e-13)

    def combined(weights):
        k = np.append(np.zeros(stages - 4), weights[1:])
        return trees(A, weights[0] * A[-4] + k)

    error = combined(m.error)
    np.testing.assert_allclose(error[:4], 0, atol=1e-12)
    assert error[7] == pytest.approx(1 / 24)
    for theta in (0.25, 0.5, 1.0):
        dense = combined(theta ** np.arange(1, 5) @ m.dense)
        expected = theta**POWERS * ORDER_FOUR
        third_order_and_chain = [0, 1, 2, 3, 7]
        np.testing.assert_allclose(
            dense[third_order_and_chain], expected[third_order_and_chain], atol=1e-12
        )
    # At the end of the step the dense output equals the step.
    np.testing.assert_allclose(m.dense.sum(0), [1, *m.a[4, :4]], atol=1e-11)


@pytest.mark.parametrize("stages", STAGES)
def test_stability_is_optimal(stages):
    m = method(stages)
    # 1.02 ℓ lies beyond the end of the interval; near 0 no damping is required.
    z = -m.length * (1 - np.cos(np.linspace(0, np.pi, 200 * stages))) / 2
    z = np.append(z, -1.02 * m.length)
    P, before, largest = np.ones_like(z), np.zeros_like(z), 0.0
    for mu, kappa in zip(m.mu, m.kappa, strict=True):
        P, before = (mu * z + 1 + kappa) * P - kappa * before, P
        largest = max(largest, np.max(np.abs(P[:-1])))
    Y = [P]
    for i in range(1, 5):
        Y.append(P + z * sum(m.a[i, k] * Y[k] for k in range(i)))
    R = Y[4]
    assert largest < 1 + 1e-9
    inside = z[:-1] < -0.5
    assert np.max(np.abs(R[:-1][inside])) == pytest.approx(DAMPING, abs=1e-6)
    assert np.abs(R[-1]) > 1
    # R is optimal: it reaches ±η with alternating sign s - 3 times.
    touching = R[:-1][inside & (np.abs(R[:-1]) > DAMPING - 1e-3)]
    assert 1 + np.count_nonzero(np.diff(np.sign(touching))) == stages - 3
    # The rest of a stiff mode is not magnified in the error and the dense output.
    v = np.stack([P - 1, *(z * Yi for Yi in Y[:4])])[:, :-1]
    assert np.max(np.abs(m.error @ v)) < 10
    assert np.max(np.abs(0.5 ** np.arange(1, 5) @ m.dense @ v)) < 3


def test_family():
    methods = family(60)
    assert methods.stages[0] == 5
    assert methods.stages[-1] == 60
    assert np.all(np.diff(methods.length) > 0)
    row = list(methods.stages).index(20)
    np.testing.assert_array_equal(methods.mu[row, :16], method(20).mu)
    assert methods.length[-1] > 0.35 * 60**2


#
# In plain diffrax
#


def coupled(t, y, args):
    """An equation that is neither linear nor autonomous: a = exp(sin t), b = 1/a."""
    a, b = y["a"], y["b"]
    return {"a": a * jnp.cos(t), "b": -(b**2) * a * jnp.cos(t)}


def coupled_exactly(ts):
    a = np.exp(np.sin(ts))
    return {"a": a, "b": 1 / a}


START = {"a": jnp.array(1.0), "b": jnp.array(1.0)}


def test_order_of_convergence():
    ts = np.linspace(0.0, 2.0, 334)

    def stiffened(t, y, args):
        """With an additional stiff component at rest, which requires twelve stages."""
        return {**coupled(t, y, args), "idle": -args * y["idle"]}

    @jax.jit
    def solve(h):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(stiffened),
            ROCK4(),
            0.0,
            2.0,
            h,
            {**START, "idle": jnp.array(0.0)},
            40.0 / h,
            saveat=diffrax.SaveAt(ts=jnp.asarray(ts)),
        )

    errors, between = [], []
    for steps in (20, 40, 80):
        solution = solve(2.0 / steps)
        error = np.abs(solution.ys["b"] - coupled_exactly(ts)["b"])
        errors.append(error[-1])
        between.append(np.max(error))
    assert np.all(np.abs(np.diff(np.log2(errors)) + 4) < 0.3)
    assert np.all(np.diff(np.log2(between)) < -3.7)


STIFF_SADDLE = np.concatenate(
    [[-1.0, -0.5, 0.0], np.geomspace(1e-2, 1e2, 20), np.geomspace(2e2, 1e4, 7)]
)


@functools.cache
def quadratic(kind):
    """A quadratic with given eigenvalues in a random basis: its Hessian, a start and
    the exact flow."""
    eigenvalues = {"saddle": STIFF_SADDLE, "bowl": np.geomspace(1e-3, 1e3, 30)}[kind]
    n = len(eigenvalues)
    Q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(n, n)))
    H = jnp.asarray(Q @ np.diag(eigenvalues) @ Q.T)
    modes = np.where(eigenvalues < 0, 1e-3, 1.0)

    def exact(ts):
        return (np.exp(-np.outer(ts, eigenvalues)) * modes) @ Q.T

    return H, jnp.asarray(Q @ modes), exact


def linear(t, y, H):
    return -(H @ y)


@functools.partial(jax.jit, static_argnames=("vector_field", "solver"))
def solve(vector_field, start, ts, rtol, t1, solver, args=None):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(vector_field),
        solver,
        0.0,
        t1,
        None,
        start,
        args,
        saveat=diffrax.SaveAt(ts=ts),
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=1e-3 * rtol),
        max_steps=20_000,
    )


@pytest.mark.parametrize("rtol", [1e-4, 1e-6, 1e-8, 1e-10])
@pytest.mark.parametrize(("kind", "t1"), [("saddle", 10.0), ("bowl", 300.0)])
def test_to_tolerance_along_the_whole_trajectory(kind, t1, rtol):
    """Eigenvalues of the Jacobian from -1e4 to +1, and from -1e3 to -1e-3."""
    H, start, exact = quadratic(kind)
    ts = np.append(0.0, np.geomspace(1e-5 * t1, t1, 200))
    solution = solve(linear, start, jnp.asarray(ts), rtol, t1, ROCK4(), H)
    expected = exact(ts)
    error = np.max(np.abs(solution.ys - expected))
    assert error < 10 * rtol * np.max(np.abs(expected))
    if rtol == 1e-4:  # a classical explicit method takes 30,000 and 90,000
        assert solution.stats["num_steps"] < 500


def test_the_reference_flow_is_scipys(reference, weights):
    """The flow passes condensation and focus, and its parameters are a pytree."""
    params, ts = reference.init(), np.linspace(0.0, 300.0, 61)
    pi = oracles.REFERENCE_LAW
    exact = oracles.scipy_flow(pi, oracles.sticky(pi, 0.5), weights(params), ts)
    for rtol in (1e-4, 1e-6, 1e-8):
        ys = solve(descent, params, jnp.asarray(ts), rtol, 300.0, ROCK4(), reference).ys
        found = np.concatenate(
            [getattr(ys, n).reshape(len(ts), -1) for n in oracles.SHAPES], 1
        )
        assert np.max(np.abs(found - exact)) < 10 * rtol * np.max(np.abs(exact))


def descent(t, y, loss):
    return jax.tree.map(jnp.negative, jax.grad(loss)(y))


def test_dense_events_and_pytrees():
    """The event a = 2 is located on the dense output."""
    ts = jnp.linspace(0.0, 0.7, 33)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(coupled),
        ROCK4(),
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
    for name, expected in coupled_exactly(np.asarray(ts)).items():
        np.testing.assert_allclose(solution.ys[name][:33], expected, atol=1e-6)
        np.testing.assert_allclose(dense[name], solution.ys[name][:33], atol=1e-12)


def test_vmap():
    H, start, exact = quadratic("saddle")
    scales = jnp.array([1.0, 2.0, 0.5])
    ts = jnp.array([2.0])
    batched = jax.vmap(
        lambda s: solve(linear, s * start, ts, 1e-6, 2.0, ROCK4(), H).ys[0]
    )(scales)
    expected = np.asarray(scales)[:, None] * exact(np.array([2.0]))
    np.testing.assert_allclose(batched, expected, atol=1e-5)


def test_time_may_run_backwards():
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(coupled),
        ROCK4(),
        2.0,
        0.0,
        None,
        jax.tree.map(jnp.asarray, coupled_exactly(2.0)),
        stepsize_controller=diffrax.PIDController(rtol=1e-8, atol=1e-10),
    )
    np.testing.assert_allclose(solution.ys["b"], 1.0, rtol=1e-7)


def test_fields_without_a_jacobian():
    for constant in (0.0, 1.0):
        ys = solve(unvarying, jnp.zeros(3), jnp.ones(1), 1e-8, 1.0, ROCK4(), constant)
        np.testing.assert_allclose(ys.ys[0], constant, rtol=1e-12)


def unvarying(t, y, constant):
    return constant + 0 * y


#
# The choice of stages
#


def steps_of(solver, eigenvalue, lengths):
    """Direct steps of these lengths for a field with eigenvalues from 0 to -eigenvalue
    that counts its calls. Returns the state, the error, the solver's state and the
    number of calls of each step."""
    calls = []

    def vector_field(t, y, args):
        jax.debug.callback(lambda: calls.append(None))
        return -jnp.linspace(0.0, eigenvalue, 8) * y

    @jax.jit
    def step(t0, t1, y, state):
        return solver.step(term, t0, t1, y, None, state, made_jump=False)

    term = diffrax.ODETerm(vector_field)
    t, y = 0.0, jnp.linspace(1.0, 2.0, 8)
    state = solver.init(term, t, t + lengths[0], y, None)
    out = []
    for h in lengths:
        calls.clear()
        y, error, _, state, _ = step(t, t + h, y, state)
        jax.effects_barrier()
        t = t + h
        out.append((y, error, state, len(calls)))
    return out


def test_work_is_counted_exactly():
    lengths = [0.01, 0.01, 0.1, 1.0, 10.0]
    steps = steps_of(ROCK4(counts_work=True), 100.0, lengths)
    for _, error, _, calls in steps:
        assert int(error.work.evaluations) == calls
        assert int(error.work.hessian_products) == 0
    # All steps but the first reuse its spectral radius, so they evaluate only stages.
    methods = family(150)
    for h, (*_, calls) in zip(lengths[1:], steps[1:], strict=True):
        fewest = methods.stages[np.searchsorted(methods.length, 100.0 * h)]
        assert fewest <= calls <= 1.2 * fewest + 1


def test_spectral_radius():
    steps = steps_of(ROCK4(refresh_every=1), 100.0, [0.1, 0.1, 0.1, 0.05])
    for _, _, state, _ in steps:
        assert 100 / SAFETY < float(state.radius) < 100 * (1 + 1e-6)
    # The eigenvector of one estimate is a good start for the next.
    calls = [calls for *_, calls in steps]
    assert max(calls[1:]) < calls[0]
    # A step shorter than the last, as after a rejection, starts a new estimate.
    *_, same, shorter = steps_of(ROCK4(refresh_every=10), 100.0, [0.1, 0.1, 0.09])
    assert int(same[2].age) == 2
    assert int(shorter[2].age) == 1


def test_a_step_that_needs_too_many_stages_is_rejected():
    short, long = steps_of(ROCK4(max_stages=10), 100.0, [0.2, 1.0])
    assert np.all(np.isfinite(short[1]))
    assert np.all(np.isinf(long[1]))
    np.testing.assert_array_equal(short[0], long[0])
    H, start, exact = quadratic("saddle")
    ts = np.linspace(0.0, 0.5, 9)
    solution = solve(linear, start, jnp.asarray(ts), 1e-4, 0.5, ROCK4(max_stages=10), H)
    assert np.max(np.abs(solution.ys - exact(ts))) < 1e-3
    # 32.4 is the length of the interval of ten stages.
    assert solution.stats["num_accepted_steps"] > 0.5 * 1e4 / 32.5
    with pytest.raises(ValueError, match="`max_stages` must be at least 5, got 4"):
        ROCK4(max_stages=4)


def test_a_step_that_overflows_is_rejected():
    term = diffrax.ODETerm(lambda t, y, args: -(y**15))
    solver, start = ROCK4(), jnp.array([1e2])
    state = solver.init(term, 0.0, 1e-20, start, None)
    state = eqx.tree_at(lambda s: (s.radius, s.age), state, (jnp.array(0.0), 0))
    y, error, *_ = solver.step(term, 0.0, 1e-10, start, None, state, made_jump=False)
    assert np.all(np.isinf(error))
    np.testing.assert_array_equal(y, start)
