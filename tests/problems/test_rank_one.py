"""The rank-one reduction: against the ODE of theory.md and the full flow."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from scipy.integrate import solve_ivp
from scipy.optimize import minimize

import gradflow
from gradflow import (
    FiniteContext,
    Flow,
    InfiniteContext,
    MarkovChain,
    OneLayerTransformer,
    Problem,
    RankOneParameters,
    RankOneProblem,
)

PI = oracles.REFERENCE_LAW
# Neither reversible nor sticky: G_Φ is far from symmetric.
CROOKED = MarkovChain.random([0.5, 0.3, 0.15, 0.05], seed=1)
# All flows here use the solver that compiles fastest.
SOLVER = "tsit5"


@pytest.fixture(scope="module")
def problem(reference_chain):
    return Problem(OneLayerTransformer(4, 3, 2), InfiniteContext(reference_chain))


@pytest.fixture(scope="module")
def reduction(problem):
    return RankOneProblem(problem.population)


START = RankOneParameters(
    gamma=jnp.array([1.9, 0.5, 0.13, 0.03]),
    beta=jnp.array([1.0, 0.3, -0.4, -0.9]),
    q=jnp.array(0.1),
    k=jnp.array(0.12),
)
OPTIONS = {"ts": np.linspace(0.0, 150.0, 16), "solver": SOLVER, "rtol": 1e-9}


@pytest.fixture(scope="module")
def narrow(reduction):
    """A flow of the reduction through dilution."""
    return gradflow.integrate(reduction, START, 150.0, **OPTIONS)


def some_parameters(seed=0, d=4):
    rng = np.random.default_rng(seed)
    gamma = np.abs(rng.normal(size=d))
    return RankOneParameters(
        gamma=jnp.asarray(gamma),
        beta=jnp.asarray(rng.normal(size=d)),
        q=jnp.asarray(0.4),
        k=jnp.asarray(-0.3),
    )


def flat(params):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def stacked(params):
    """Parameters stacked in time as one row a time."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


#
# The flow itself
#


def infinite_loss(chain):
    """L(M, Φ) of theory.md for infinite context."""
    pi, P = jnp.asarray(chain.stationary), jnp.asarray(chain.transition)

    def loss(M, Phi):
        weights = pi[None, :] * jnp.exp(Phi)
        A = weights / jnp.sum(weights, axis=1, keepdims=True)
        Z = A @ M
        log_p = Z - jnp.log(jnp.sum(jnp.exp(Z), axis=1, keepdims=True))
        return -jnp.sum(pi[:, None] * P * log_p)

    return loss


def enumerated_loss(chain, length):
    """L(M, Φ) over all sequences, position by position."""
    pi, P = chain.stationary, chain.transition
    x = np.array(list(itertools.product(range(chain.size), repeat=length)))
    p = pi[x[:, 0]] * np.prod(P[x[:, :-1], x[:, 1:]], axis=1)
    targets = jnp.asarray(P[x[:, -1]])

    def loss(M, Phi):
        weights = jnp.exp(Phi[x[:, -1:], x])
        a = weights / jnp.sum(weights, axis=1, keepdims=True)
        Z = jnp.einsum("st,sty->sy", a, M[x])
        log_p = Z - jnp.log(jnp.sum(jnp.exp(Z), axis=1, keepdims=True))
        return -jnp.sum(jnp.asarray(p)[:, None] * targets * log_p)

    return loss


def field_of(loss, d):
    """γ̇ = -G_M β - qk(G_Φ + G_Φᵀ)γ, β̇ = -G_Mᵀγ, q̇ = -k γᵀG_Φγ, k̇ = -q γᵀG_Φγ."""
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))

    def field(_, y):
        gamma, beta, q, k = y[:d], y[d : 2 * d], y[-2], y[-1]
        M, Phi = np.outer(gamma, beta), q * k * np.outer(gamma, gamma)
        G_M, G_Phi = map(np.asarray, gradients(M, Phi))
        focus = gamma @ G_Phi @ gamma
        return np.concatenate(
            [
                -G_M @ beta - q * k * (G_Phi + G_Phi.T) @ gamma,
                -G_M.T @ gamma,
                [-k * focus, -q * focus],
            ]
        )

    return field


