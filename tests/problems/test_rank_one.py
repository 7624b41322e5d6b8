"""The rank-one reduction: against the ODE of theory.md, and beside the full flow."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from scipy.integrate import solve_ivp
from scipy.optimize import minimize

import gradflow
from gradflow import (
    FiniteContext,
    Flow,
    InfiniteContext,
    MarkovChain,
    OneLayerParameters,
    OneLayerTransformer,
    Problem,
    RankOneParameters,
    RankOneProblem,
    plotting,
)

PI = oracles.REFERENCE_LAW
# Neither reversible nor sticky: G_Φ is far from symmetric.
CROOKED = MarkovChain.random([0.5, 0.3, 0.15, 0.05], seed=1)
# One solver for all flows here, and that which compiles fastest.
SOLVER = "tsit5"


@pytest.fixture(scope="module")
def problem(reference_chain):
    return Problem(OneLayerTransformer(4, 3, 2), InfiniteContext(reference_chain))


@pytest.fixture(scope="module")
def reduction(problem):
    return RankOneProblem(problem.population)


@pytest.fixture(scope="module")
def full(problem):
    """Through condensation, focus and dilution, until a new direction opens."""
    ts = np.append(0.0, np.geomspace(1.0, 500.0, 30))
    start = problem.init(seed=1, scale=1e-4)
    return gradflow.integrate(
        problem, start, 500.0, ts=ts, solver=SOLVER, rtol=1e-9, observables=()
    )


@pytest.fixture(scope="module")
def comparison(full):
    return gradflow.compare_rank_one(full)


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


def test_observables(comparison):
    flow = comparison.reduced
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
        "loss": loss,
        "excess_loss": loss - PI @ [oracles.entropy(row) for row in P],
        "speed": flow.speed[i],
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
    assert flow.problem.floor == pytest.approx(0.553611, abs=1e-6)


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


def test_the_manifold_is_invariant(problem, reduction):
    """A full flow that starts on it stays on it and is the reduced flow."""
    start = RankOneParameters(
        gamma=jnp.array([1.9, 0.5, 0.13, 0.03]),
        beta=jnp.array([1.0, 0.3, -0.4, -0.9]),
        q=jnp.array(0.1),
        k=jnp.array(0.12),
    )
    alpha, alpha_bar = np.array([2.0, -1.0, 0.5]), np.array([-1.0, 3.0])
    ts = np.linspace(0.0, 150.0, 16)
    options = {"ts": ts, "solver": SOLVER, "rtol": 1e-9}
    wide = gradflow.integrate(
        problem,
        reduction.embed(start, 3, 2, alpha, alpha_bar),
        150.0,
        observables=(),
        **options,
    )
    narrow = gradflow.integrate(reduction, start, 150.0, **options)
    embedded = reduction.embed(narrow.params, 3, 2, alpha, alpha_bar)
    np.testing.assert_allclose(stacked(wide.params), stacked(embedded), atol=3e-8)
    assert narrow.params.gamma[-1, 3] < -0.3 < 0.03  # through dilution
    assert float(reduction.distance(wide.final)) < 1e-9
    # In one call, from its very start.
    both = gradflow.compare_rank_one(wide)
    assert both.start == 0
    assert both.distance.max() < 1e-7
    assert both.parted == {0.01: None, 0.1: None}
    assert "apart by 10 %    at no time" in str(both)


def test_a_saved_flow_comes_back_whole(comparison, tmp_path):
    flow = comparison.reduced
    loaded = Flow.load(flow.save(tmp_path / "reduced.npz"))
    assert isinstance(loaded.problem, RankOneProblem)
    assert isinstance(loaded.params, RankOneParameters)
    np.testing.assert_array_equal(stacked(loaded.params), stacked(flow.params))
    final = jax.tree.map(jnp.asarray, loaded.final)
    assert float(loaded.problem(final)) == pytest.approx(flow.loss[-1], rel=1e-14)
    t = float(flow.ts[7] + flow.ts[8]) / 2
    np.testing.assert_allclose(flat(loaded.at(t)), flat(flow.at(t)), atol=1e-7)


#
# Side by side
#


def numpy_distance(state, comparison, t):
    """‖θ - θ'‖/‖θ‖ at time t, in NumPy from the reduced numbers."""
    p, a = comparison.reduced.at(t - comparison.start), comparison.alpha
    both = np.outer(a, comparison.alpha_bar)
    embedded = OneLayerParameters(
        W0=np.outer(p.gamma, a), WQ=p.q * both, WK=p.k * both, W1=np.outer(a, p.beta)
    )
    theta = flat(state)
    return np.linalg.norm(theta - flat(embedded)) / np.linalg.norm(theta)


