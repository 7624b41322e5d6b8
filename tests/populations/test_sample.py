"""Samples of contexts and the best time to stop, against counting by hand and SciPy."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import gradflow
from gradflow import (
    AllContexts,
    DrawnContexts,
    HighOrderChain,
    PositionalHeads,
    Problem,
    Sample,
)
from gradflow._core import file_format


def counted(sequences, lags):
    """How often each context, newest token first, is followed by each token."""
    table = Counter()
    for tokens in sequences:
        for t in range(lags, len(tokens)):
            context = tuple(int(x) for x in tokens[t - lags : t][::-1])
            table[context, int(tokens[t])] += 1
    return table


@pytest.mark.parametrize("form", ["one", "rows", "ragged"])
def test_a_sample_counts_its_contexts(form):
    rng = np.random.default_rng(3)
    sequences = {
        "one": [rng.integers(3, size=200)],
        "rows": list(rng.integers(3, size=(20, 9))),
        "ragged": [rng.integers(3, size=n) for n in (40, 3, 0, 17, 4)],
    }[form]
    given = {
        "one": sequences[0],
        "rows": np.array(sequences) if form == "rows" else None,
        "ragged": sequences,
    }[form]
    sample = Sample(given, 3, vocabulary=4)
    expected = counted(sequences, 3)
    total = sum(expected.values())
    assert sample.examples == total
    contexts = {tuple(c) for c in sample.windows}
    assert contexts == {c for c, _ in expected}
    assert len(contexts) == sample.size
    for window, weight, target in zip(
        sample.windows, sample.weights, sample.targets, strict=True
    ):
        counts = np.array([expected[tuple(window), y] for y in range(4)])
        np.testing.assert_allclose(weight * target, counts / total, rtol=1e-13)
    one_hot = sample.one_hot.reshape(sample.size, 3, 4)
    np.testing.assert_array_equal(one_hot.argmax(axis=2), sample.windows)
    assert one_hot.sum() == 3 * sample.size


def test_the_empirical_loss_is_the_mean_over_examples():
    chain = HighOrderChain.random(3, (1, 1), seed=0)
    tokens = chain.sample(60, seed=1)[0]
    model = PositionalHeads(3, 2, 2)
    params = model.init(0, 0.7)
    params = eqx_replace_values(params, seed=2)
    problem = Problem(model, Sample(tokens, 2))
    s = np.exp(params.a) / np.exp(params.a).sum(axis=1, keepdims=True)
    losses = []
    for t in range(2, len(tokens)):
        logits = sum(
            params.V[k] @ sum(s[k, i] * np.eye(3)[tokens[t - 1 - i]] for i in range(2))
            for k in range(2)
        )
        losses.append(np.log(np.exp(logits).sum()) - logits[tokens[t]])
    assert float(problem(params)) == pytest.approx(np.mean(losses), rel=1e-13)


def eqx_replace_values(params, seed):
    V = np.random.default_rng(seed).normal(size=params.V.shape)
    return type(params)(a=params.a, V=jnp.asarray(V))


def test_counts_stand_for_repeated_sequences():
    rows = np.array([[0, 1, 2], [1, 1, 0], [2, 0, 1]])
    thrice = Sample(np.repeat(rows, [3, 1, 2], axis=0), 2)
    weighted = Sample(rows, 2, counts=[3, 1, 2])
    for a, b in zip(jax.tree.leaves(thrice), jax.tree.leaves(weighted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def overfitting():
    """A flow on a sample that is too small for its teacher."""
    chain = HighOrderChain.random(3, (1, 1), seed=0, scale=1.5)
    source = AllContexts(chain)
    sample = Sample(chain.sample(40, seed=2)[0], 2, source=source)
    model = PositionalHeads(3, 2, 2)
    problem = Problem(model, sample)
    return problem, gradflow.integrate(problem, problem.init(0, 1e-1), 300.0)


def test_the_best_stopping_time_is_the_minimum_of_the_population_loss(overfitting):
    """Against a dense grid on SciPy's own solution of the same flow."""
    problem, flow = overfitting
    whole = problem.observables["population_loss"]
    t = gradflow.best_stopping_time(flow)
    assert 0 < t < 300
    start = problem.init(0, 1e-1)
    flat, back = jax.flatten_util.ravel_pytree(start)
    gradient = jax.jit(jax.grad(lambda y: problem(back(y))))
    grid = np.linspace(0.98 * t, 1.02 * t, 401)
    done = solve_ivp(
        lambda _, y: -np.asarray(gradient(y)),
        (0, grid[-1]),
        np.asarray(flat),
        method="DOP853",
        rtol=1e-11,
        atol=1e-13,
        t_eval=grid,
    )
    losses = jax.vmap(lambda y: whole(back(y)))(jnp.asarray(done.y.T))
    parabola = np.polyfit(grid - t, np.asarray(losses), 2)
    assert parabola[0] > 0
    assert abs(parabola[1] / (2 * parabola[0])) < 1e-3 * t
    everywhere = flow.observe(whole, np.linspace(0, 300, 5001))
    assert float(whole(flow.at(t))) <= everywhere.min() + 1e-12


