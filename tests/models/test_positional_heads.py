"""High-order chains, positional heads, the tensor factorisation: against enumeration,
dense linear algebra and SciPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import gradflow
from gradflow import AllContexts, HighOrderChain, PositionalHeads, Problem

#
# Chains of high order
#


def law_by_hand(A, lags_of_blocks, alphas, context):
    """softmax(Σ_k A_k Σ_i α_i x_{t-i}); `context[i - 1]` is the token at lag i."""
    logits = np.zeros(A.shape[1])
    for matrix, lags, alpha in zip(A, lags_of_blocks, alphas, strict=True):
        for lag, weight in zip(lags, alpha, strict=True):
            logits += weight * matrix[:, context[lag - 1]]
    law = np.exp(logits - logits.max())
    return law / law.sum()


@pytest.mark.parametrize(
    ("options", "lags", "alphas"),
    [
        ({}, [(1, 2), (3, 4)], [(0.5, 0.5)] * 2),
        ({"weights": [7, 3]}, [(1, 2), (3, 4)], [(0.7, 0.3)] * 2),
        ({"stride": 1}, [(1, 2), (2, 3)], [(0.5, 0.5)] * 2),
        ({"weights": [[1, 0], [1, 1]]}, [(1, 2), (3, 4)], [(1, 0), (0.5, 0.5)]),
    ],
)
def test_the_law_of_the_next_token(options, lags, alphas):
    chain = HighOrderChain.random(3, (2, 2), seed=4, scale=2.0, **options)
    contexts = chain.contexts()
    assert chain.num_contexts == len(contexts) == 3**chain.lags
    assert {tuple(c) for c in contexts} == set(
        itertools.product(range(3), repeat=chain.lags)
    )
    expected = [law_by_hand(chain.matrices, lags, alphas, c) for c in contexts]
    np.testing.assert_allclose(chain.next_law(contexts), expected, atol=1e-14)


@pytest.mark.parametrize("d_and_spans", [(2, (1, 1, 1)), (3, (2, 2)), (4, (3,))])
def test_the_stationary_law_is_the_dense_eigenvector(d_and_spans):
    d, spans = d_and_spans
    chain = HighOrderChain.random(d, spans, seed=1, scale=3.0)
    contexts = [tuple(c) for c in chain.contexts()]
    place = {c: i for i, c in enumerate(contexts)}
    P = np.zeros((len(contexts), len(contexts)))
    for c, law in zip(contexts, chain.next_law(chain.contexts()), strict=True):
        for token, probability in enumerate(law):
            P[place[c], place[(token, *c[:-1])]] = probability
    values, vectors = np.linalg.eig(P.T)
    vector = vectors[:, np.argmax(values.real)].real
    np.testing.assert_allclose(chain.stationary, vector / vector.sum(), atol=1e-13)
    assert 0 < chain.entropy_rate < np.log(d)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_stationary_law_of_a_strong_chain_settles(seed):
    """Its iteration goes to and fro by more than a few units in the last place."""
    chain = HighOrderChain.random(3, (1, 1, 1), seed=seed, scale=3.0)
    p, law = chain.stationary, chain.next_law(chain.contexts())
    joint = (p[:, None] * law).reshape(3, 3, 3, 3)
    after = np.moveaxis(joint.sum(axis=2), -1, 0).ravel()
    np.testing.assert_allclose(after, p, atol=1e-14)


def test_sampled_sequences_have_the_stationary_law():
    chain = HighOrderChain.random(3, (1, 1), seed=2, scale=2.0)
    tokens = chain.sample(400, seed=5, sequences=500)
    pairs = 3 * tokens[:, 1:] + tokens[:, :-1]  # the last token first
    seen = np.bincount(pairs.ravel(), minlength=9) / pairs.size
    # About 200,000 tokens, which depend on each other over a few steps.
    np.testing.assert_allclose(seen, chain.stationary, atol=6e-3)


def test_importance_and_restriction():
    chain = HighOrderChain.random(4, (2, 1, 2), ratio=2.0, seed=0)
    norms = np.linalg.norm(chain.matrices, axis=(1, 2))
    np.testing.assert_allclose(norms, [4.0, 2.0, 1.0])
    backwards = HighOrderChain.random(4, (2, 1, 2), ratio=2.0, reverse=True)
    assert list(backwards.importance) == [2, 1, 0]
    orthogonal = HighOrderChain.random(4, (2, 1, 2), orthogonal=True)
    np.testing.assert_allclose(
        orthogonal.matrices[0] @ orthogonal.matrices[0].T, 4 * np.eye(4), atol=1e-12
    )
    one = backwards.restricted(1)
    assert one.lags == backwards.lags == 5
    assert [np.any(A) for A in one.matrices] == [False, False, True]
    np.testing.assert_array_equal(backwards.restricted(3).matrices, backwards.matrices)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: HighOrderChain(np.ones((2, 3)), (1,)),
            "`matrices` must be a stack of square",
        ),
        (lambda: HighOrderChain(np.ones((2, 3, 3)), (1,)), "one entry for each of the"),
        (lambda: HighOrderChain(np.ones((1, 3, 3)), (0,)), "`spans` must be a whole"),
        (lambda: HighOrderChain(np.ones((1, 3, 3)), ()), "at least one block"),
        (lambda: HighOrderChain(np.ones((1, 3, 3)), 2), "`spans` must list"),
        (
            lambda: HighOrderChain(np.ones((1, 3, 3)), (2,), weights=[1, -1]),
            "positive sum",
        ),
        (
            lambda: HighOrderChain(np.ones((1, 3, 3)), (2,), weights=[1, 1, 1]),
            "must be 2 numbers",
        ),
        (
            lambda: HighOrderChain(np.ones((2, 3, 3)), (2, 2), lags=3),
            "`lags` must be a whole number of at least 4",
        ),
        (lambda: HighOrderChain.random(3, (1, 1)).restricted(3), "`k` must be at most"),
        (lambda: HighOrderChain.random(3, (1, 1)).restricted(0), "`k` must be a whole"),
        (
            lambda: HighOrderChain.random(50, (4, 4, 4)).stationary,
            r"50\*\*12 = 244,140,625,000,000,000,000 contexts; the limit",
        ),
        (
            lambda: AllContexts(gradflow.MarkovChain.sticky([0.5, 0.5], 0.5)),
            "`chain` must be a gradflow.HighOrderChain",
        ),
        (lambda: AllContexts(HighOrderChain.random(3, (1,)), "even"), "`law` must be"),
        (lambda: PositionalHeads(3, 4, 0), "`heads` must be a whole number"),
        (
            lambda: Problem(
                PositionalHeads(3, 4, 1), AllContexts(HighOrderChain.random(3, (1, 1)))
            ),
            "sees 4 lags and `population` has windows of 2",
        ),
        (
            lambda: Problem(
                gradflow.OneLayerTransformer(3, 4),
                AllContexts(HighOrderChain.random(3, (1, 1))),
            ),
            "`population` must be one without positions",
        ),
        (
            lambda: gradflow.TensorFactorisation(np.ones(3), 2),
            "`target` must be a matrix of feat",
        ),
        (lambda: gradflow.TensorFactorisation(np.ones((3, 3)), 0), "`heads` must be"),
        (
            lambda: gradflow.TensorFactorisation(np.ones((3, 3)), 1, "flat"),
            "`geometry` must be",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


#
# Heads on all contexts
#


@pytest.mark.parametrize("law", ["stationary", "uniform"])
def test_loss_and_gradient_equal_enumeration(law):
    chain = HighOrderChain.random(3, (2, 2), seed=3, scale=2.0)
    problem = Problem(PositionalHeads(3, 4, 2), AllContexts(chain, law))
    rng = np.random.default_rng(0)
    a, V = rng.normal(size=(2, 4)), rng.normal(size=(2, 3, 3))
    params = gradflow.PositionalHeadsParameters(jnp.asarray(a), jnp.asarray(V))
    s = np.exp(a) / np.exp(a).sum(axis=1, keepdims=True)
    loss, grad_s, grad_V = 0.0, np.zeros_like(s), np.zeros_like(V)
    for index, context in enumerate(itertools.product(range(3), repeat=4)):
        weight = chain.stationary[index] if law == "stationary" else 3**-4
        logits = sum(s[k, i] * V[k, :, context[i]] for k in range(2) for i in range(4))
        student = np.exp(logits) / np.exp(logits).sum()
        lags = [(1, 2), (3, 4)]
        teacher = law_by_hand(chain.matrices, lags, [(0.5, 0.5)] * 2, context)
        loss -= weight * teacher @ np.log(student)
        for k in range(2):
            for i in range(4):
                grad_s[k, i] += weight * (student - teacher) @ V[k, :, context[i]]
                grad_V[k, :, context[i]] += weight * s[k, i] * (student - teacher)
    grad_a = s * (grad_s - np.sum(s * grad_s, axis=1, keepdims=True))
    assert float(problem(params)) == pytest.approx(loss, abs=1e-13)
    gradient = jax.grad(problem)(params)
    np.testing.assert_allclose(gradient.a, grad_a, atol=1e-14)
    np.testing.assert_allclose(gradient.V, grad_V, atol=1e-14)
    if law == "stationary":
        assert problem.floor == pytest.approx(chain.entropy_rate, abs=1e-12)


def test_a_student_learns_its_teacher(tmp_path):
    chain = HighOrderChain.random(3, (1, 1), seed=3, scale=2.0)
    problem = Problem(PositionalHeads(3, 2, 2), AllContexts(chain))
    flow = gradflow.integrate(problem, problem.init(0, 1e-2), 500.0)
    assert max(flow.certificate.drift.values()) < 1e-12
    assert flow.certificate.energy_imbalance < 1e-8
    assert flow.loss[-1] - problem.floor < 1e-2 * (flow.loss[0] - problem.floor)
    seen = flow.observables
    # The last rung is the teacher itself.
    np.testing.assert_allclose(
        seen["ladder"][:, -1], flow.loss - problem.floor, atol=1e-12
    )
    np.testing.assert_array_equal(seen["rung"], 1 + np.argmin(seen["ladder"], axis=1))
    np.testing.assert_allclose(seen["attention_to_blocks"], seen["attention"])
    np.testing.assert_allclose(seen["attention"].sum(axis=2), 1.0)
    loaded = gradflow.Flow.load(flow.save(tmp_path / "heads.npz"))
    assert float(loaded.problem(loaded.final)) == pytest.approx(
        flow.loss[-1], rel=1e-12
    )


#
# The tensor factorisation
#


def target(features=6, positions=40, blocks=3, ratio=1.7, orthogonal=False):
    """Singleton blocks of geometric importance at the first positions."""
    G = np.zeros((features, positions))
    columns = np.random.default_rng(0).normal(size=(features, blocks))
    columns /= np.linalg.norm(columns, axis=0)
    if orthogonal:
        columns = np.linalg.qr(columns)[0]
    G[:, :blocks] = columns * ratio ** -np.arange(blocks)
    return G


@pytest.mark.parametrize("geometry", ["scores", "replicator"])
def test_the_whole_trajectory_equals_scipys(geometry):
    """h = 3, T = 40, to t = 1e4: theory.md's equations, written out."""
    G, h = target(), 3
    problem = gradflow.TensorFactorisation(G, h, geometry)
    start = problem.init(seed=0, scale=0.1)
    attention0 = np.asarray(start.a if geometry == "scores" else start.s)
    F, T = G.shape

    def field(_, y):
        V, x = y[: h * F].reshape(h, F), y[h * F :].reshape(h, T)
        if geometry == "scores":
            e = np.exp(x - x.max(axis=1, keepdims=True))
            s = e / e.sum(axis=1, keepdims=True)
        else:
            s = x
        R = G - sum(np.outer(V[k], s[k]) for k in range(h))
        g = V @ R
        moved = np.stack([s[k] * g[k] - s[k] * (s[k] @ g[k]) for k in range(h)])
        return np.concatenate([(s @ R.T).ravel(), moved.ravel()])

    ts = np.append(0.0, np.geomspace(1e-1, 1e4, 60))
    y0 = np.concatenate([np.zeros(h * F), attention0.ravel()])
    exact = solve_ivp(
        field, (0, 1e4), y0, "LSODA", t_eval=ts, rtol=1e-12, atol=1e-14
    ).y.T
    flow = gradflow.integrate(problem, start, 1e4, ts=ts, rtol=1e-8)
    attention = flow.params.a if geometry == "scores" else flow.params.s
    found = np.concatenate(
        [flow.params.V.reshape(len(ts), -1), attention.reshape(len(ts), -1)], axis=1
    )
    assert np.max(np.abs(found - exact)) < 10 * 1e-8 * np.max(np.abs(exact))
    assert max(flow.certificate.drift.values()) < 1e-9
    assert flow.certificate.energy_imbalance < 1e-6
    assert flow.loss[-1] < 1e-3
    assert flow.stats["solver"] == ("ndf" if geometry == "scores" else "rock4")