def test_the_reduction_follows_the_full_flow_until_a_direction_opens(comparison):
    c = comparison
    assert c.times[0] == c.start
    assert c.times[-1] == 500
    assert len(c.times) >= 200
    early, late = c.parted[0.01], c.parted[0.1]
    assert early is not None
    assert late is not None
    assert c.start + 100 < early < late < 500
    following = c.times < early
    # Most of the distance is what is off the manifold, which no reduction can have.
    assert np.max(c.distance[following] / c.off_manifold[following]) < 1.2
    assert np.all(c.distance >= c.off_manifold * (1 - 1e-9))
    for ours, theirs in [
        (c.full_gamma, c.reduced_gamma),
        (c.full_attention, c.reduced_attention),
        (c.full_loss, c.reduced_loss),
    ]:
        np.testing.assert_allclose(ours[following], theirs[following], atol=1e-4)
    # Then the full flow goes where the reduction cannot.
    assert c.full_loss[-1] < c.reduced_loss[-1] - 0.003


def test_dilution(comparison):
    """Frequent and rare embeddings move in opposite senses, the rare lose focus."""
    gamma, attention = comparison.reduced_gamma, comparison.reduced_attention
    assert np.all(np.diff(gamma[:, 0]) > 0)
    assert np.all(gamma[-1, 1:] < gamma[0, 1:] - 0.5)
    assert np.all(gamma[0] > 0)
    assert np.all(gamma[-1, 1:] < 0)
    assert attention[-1, 0] > 0.999
    # The peaks of theory.md.
    np.testing.assert_allclose(
        attention.max(axis=0)[1:], [0.773, 0.754, 0.751], atol=2e-3
    )
    assert np.all(attention[-1, 1:] < 0.5)


def test_what_is_compared(comparison, full, problem):
    c, t = comparison, 321.0
    i = int(np.argmin(np.abs(c.times - t)))
    t = float(c.times[i])
    state = full.at(t)
    assert c.distance[i] == pytest.approx(numpy_distance(state, c, t), rel=1e-9)
    assert c.full_loss[i] == pytest.approx(float(problem(state)), rel=1e-12)
    np.testing.assert_allclose(
        c.full_attention[i], problem.observables["attention"](state)[:, 0], rtol=1e-12
    )
    np.testing.assert_allclose(c.full_gamma[i], np.asarray(state.W0) @ c.alpha)
    np.testing.assert_allclose(c.reduced_loss, c.reduced.loss, rtol=1e-14)
    np.testing.assert_allclose(c.reduced_gamma, c.reduced.params.gamma)
    np.testing.assert_allclose(
        c.reduced_attention, c.reduced.observables["attention"][:, :, 0], rtol=1e-12
    )
    settings = c.reduced.settings
    assert (settings.solver, settings.rtol) == (SOLVER, 1e-9)
    assert settings.atol == full.settings.atol
    np.testing.assert_allclose(c.reduced.ts, c.times - c.start, rtol=1e-12)