def test_the_ladder_of_a_sample_is_that_of_its_source(overfitting):
    problem, flow = overfitting
    direct = Problem(problem.model, problem.population.source)
    last = flow.final
    for name in ("ladder", "rung", "block_loss", "pattern_shares"):
        np.testing.assert_allclose(
            flow.observables[name][-1], direct.observables[name](last), rtol=1e-12
        )
    assert flow.observables["population_loss"][-1] == pytest.approx(
        float(direct(last)), rel=1e-14
    )


def test_a_flow_that_never_gets_worse_is_best_at_its_end(overfitting):
    problem, flow = overfitting
    assert gradflow.best_stopping_time(flow, problem) == flow.ts[-1]


def test_a_flow_that_comes_to_rest_at_the_best_never_gets_worse():
    """It is at rest, to rounding, long before its end."""

    def population_loss(x):
        return 1.0 + x @ x

    flow = gradflow.integrate(lambda x: 0.5 * x @ x, jnp.ones(2), 100.0)
    assert gradflow.best_stopping_time(flow, population_loss) == 100.0


def test_a_flow_on_a_sample_is_saved_and_loaded(overfitting, tmp_path):
    problem, flow = overfitting
    flow.save(tmp_path / "run.gf")
    again = gradflow.Flow.load(tmp_path / "run.gf").problem
    start = problem.init(1, 1.0)
    assert float(again(start)) == pytest.approx(float(problem(start)), rel=1e-14)
    assert again.population.examples == pytest.approx(38)
    assert again.population.source.law == "stationary"


@pytest.mark.parametrize("seed", [3, jax.random.key(3)], ids=["integer", "key"])
def test_drawn_contexts_are_stored_with_their_seed(seed, tmp_path):
    chain = HighOrderChain.random(3, (1, 1), seed=0)
    drawn = DrawnContexts(chain, 20, seed=seed)
    np.testing.assert_array_equal(
        drawn.windows, chain.sample(2, seed=seed, sequences=20)[:, ::-1]
    )
    path = file_format.write(tmp_path / "run.npz", {"population": drawn})
    again = file_format.read(path, lambda header: header["population"])
    assert again.seed == drawn.seed
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(drawn), strict=True):
        np.testing.assert_array_equal(a, b)
    # Populations with the same structure share compiled code.
    assert jax.tree.structure(again) == jax.tree.structure(drawn)


def test_a_flow_on_contexts_drawn_by_a_key_is_saved_and_loaded(tmp_path):
    chain = HighOrderChain.random(3, (1, 1), seed=0)
    drawn = DrawnContexts(chain, 20, seed=jax.random.key(1))
    problem = Problem(PositionalHeads(3, 2, 1), drawn)
    flow = gradflow.integrate(problem, problem.init(0, 0.1), 1.0, ts=[0.0, 1.0])
    loaded = gradflow.Flow.load(flow.save(tmp_path / "run.npz"))
    assert loaded.problem.population.seed == drawn.seed
    assert float(loaded.problem(flow.final)) == pytest.approx(flow.loss[-1], rel=1e-13)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Sample([], 2), "must contain tokens, got none"),
        (lambda: Sample([0.5, 1.0, 2.0], 1), "must be a sequence of whole numbers"),
        (lambda: Sample([0, -1, 1], 1), "must not be negative, got -1"),
        (lambda: Sample([0, 1], 2), "must have 2 tokens and one after them"),
        (lambda: Sample([0, 1, 2], 0), "`lags`"),
        (lambda: Sample([0, 1, 5], 1, vocabulary=3), "`vocabulary` must be .* 6"),
        (lambda: Sample([0, 1, 1], 1, counts=[1, 2]), "each of the 1 sequences"),
        (lambda: Sample([0, 1, 1], 1, counts=[-1.0]), "with -1"),
        (lambda: Sample([0, 1, 1], 1, source=3), "`source` must be"),
        (
            lambda: Sample(
                [0, 1, 1], 1, source=AllContexts(HighOrderChain.random(2, (1, 1)))
            ),
            "equal that of `source`, 2, got 1",
        ),
        (
            lambda: Sample(
                [0, 1, 2, 2], 2, source=AllContexts(HighOrderChain.random(2, (1, 1)))
            ),
            "equal that of `source`, 2, got 3",
        ),
        (lambda: gradflow.best_stopping_time(3), "must be a Flow, got int"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_flow_without_a_population_cannot_be_stopped_best():
    flow = gradflow.integrate(lambda x: x @ x, jnp.ones(2), 1.0)
    with pytest.raises(ValueError, match="needs a Sample with a `source`"):
        gradflow.best_stopping_time(flow)