@pytest.mark.parametrize(
    ("population", "loss"),
    [
        (InfiniteContext(CROOKED), infinite_loss(CROOKED)),
        (FiniteContext(CROOKED, 4), enumerated_loss(CROOKED, 4)),
    ],
    ids=["infinite", "finite"],
)
def test_loss_and_gradient_are_those_of_the_explicit_ode(population, loss):
    reduction, field = RankOneProblem(population), field_of(loss, 4)
    gradient = jax.jit(jax.value_and_grad(reduction))
    for seed in range(3):
        p = some_parameters(seed)
        M, Phi = np.outer(p.gamma, p.beta), p.q * p.k * np.outer(p.gamma, p.gamma)
        value, slope = gradient(p)
        assert float(value) == pytest.approx(float(loss(M, Phi)), rel=1e-14)
        np.testing.assert_allclose(-flat(slope), field(0.0, flat(p)), atol=1e-14)


def test_the_flow_is_that_of_the_explicit_ode():
    """The whole trajectory, by SciPy, through much of what it does."""
    start, ts = some_parameters(), np.linspace(0.0, 60.0, 13)
    flow = gradflow.integrate(
        RankOneProblem(InfiniteContext(CROOKED)),
        start,
        60.0,
        ts=ts,
        solver=SOLVER,
        rtol=1e-9,
    )
    field = field_of(infinite_loss(CROOKED), 4)
    expected = solve_ivp(
        field, (0, 60), flat(start), "DOP853", t_eval=ts, rtol=1e-11, atol=1e-13
    ).y.T
    np.testing.assert_allclose(stacked(flow.params), expected, atol=2e-8)
    assert np.ptp(expected, axis=0).min() > 0.01  # everything moves
    drift = flow.certificate.drift
    assert set(drift) == {"embedding_balance", "attention_balance", "projection_sum"}
    assert max(drift.values()) < 1e-8
    assert flow.certificate.energy_imbalance < 1e-8


def test_conserved_quantities(reduction):
    p = some_parameters()
    terms, sums = reduction.conserved_terms(p), reduction.conserved(p)
    gg, bb = float(p.gamma @ p.gamma), float(p.beta @ p.beta)
    expected = {
        "embedding_balance": [gg, -bb, -0.16, -0.09],
        "attention_balance": [0.16, -0.09],
        "projection_sum": np.asarray(p.beta),
    }
    assert set(terms) == set(sums) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(terms[name], values, rtol=1e-14)
        np.testing.assert_allclose(sums[name], np.sum(values), rtol=1e-13)


def test_observables(narrow):
    flow = narrow
    i = len(flow.ts) // 2
    seen = {name: values[i] for name, values in flow.observables.items()}
    p = jax.tree.map(lambda leaf: leaf[i], flow.params)
    A = PI * np.exp(p.q * p.k * np.outer(p.gamma, p.gamma))
    A /= A.sum(axis=1, keepdims=True)
    P = oracles.sticky(PI, oracles.REFERENCE_STICKINESS)
    loss = float(
        infinite_loss(flow.problem.population.chain)(
            np.outer(p.gamma, p.beta), p.q * p.k * np.outer(p.gamma, p.gamma)
        )
    )
    entropies = [oracles.entropy(row) for row in A]
    expected = {
        "excess_loss": loss - PI @ [oracles.entropy(row) for row in P],
        "attention": A,
        "attention_mass": PI @ A,
        "attention_entropy": entropies,
        "mean_attention_entropy": PI @ entropies,
        "embedding_coordinates": p.gamma[:, None],
        "embedding_norms": np.abs(p.gamma),
        "singular_values_W0": [np.linalg.norm(p.gamma)],
        "singular_values_W1": [np.linalg.norm(p.beta)],
        "singular_values_QK": [p.q * p.k],
        "alignment": p.gamma @ PI / np.linalg.norm(p.gamma) / np.linalg.norm(PI),
        "focus": p.q * p.k,
    }
    assert set(seen) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(seen[name], value, rtol=1e-11)
    assert flow.loss[i] == pytest.approx(loss, rel=1e-11)
    assert flow.problem.floor == pytest.approx(0.553611, abs=1e-6)


