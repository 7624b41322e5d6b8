"""Sequences drawn afresh, and a forward pass on them: against enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import gradflow
from gradflow import (
    AllContexts,
    FiniteContext,
    HighOrderChain,
    MarkovChain,
    OneLayerTransformer,
    PositionalHeads,
    Problem,
    SequenceSampler,
    TextSampler,
)
from gradflow._train import _samplers as samplers

SIGMAS = 4.0


@pytest.fixture(scope="module")
def chain():
    return MarkovChain.random([0.5, 0.3, 0.2], seed=1)


@pytest.fixture(scope="module")
def deep():
    return HighOrderChain.random(3, (1, 2), ratio=1.7, seed=1, scale=2.0)


def draws(sampler, count):
    """Of `count` batches, one after the other."""
    keys = jax.random.split(jax.random.key(0), count)
    tokens = jax.jit(jax.vmap(lambda key: sampler.draw(key)))(keys)
    assert tokens.shape == (count, sampler.batch, sampler.length + 1)
    return np.asarray(tokens).reshape(-1, sampler.length + 1)


def assert_law(sequences, law):
    """That sequences occur as often as `law(sequence)` says, all of them."""
    d, s = 3, sequences.shape[1]
    places = np.ravel_multi_index(tuple(sequences.T), (d,) * s)
    seen = np.bincount(places, minlength=d**s) / len(sequences)
    p = np.array([law(x) for x in itertools.product(range(d), repeat=s)])
    assert p.sum() == pytest.approx(1, rel=1e-12)
    assert np.all(seen[p == 0] == 0)
    often = p * len(sequences) > 10  # others are counted together
    seen, p = (np.append(x[often], x[~often].sum()) for x in (seen, p))
    error = np.sqrt(p * (1 - p) / len(sequences))
    np.testing.assert_array_less(np.abs(seen - p), SIGMAS * error + 1e-12)


@pytest.mark.parametrize("start", ["stationary", "uniform", [1.0, 0.0, 0.0]])
def test_sequences_of_a_markov_chain_have_its_law(chain, start):
    P = np.array(chain.transition)
    P[0] = [0.4, 0.0, 0.6]  # what has probability zero never comes
    chain = MarkovChain(P)
    laws = {"stationary": oracles.exact_stationary_law(P), "uniform": np.ones(3) / 3}
    first = laws[start] if isinstance(start, str) else np.array(start)
    sequences = draws(SequenceSampler(chain, 3, 500, start=start), 100)
    assert_law(
        sequences,
        lambda x: (
            float(first[x[0]])
            * np.prod([P[a, b] for a, b in itertools.pairwise(x)], dtype=float)
        ),
    )


@pytest.mark.parametrize("listed", [2**16, 0])
def test_sequences_of_high_order_have_its_law(deep, listed, monkeypatch):
    """From its first window on; those drawn beforehand are a sample of 16,384."""
    monkeypatch.setattr(samplers, "LISTED", listed)
    stationary, w = np.array(deep.stationary), deep.lags
    sampler = SequenceSampler(deep, w, 100)
    assert len(sampler.starts) == (27 if listed else 16_384)

    def law(x):
        (after,) = deep.next_law(np.array([x[w - 1 :: -1]]))
        place = np.ravel_multi_index(x[w - 1 :: -1], (3,) * w)
        return stationary[place] * after[x[w]]

    # As many as there are windows, so that both errors are alike.
    assert_law(draws(sampler, 164 if listed else 40), law)


def numpy_logits(model, params, tokens):
    """At every position, token by token."""
    if isinstance(model, OneLayerTransformer):
        W0, WQ, WK, W1 = (np.asarray(getattr(params, n)) for n in oracles.SHAPES)
        rows = []
        for t in range(len(tokens)):
            x = W0[tokens[: t + 1]]
            weights = np.exp(x @ WK @ WQ.T @ x[-1])
            rows.append((weights / weights.sum()) @ x @ W1)
        return np.array(rows)
    a, V = np.asarray(params.a), np.asarray(params.V)
    s = np.exp(a) / np.exp(a).sum(axis=1, keepdims=True)
    return np.array(
        [
            sum(
                s[k, i] * V[k, :, tokens[t - i]]
                for k in range(model.heads)
                for i in range(model.lags)
            )
            for t in range(model.lags - 1, len(tokens))
        ]
    )


@pytest.fixture(scope="module")
def cases(chain, deep):
    """A problem, parameters and samplers of the same contexts, for both models."""
    layer = OneLayerTransformer(3, 4, 2)
    heads = PositionalHeads(3, 3, 2)
    found = {}
    for positions in ("last", "all"):
        problem = Problem(layer, FiniteContext(chain, 5, positions=positions))
        sampler = SequenceSampler(chain, 5, 64, positions=positions)
        found["layer", positions] = (problem, layer.init(3, 0.8), sampler)
        sampler = SequenceSampler(deep, 6, 64, positions=positions)
        params = jax.tree.map(lambda x: x + 0.5 * _noise(x), heads.init(1, 0.7))
        found["heads", positions] = (Problem(heads, AllContexts(deep)), params, sampler)
    text = chain_text()
    problem = Problem(layer, gradflow.SampledContext(chain, text, 4))
    sampler = TextSampler(text, 4, 64)
    found["text", "last"] = (problem, layer.init(3, 0.8), sampler)
    return found


def chain_text():
    words = list("abacbaabcaccbabbacaabbcca")
    return gradflow.corpora.Vocabulary(("a", "b", "c")).encode(words)


def _noise(x):
    return jax.random.normal(jax.random.key(x.size), x.shape)


EVERY = [(m, p) for m in ("layer", "heads") for p in ("last", "all")]
EVERY.append(("text", "last"))


@pytest.mark.parametrize("case", EVERY, ids="-".join)
def test_the_forward_pass_by_hand(cases, case):
    problem, params, sampler = cases[case]
    tokens = np.array([2, 0, 0, 1, 2, 1])[: sampler.length]
    ours = problem.model.sequence_logits(params, jnp.asarray(tokens), case[1])
    theirs = numpy_logits(problem.model, params, tokens)
    theirs = theirs[-1:] if case[1] == "last" else theirs
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    batch = draws(sampler, 1)
    picked = []
    for row in batch:
        logits = numpy_logits(problem.model, params, row[:-1])
        logits = logits[-1:] if case[1] == "last" else logits
        log_law = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        picked.append(log_law[np.arange(len(logits)), row[-len(logits) :]])
    key = jax.random.split(jax.random.key(0), 1)[0]
    loss = sampler.loss(problem.model, params, key)
    assert float(loss) == pytest.approx(-np.mean(picked), rel=1e-12)


@pytest.mark.parametrize("case", EVERY, ids="-".join)
def test_the_mean_gradient_is_the_exact_one(cases, case):
    """Within four standard errors, in every entry."""
    problem, params, sampler = cases[case]
    keys = jax.random.split(jax.random.key(0), 800)

    @jax.jit
    @jax.vmap
    def values_and_gradients(key):
        return jax.value_and_grad(lambda p: sampler.loss(problem.model, p, key))(params)

    found = values_and_gradients(keys)
    exact = jax.value_and_grad(problem)(params)
    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(exact), strict=True
    ):
        error = np.std(ours, axis=0, ddof=1) / np.sqrt(len(keys))
        gap = np.abs(np.mean(ours, axis=0) - np.asarray(theirs))
        np.testing.assert_array_less(gap, SIGMAS * error + 1e-14)
        # It is a test: an error of half the gradient would be seen.
        assert np.max(np.abs(theirs)) > 2 * SIGMAS * np.median(error)


def test_training_takes_a_fresh_batch_every_step(cases):
    problem, start, sampler = cases["layer", "all"]
    training = gradflow.train(
        problem, start, 0.3, 4, sampler=sampler, seed=5, saved=range(5), observables=()
    )
    params = start
    for n in range(4):
        key = jax.random.fold_in(jax.random.key(5), n)
        slope = jax.grad(lambda p, k=key: sampler.loss(problem.model, p, k))(params)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, slope)
        for name in oracles.SHAPES:
            np.testing.assert_allclose(
                getattr(training.params, name)[n + 1],
                getattr(params, name),
                rtol=1e-10,
                atol=1e-13,
            )
    # What is recorded is the exact loss, not that of a batch.
    assert training.loss[-1] == pytest.approx(float(problem(params)), rel=1e-10)
    assert np.isnan(training.certificate.energy_imbalance)
    assert "unknown" in str(training)
    again = gradflow.train(
        problem, start, 0.3, 4, sampler=sampler, seed=5, saved=[4], observables=()
    )
    np.testing.assert_array_equal(again.final.W0, training.final.W0)
    other = gradflow.train(
        problem, start, 0.3, 4, sampler=sampler, seed=6, saved=[4], observables=()
    )
    assert np.max(np.abs(other.final.W0 - training.final.W0)) > 1e-3


def test_small_steps_on_samples_follow_the_exact_ones(cases):
    """Noise averages out as η falls: its share of θ is of order √η."""
    problem, start, sampler = cases["layer", "all"]
    exact = gradflow.train(problem, start, 0.01, 800, observables=())
    distances = [
        gradflow.compare(
            exact,
            gradflow.train(
                problem, start, eta, round(8 / eta), sampler=sampler, observables=()
            ),
        ).largest
        for eta in (0.4, 0.01)
    ]
    assert distances[1] < 0.3 * distances[0]
    assert distances[1] < 0.1


def test_text_is_read_in_random_places():
    pieces = [np.array([0, 1, 2, 3, 4]), np.array([5]), np.array([6, 7, 8, 9])]
    sampler = TextSampler(pieces, 2, 50)
    assert sampler.vocabulary == 10
    seen = draws(sampler, 100)
    places, counts = np.unique(seen, axis=0, return_counts=True)
    windows = [p[i : i + 3].tolist() for p in pieces for i in range(len(p) - 2)]
    assert places.tolist() == windows
    error = np.sqrt(len(seen) * 0.2 * 0.8)
    np.testing.assert_array_less(np.abs(counts - len(seen) / 5), SIGMAS * error)


def test_drawn_contexts_estimate_the_loss_on_all(cases, deep, tmp_path):
    problem, params, _ = cases["heads", "all"]
    drawn = Problem(problem.model, gradflow.DrawnContexts(deep, 4000, seed=2))
    log_law = jax.nn.log_softmax(drawn.logits(params))
    losses = -np.sum(drawn.population.targets * np.asarray(log_law), axis=1)
    error = losses.std() / np.sqrt(len(losses))
    assert float(drawn(params)) == pytest.approx(losses.mean(), rel=1e-12)
    assert abs(losses.mean() - float(problem(params))) < SIGMAS * error
    ladders = [p.observables["ladder"](params) for p in (drawn, problem)]
    np.testing.assert_allclose(*ladders, rtol=0.05)
    training = gradflow.train(drawn, params, 0.1, 2, observables=["ladder"])
    loaded = gradflow.Training.load(training.save(tmp_path / "drawn.npz"))
    np.testing.assert_array_equal(
        loaded.problem.population.windows, drawn.population.windows
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda c, h: SequenceSampler(3, 4, 2), "`chain` must be a gradflow.Markov"),
        (lambda c, h: SequenceSampler(c, 0, 2), "`length` must be a whole number"),
        (lambda c, h: SequenceSampler(c, 4, 0), "`batch` must be a whole number"),
        (
            lambda c, h: SequenceSampler(c, 4, 2, positions="first"),
            "`positions` must be 'last' or 'all', got 'first'",
        ),
        (
            lambda c, h: SequenceSampler(c, 4, 2, start=[0.5, 0.5]),
            "`start` must have 3 entries, got 2",
        ),
        (lambda c, h: SequenceSampler(h, 2, 2), "`length` must be at least the order"),
        (
            lambda c, h: SequenceSampler(h, 4, 2, start="uniform"),
            "`start` must be 'stationary' for a HighOrderChain, got 'uniform'",
        ),
        (
            lambda c, h: TextSampler([0, 1], 2, 2),
            "`sequences` must contain 2 tokens and",
        ),
        (
            lambda c, h: TextSampler([0, 1, 2, 3], 2, 2, vocabulary=3),
            "`vocabulary` must be a whole number of at least 4, got 3",
        ),
        (lambda c, h: gradflow.DrawnContexts(c, 5), "`chain` must be a gradflow.High"),
        (lambda c, h: gradflow.DrawnContexts(h, 0), "`count` must be a whole number"),
    ],
)
def test_bad_samplers_are_refused(make, said, chain, deep):
    with pytest.raises(ValueError, match=said):
        make(chain, deep)