def test_replicator_parameters_are_checked():
    problem = gradflow.TensorFactorisation(target(), 2, "replicator")
    start = problem.init()
    with pytest.raises(ValueError, match=r"`params.s` must be probability dist"):
        problem.check(gradflow.ReplicatorParameters(start.V, 2 * start.s))
    with pytest.raises(ValueError, match="must be ReplicatorParameters"):
        problem.check(gradflow.ScoreParameters(start.V, start.s))


def test_the_floor_is_what_so_many_heads_can_reach():
    G = target()
    sizes = np.linalg.svd(G, compute_uv=False)
    problem = gradflow.TensorFactorisation(G, 2)
    assert problem.floor == pytest.approx(0.5 * sizes[2] ** 2)
    assert gradflow.TensorFactorisation(G, 3).floor == pytest.approx(0, abs=1e-20)


#
# Stages
#


@pytest.mark.parametrize("geometry", ["scores", "replicator"])
def test_competition_and_cooperation(geometry):
    """Patterns are acquired in the order of importance: the first by all heads, as long
    as they are alike, the others by one each."""
    G = target(orthogonal=True)
    problem = gradflow.TensorFactorisation(G, 3, geometry)
    flow = gradflow.integrate(problem, problem.init(seed=0, scale=1e-3), 1e5)
    stages = gradflow.find_stages(flow)
    assert stages.names == ("competitive", "cooperative", "cooperative")
    acquired = stages.acquisitions
    assert [a.pattern for a in acquired] == [0, 1, 2]
    assert set(acquired[0].heads) == {0, 1, 2}
    assert [len(a.heads) for a in acquired[1:]] == [1, 1]
    assert acquired[1].heads != acquired[2].heads
    assert acquired[0].overlap > 0.99
    assert acquired[1].overlap < 0.5
    for a, stage in zip(acquired, stages, strict=True):
        assert stage.start < a.t < stage.end
        # Half of the pattern, by the target itself.
        params = flow.at(a.t)
        s = np.asarray(problem.attention(params))
        found = (np.asarray(params.V).T @ s)[:, a.pattern] @ G[:, a.pattern]
        assert found == pytest.approx(0.5 * np.sum(G[:, a.pattern] ** 2))
    assert "pattern 1 by heads 1, 2, 3" in str(stages)
    assert f"by head {1 + acquired[1].heads[0]}" in str(stages)