def test_axes_name_every_axis_of_parameters_and_observables(reduction):
    params = reduction.init()
    axes = reduction.axes
    assert axes["gamma"] == axes["beta"] == axes["embedding_norms"] == ("token",)
    arrays = {name: f(params) for name, f in reduction.observables.items()}
    arrays |= {name: getattr(params, name) for name in ("gamma", "beta", "q", "k")}
    assert set(axes) <= set(arrays)
    for name, array in arrays.items():
        assert len(axes.get(name, ())) == np.ndim(array), name


def test_initial_parameters(reduction):
    params = reduction.init(seed=2, scale=0.01)
    reduction.check(params)
    assert 0.003 < np.std(flat(params)) < 0.03
    np.testing.assert_array_equal(flat(params), flat(reduction.init(2, 0.01)))
    assert not np.any(flat(params) == flat(reduction.init(3, 0.01)))


#
# Between the manifold and the full model
#


def test_what_is_embedded_is_projected_back(reduction):
    rng = np.random.default_rng(0)
    params = some_parameters()
    for alpha, alpha_bar in [(None, None), (rng.normal(size=6), rng.normal(size=3))]:
        state = reduction.embed(params, 6, 3, alpha, alpha_bar)
        assert state.WQ.shape == (6, 3)
        np.testing.assert_allclose(flat(reduction.project(state)), flat(params))
        assert float(reduction.distance(state)) < 1e-14
        assert float(reduction.attention_distance(state)) < 1e-14
        wide = Problem(OneLayerTransformer(4, 6, 3), reduction.population)
        assert float(wide(state)) == pytest.approx(float(reduction(params)), rel=1e-14)


def test_signs_are_those_of_the_frequent_token_and_of_q(reduction):
    params = some_parameters()
    other = jax.tree.map(jnp.negative, params)  # the same state, with -α and -ᾱ
    minus = -np.eye(3)[0], -np.eye(2)[0]
    state = reduction.embed(other, 3, 2, minus[0], minus[1])
    back = reduction.project(state)
    assert PI @ back.gamma > 0
    assert back.q > 0
    # α turned round takes γ, β, q and k along, and ᾱ turned round q and k again.
    np.testing.assert_allclose(back.gamma, params.gamma)
    np.testing.assert_allclose(back.beta, params.beta)
    np.testing.assert_allclose([back.q, back.k], [0.4, -0.3])


def test_embedding_a_whole_flow(reduction):
    one, two = some_parameters(0), some_parameters(1)
    both = jax.tree.map(lambda *x: jnp.stack(x), one, two)
    alpha = np.array([1.0, 2.0, 2.0])
    states = reduction.embed(both, 3, 2, alpha)
    for i, params in enumerate((one, two)):
        expected = flat(reduction.embed(params, 3, 2, alpha))
        np.testing.assert_array_equal(stacked(states)[i], expected)
    W0 = np.outer(one.gamma, alpha / 3)
    np.testing.assert_allclose(states.W0[0], W0, rtol=1e-15)


@pytest.mark.parametrize("noise", [1e-3, 0.3])
def test_the_projection_is_the_nearest_rank_one_state(reduction, noise):
    """By SciPy, on all of γ, β, q, k, α and ᾱ, from several starts."""
    rng = np.random.default_rng(5)
    on = reduction.embed(some_parameters(), 3, 2, rng.normal(size=3))
    state = jax.tree.map(lambda w: w + noise * rng.normal(size=w.shape), on)
    theta = flat(state)

    def distance(z):
        gamma, beta, (q, k), alpha, alpha_bar = np.split(z, [4, 8, 10, 13])
        both = np.outer(alpha, alpha_bar)
        parts = (np.outer(gamma, alpha), q * both, k * both, np.outer(alpha, beta))
        return np.sum((theta - np.concatenate([p.ravel() for p in parts])) ** 2)

    alpha, alpha_bar = reduction.directions(state)
    found = np.concatenate([flat(reduction.project(state)), alpha, alpha_bar])
    ours = distance(found)
    starts = [found, *(found + rng.normal(size=15) for _ in range(4))]
    best = min(minimize(distance, z, tol=1e-14).fun for z in starts)
    assert ours == pytest.approx(best, rel=1e-6)
    relative = np.sqrt(ours) / np.linalg.norm(theta)
    assert float(reduction.distance(state)) == pytest.approx(relative, rel=1e-10)


