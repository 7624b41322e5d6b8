"""Equal heads, and their separation, against the flow of all heads and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import gradflow
from gradflow import (
    AllContexts,
    HighOrderChain,
    PositionalHeads,
    Problem,
    SymmetricHeads,
    TensorFactorisation,
)
from gradflow.landscape import linearised_along


def target(features=3, positions=6, patterns=3, ratio=1.7):
    """Orthonormal columns of geometric importance at the first positions."""
    G = np.zeros((features, positions))
    G[:patterns, :patterns] = np.diag(ratio ** -np.arange(patterns, dtype=float))
    return G


def problems():
    chain = HighOrderChain.random(3, (1, 1), seed=3, scale=2.0)
    return {
        "scores": TensorFactorisation(target(), 3, "scores"),
        "replicator": TensorFactorisation(target(), 3, "replicator"),
        "chain": Problem(PositionalHeads(3, 2, 2), AllContexts(chain)),
    }


@pytest.mark.parametrize("kind", ["scores", "replicator", "chain"])
def test_the_quotient_is_the_flow_of_equal_heads(kind):
    """One head and its copies against all heads, while rounding keeps them equal."""
    problem = problems()[kind]
    one = SymmetricHeads(problem)
    start = one.init(seed=1, scale=0.3)
    ts = np.linspace(0.0, 30.0, 31)
    flow = gradflow.integrate(one, start, 30.0, ts=ts)
    whole = gradflow.integrate(problem, one.expand(start), 30.0, ts=ts)
    for a, b in zip(
        jax.tree.leaves(one.expand(flow.params)),
        jax.tree.leaves(whole.params),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=2e-7)
    np.testing.assert_allclose(flow.loss, whole.loss, atol=1e-9)
    assert flow.certificate.energy_imbalance < 1e-7
    np.testing.assert_allclose(flow.observables["head_overlap"], 1.0, atol=1e-12)


@pytest.mark.parametrize("geometry", ["scores", "replicator"])
def test_equal_heads_stay_equal(geometry):
    """All heads, to t = 1e3."""
    problem = TensorFactorisation(target(positions=40), 3, geometry)
    start = SymmetricHeads(problem).expand(SymmetricHeads(problem).init(0, 1e-2))
    flow = gradflow.integrate(problem, start, 1e3)
    assert np.max(np.abs(flow.observables["head_overlap"] - 1)) < 1e-9


@pytest.mark.parametrize("kind", ["scores", "replicator", "chain"])
def test_a_deviation_follows_the_linearisation(kind):
    """Against SciPy on the flow and its variation together, written with jvp."""
    problem = problems()[kind]
    one = SymmetricHeads(problem)
    reference = gradflow.integrate(one, one.init(0, 0.1), 200.0, rtol=1e-10)

    rng = np.random.default_rng(0)
    delta0 = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape)), problem.init(0, 0.1)
    )
    ts = np.array([0.0, 1.0, 10.0, 60.0, 200.0])
    found = linearised_along(
        problem, lambda t: one.expand(reference.at(t)), delta0, ts, rtol=1e-8
    )

    start, back = jax.flatten_util.ravel_pytree(one.expand(one.init(0, 0.1)))
    n = start.size

    def field(y):
        params = back(y)
        gradient = jax.grad(problem)(params)
        velocity = problem.velocity(params, gradient)
        return jax.flatten_util.ravel_pytree(velocity)[0]

    both = jax.jit(lambda z: jnp.concatenate(jax.jvp(field, (z[:n],), (z[n:],))))
    z0 = np.concatenate([start, jax.flatten_util.ravel_pytree(delta0)[0]])
    exact = solve_ivp(
        lambda _, z: np.asarray(both(z)),
        (0, 200.0),
        z0,
        "LSODA",
        t_eval=ts,
        rtol=1e-11,
        atol=1e-13,
    ).y.T[:, n:]
    rows = jax.vmap(lambda p: jax.flatten_util.ravel_pytree(p)[0])(found)
    for a, b in zip(rows, exact, strict=True):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize("geometry", ["scores", "replicator"])
def test_the_time_of_separation_is_that_of_the_linearisation(geometry):
    """The time at which the attention of the heads differs by 0.02, within 5 %. At 0.1
    nonlinear terms already shift the time by 7 to 9 %."""
    problem = TensorFactorisation(target(positions=8), 3, geometry)
    one = SymmetricHeads(problem)
    apart = 0.02

    def spread(attention):
        middle = attention.mean(axis=-2, keepdims=True)
        return np.max(np.abs(attention - middle), axis=(-2, -1))

    for scale in (1e-3, 1e-5):
        start = problem.init(seed=0, scale=scale)
        flow = gradflow.integrate(problem, start, 2e3)
        (first, *_) = gradflow.find_events(
            flow, lambda p: jnp.max(jnp.abs(deviation(problem.attention(p)))) - apart
        )
        middle = one.average(start)
        reference = gradflow.integrate(one, middle, 2e3)
        delta0 = jax.tree.map(lambda a, b: a - b, start, one.expand(middle))
        ts = np.linspace(1.0, 1.2 * first.t, 400)
        delta = linearised_along(
            problem, lambda t, at=reference.at: one.expand(at(t)), delta0, ts
        )
        symmetric = one.expand(reference.at(ts))
        attention = jax.vmap(lambda p, v: jax.jvp(problem.attention, (p,), (v,))[1])(
            symmetric, jax.tree.map(jnp.asarray, delta)
        )
        size = spread(np.asarray(attention))
        predicted = ts[int(np.argmax(size > apart))]
        assert predicted == pytest.approx(first.t, rel=0.05)


def deviation(attention):
    return attention - attention.mean(axis=0, keepdims=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SymmetricHeads(3), "problem with several heads, .* got int"),
        (
            lambda: linearised_along(
                lambda x: x @ x,
                lambda t: jnp.full((len(t), 2), jnp.nan),
                jnp.ones(2),
                [1.0],
            ),
            "`reference` must be finite",
        ),
        (
            lambda: SymmetricHeads(problems()["scores"]).check(
                problems()["scores"].init()
            ),
            "one head",
        ),
        (
            lambda: linearised_along(
                problems()["scores"], 3, problems()["scores"].init(), [1.0]
            ),
            "`reference` must be a Flow or a function",
        ),
        (
            lambda: linearised_along(
                lambda x: x @ x, lambda t: jnp.zeros((len(t), 2)), jnp.zeros(2), [1.0]
            ),
            "`perturbation` must not be zero",
        ),
        (
            lambda: linearised_along(
                lambda x: x @ x, lambda t: jnp.zeros((len(t), 3)), jnp.ones(2), [1.0]
            ),
            "of the shapes of `perturbation`",
        ),
        (
            lambda: linearised_along(
                lambda x: x @ x, lambda t: jnp.zeros((len(t), 2)), jnp.ones(2), [-1.0]
            ),
            "must not be negative",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