def test_stages_on_an_exact_chain():
    chain = HighOrderChain.random(3, (1, 1), ratio=3.0, seed=1, scale=3.0)
    problem = Problem(PositionalHeads(3, 2, 2), AllContexts(chain, "uniform"))
    flow = gradflow.integrate(problem, problem.init(0, 1e-3), 2e3, rtol=1e-6)
    stages = gradflow.find_stages(flow)
    assert [a.pattern for a in stages.acquisitions] == [0, 1]
    assert stages.names == ("competitive", "cooperative")
    assert stages.acquisitions[0].heads in [(0, 1), (1, 0)]
    assert len(stages.acquisitions[1].heads) == 1


def test_shares_are_the_coefficients_of_the_projection():
    """Against least squares, on blocks that overlap."""
    chain = HighOrderChain.random(3, (2, 2), seed=1, stride=1)
    problem = Problem(PositionalHeads(3, 3, 2), AllContexts(chain))
    rng = np.random.default_rng(0)
    a, V = rng.normal(size=(2, 3)), rng.normal(size=(2, 3, 3))
    params = gradflow.PositionalHeadsParameters(jnp.asarray(a), jnp.asarray(V))
    s = np.exp(a) / np.exp(a).sum(axis=1, keepdims=True)
    middle = np.eye(3) - 1 / 3
    patterns = [
        np.multiply.outer(middle @ A @ middle, alpha).ravel()
        for A, alpha in zip(chain.matrices, chain.pattern, strict=True)
    ]
    for k in range(2):
        product = np.multiply.outer(middle @ V[k] @ middle, s[k]).ravel()
        expected = np.linalg.lstsq(np.stack(patterns, axis=1), product)[0]
        found = problem.observables["pattern_shares"](params)[k]
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_loss_of_a_block_is_what_knowing_it_would_save():
    chain = HighOrderChain.random(3, (2, 1), seed=1)
    problem = Problem(PositionalHeads(3, 3, 2), AllContexts(chain))
    rng = np.random.default_rng(0)
    a, V = rng.normal(size=(2, 3)), rng.normal(size=(2, 3, 3))
    params = gradflow.PositionalHeadsParameters(jnp.asarray(a), jnp.asarray(V))
    s = np.exp(a) / np.exp(a).sum(axis=1, keepdims=True)
    alphas, blocks = [(0.5, 0.5), (1.0,)], [(1, 2), (3,)]
    for j, lags in enumerate(blocks):
        loss = 0.0
        for weight, context in zip(chain.stationary, chain.contexts(), strict=True):
            teacher = law_by_hand(chain.matrices, blocks, alphas, context)
            logits = np.zeros(3)
            for i in range(3):
                if i + 1 in lags:
                    alpha = alphas[j][lags.index(i + 1)]
                    logits += alpha * chain.matrices[j][:, context[i]]
                else:
                    logits += sum(s[k, i] * V[k][:, context[i]] for k in range(2))
            loss += weight * (np.log(np.exp(logits).sum()) - teacher @ logits)
        expected = float(problem(params)) - loss
        found = problem.observables["block_loss"](params)[j]
        assert float(found) == pytest.approx(expected, abs=1e-12)