def test_parting_is_located_between_times(comparison, full):
    for threshold in (0.01, 0.1, 0.03):
        t = comparison.parts_at(threshold)
        found = numpy_distance(full.at(t), comparison, t)
        assert found == pytest.approx(threshold, rel=1e-6)
        assert t not in comparison.times
    assert comparison.parts_at(0.01) == comparison.parted[0.01]
    assert comparison.parts_at(2.0) is None
    assert comparison.parts_at(1e-9) == comparison.start


def test_it_starts_nearest_to_the_manifold(comparison, full, reduction):
    """By a finer scan than the saved times, each of which is farther."""

    def off(t):
        state = full.at(float(t))
        return float(reduction.distance(state)), float(
            reduction.attention_distance(state)
        )

    here, attention = off(comparison.start)
    assert attention == pytest.approx(comparison.attention_off_manifold, rel=1e-9)
    assert attention < 0.1
    assert comparison.start not in full.ts
    around = comparison.start * np.linspace(0.8, 1.2, 21)
    for t in [*around, *full.ts[1:]]:
        distance, attention = off(t)
        assert attention > 0.1 or distance >= here * (1 - 1e-7)


def test_a_window_of_ones_own(full):
    c = gradflow.compare_rank_one(full, start=100.0, end=150.0)
    assert (c.start, c.times[0], c.times[-1]) == (100, 100, 150)
    assert c.parted == {0.01: None, 0.1: None}
    assert c.reduced.ts[-1] == 50


def test_printed(comparison):
    lines = str(comparison).splitlines()
    assert lines[0] == (
        f"Rank-one reduction from t = {comparison.start:.6g} to t = 500 "
        "(10 numbers for 36)"
    )
    assert f"apart by 1 %     at t = {comparison.parted[0.01]:.6g}" in lines
    assert f"apart by 10 %    at t = {comparison.parted[0.1]:.6g}" in lines
    assert max(map(len, lines)) <= 100


#
# What is refused
#


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: RankOneProblem(3), "`population` must be a gradflow population"),
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


def test_flows_that_cannot_be_compared(full, comparison):
    with pytest.raises(ValueError, match="`flow` must be a Flow, got int"):
        gradflow.compare_rank_one(3)
    with pytest.raises(ValueError, match=r"OneLayerTransformer.*is a RankOneProblem"):
        gradflow.compare_rank_one(comparison.reduced)
    bare = dataclasses.replace(full, problem=None)
    with pytest.raises(ValueError, match=r"compare_rank_one` needs the loss"):
        gradflow.compare_rank_one(bare)
    nameless = full.settings._replace(solver="own")
    unknown = dataclasses.replace(full, settings=nameless, solver=None)
    with pytest.raises(ValueError, match=r"by 'own'.*Flow\.load\(path, solver="):
        gradflow.compare_rank_one(unknown)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"end": 501.0}, "`end` must lie within the flow, which ends at 500, got 501"),
        ({"end": -1.0}, "`end` must be a positive number"),
        ({"start": 500.0}, "`start` must lie before the end of the comparison, 500"),
        ({"start": 9.0, "end": 9.0}, "`start` must lie before .* 9, got 9"),
        ({"start": float("nan")}, "`start` must be a finite number"),
        ({"end": 30.0}, "`start` must be given: .*WQ and WK of this flow are never"),
    ],
)
def test_windows_that_are_refused(full, window, message):
    with pytest.raises(ValueError, match=message):
        gradflow.compare_rank_one(full, **window)


#
# The figure
#