def test_zero_attention_is_not_rank_one(reduction):
    state = reduction.embed(some_parameters(), 3, 2)
    zero = dataclasses.replace(state, WQ=jnp.zeros((3, 2)), WK=jnp.zeros((3, 2)))
    assert float(reduction.distance(zero)) < 1e-14
    assert float(reduction.attention_distance(zero)) == 1


def test_the_manifold_is_invariant(problem, reduction, narrow):
    """A full flow that starts on it stays on it and is the reduced flow."""
    alpha, alpha_bar = np.array([2.0, -1.0, 0.5]), np.array([-1.0, 3.0])
    start = reduction.embed(START, 3, 2, alpha, alpha_bar)
    wide = gradflow.integrate(problem, start, 150.0, observables=(), **OPTIONS)
    embedded = reduction.embed(narrow.params, 3, 2, alpha, alpha_bar)
    np.testing.assert_allclose(stacked(wide.params), stacked(embedded), atol=3e-8)
    assert narrow.params.gamma[-1, 3] < -0.3 < 0.03  # through dilution
    assert float(reduction.distance(wide.final)) < 1e-9


def test_a_saved_flow_comes_back_whole(narrow, tmp_path):
    flow = narrow
    loaded = Flow.load(flow.save(tmp_path / "reduced.npz"))
    assert isinstance(loaded.problem, RankOneProblem)
    assert isinstance(loaded.params, RankOneParameters)
    np.testing.assert_array_equal(stacked(loaded.params), stacked(flow.params))
    final = jax.tree.map(jnp.asarray, loaded.final)
    assert float(loaded.problem(final)) == pytest.approx(flow.loss[-1], rel=1e-14)
    t = float(flow.ts[7] + flow.ts[8]) / 2
    np.testing.assert_allclose(flat(loaded.at(t)), flat(flow.at(t)), atol=1e-7)


#
# What is refused
#


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: RankOneProblem(3), "`population` must be a gradflow population"),
        (
            lambda r: RankOneProblem(
                gradflow.AllContexts(gradflow.HighOrderChain.random(3, (1, 1)))
            ),
            "`population` must be one without positions.*got AllContexts",
        ),
        (lambda r: r.init(seed=-1), "`seed` must be a whole number"),
        (lambda r: r.embed(some_parameters(), 0), "`width` must be a whole number"),
        (lambda r: r.embed({}, 3), "`params` must be RankOneParameters"),
        (lambda r: r.embed(some_parameters(d=3), 3), r"`params.gamma` must have shape"),
        (
            lambda r: r.embed(some_parameters(), 3, 2, np.ones(2)),
            r"`alpha` must have shape \(3,\), got \(2,\)",
        ),
        (
            lambda r: r.embed(some_parameters(), 3, 2, None, np.zeros(2)),
            "`alpha_bar` must not be zero",
        ),
        (lambda r: r.project(some_parameters()), "must be OneLayerParameters"),
        (
            lambda r: r.distance(
                RankOneProblem(InfiniteContext(THREE)).embed(some_parameters(d=3), 5)
            ),
            r"`params.W0` must have shape \(4, 5\), got \(3, 5\)",
        ),
        (
            lambda r: gradflow.integrate(r, some_parameters(d=3), 1.0),
            r"`params.gamma` must have shape \(4,\), got \(3,\)",
        ),
        (
            lambda r: gradflow.integrate(r, r.embed(some_parameters(), 2), 1.0),
            "`params` must be RankOneParameters",
        ),
    ],
)
def test_bad_arguments(reduction, make, message):
    with pytest.raises(ValueError, match=message):
        make(reduction)


THREE = MarkovChain.sticky([0.5, 0.3, 0.2], 0.5)