def test_figure(comparison):
    c = comparison
    figure = plotting.plot_rank_one(c)
    loss, distance, embeddings, attention = figure.axes
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == [
        "(a) Loss",
        "(b) Distance",
        "(c) Embeddings",
        "(d) Attention",
    ]
    full_lines = [line.get_ydata() for line in loss.lines[:2]]
    np.testing.assert_array_equal(full_lines, [c.full_loss, c.reduced_loss])
    assert distance.get_yscale() == "log"
    np.testing.assert_array_equal(distance.lines[0].get_ydata(), c.distance)
    np.testing.assert_array_equal(distance.lines[1].get_ydata(), c.off_manifold)
    for ax, ours, theirs in [
        (embeddings, c.full_gamma, c.reduced_gamma),
        (attention, c.full_attention, c.reduced_attention),
    ]:
        drawn = np.array([line.get_ydata() for line in ax.lines[:8]])
        np.testing.assert_array_equal(drawn[::2], ours.T)
        np.testing.assert_array_equal(drawn[1::2], theirs.T)
        assert all(line.get_linestyle() == "--" for line in ax.lines[1:8:2])
    for ax in figure.axes:
        assert ax.get_xscale() == "log"
        assert ax.get_xlim() == (c.times[0], c.times[-1])
        dotted = [
            x
            for line in ax.lines
            if line.get_linestyle() == ":"
            for x in line.get_xdata()[:1]
        ]
        assert dotted == list(c.parted.values())
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[0] == r"0  ($\pi$ = 0.75)"
    assert names[-2:] == ["rank-one reduction", "apart by 1 %, 10 %"]


@pytest.fixture
def many(comparison):
    """Ten tokens with long names, whose curves are made up."""
    law = np.arange(10.0, 0.0, -1.0) / 55
    chain = MarkovChain.sticky(
        law, 0.5, labels=[f"token number {i}" for i in range(10)]
    )
    problem = Problem(OneLayerTransformer(10, 2), InfiniteContext(chain))
    curves = np.random.default_rng(0).uniform(size=(4, len(comparison.times), 10))
    names = ("full_gamma", "reduced_gamma", "full_attention", "reduced_attention")
    return dataclasses.replace(
        comparison,
        full=dataclasses.replace(comparison.full, problem=problem),
        **dict(zip(names, curves, strict=True)),
    )


@pytest.mark.parametrize("which", ["comparison", "many"])
def test_figure_clips_and_overlaps_nothing(which, request):
    figure = plotting.plot_rank_one(request.getfixturevalue(which))
    figure.draw_without_rendering()
    canvas = figure.bbox.padded(1)
    legend = figure.legends[0].get_window_extent()
    assert canvas.x0 <= legend.x0 < legend.x1 <= canvas.x1
    for ax in figure.axes:
        box = ax.get_tightbbox()
        assert canvas.x0 <= box.x0 < box.x1 <= canvas.x1
        assert canvas.y0 <= box.y0 < box.y1 <= canvas.y1
        assert not box.overlaps(legend)
        shown = [
            label.get_window_extent()
            for label in ax.get_xticklabels(which="both")
            if label.get_text() and ax.bbox.x0 <= label.get_window_extent().x1
        ]
        shown.sort(key=lambda b: b.x0)
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(shown))


def test_figure_of_many_tokens_shows_the_most_frequent(many):
    figure = plotting.plot_rank_one(many)
    assert figure.axes[2].get_title(loc="left") == (
        "(c) Embeddings (8 most frequent of 10)"
    )
    assert len(figure.legends[0].get_texts()) == 8 + 2
    drawn = [line.get_ydata() for line in figure.axes[2].lines[:16:2]]
    np.testing.assert_array_equal(drawn, many.full_gamma.T[:8])
    for ax in figure.axes[2:]:  # a dashed line is seen on every solid one
        pairs = zip(ax.lines[:16:2], ax.lines[1:16:2], strict=True)
        assert all(to_rgba(a.get_color()) != to_rgba(b.get_color()) for a, b in pairs)


def test_figure_in_a_figure_of_ones_own(comparison):
    own = Figure(figsize=(9, 7))
    assert plotting.plot_rank_one(comparison, own) is own
    assert len(own.axes) == 4
    assert own.axes[3].get_legend() is not None  # no layout makes room for it outside
    left, _ = Figure(layout="constrained").subfigures(1, 2)
    assert plotting.plot_rank_one(comparison, left) is left
    assert len(left.legends) == 1
