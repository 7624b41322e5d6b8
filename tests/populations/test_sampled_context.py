"""Samples of real contexts: against counting by hand and a forward pass on the
tokens."""

import itertools
from collections import Counter

import equinox as eqx
import jax
import numpy as np
import pytest
from generated_text import TOKENS

from gradflow import (
    FiniteContext,
    MarkovChain,
    OneLayerTransformer,
    Problem,
    Sample,
    SampledContext,
)
from gradflow._core import file_format, machine
from gradflow.corpora import Vocabulary
from gradflow.populations import AbstractDenseUnorderedPopulation, _sampled_context

WORDS = Vocabulary.from_tokens(TOKENS, 9)
NUMBERS = WORDS.encode(TOKENS)
CHAIN = MarkovChain.from_tokens(NUMBERS, WORDS, smoothing=1e-3)


def contexts_by_hand(sequences, length):
    """How often each (last token, sorted tokens) is followed by each token."""
    table = Counter()
    for tokens in sequences:
        for t in range(length, len(tokens)):
            context = [int(x) for x in tokens[t - length : t]]
            table[(context[-1], tuple(sorted(context))), int(tokens[t])] += 1
    return table


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("form", ["one", "several"])
def test_a_sample_counts_and_merges_its_contexts(form, length):
    pieces = [NUMBERS] if form == "one" else [NUMBERS[:700], NUMBERS[:4], NUMBERS[9:99]]
    sample = SampledContext(CHAIN, pieces[0] if form == "one" else pieces, length)
    expected = contexts_by_hand(pieces, length)
    total = sum(expected.values())
    assert sample.examples == total
    assert sample.size == len({context for context, _ in expected}) < total
    assert sample.vocabulary == 9
    multiplicities = np.rint(np.exp(sample.log_multiplicities)).astype(int)
    assert np.all(multiplicities.sum(axis=1) == length)
    for query, counts, weight, target in zip(
        sample.queries, multiplicities, sample.weights, sample.targets, strict=True
    ):
        context = (int(query), tuple(np.repeat(np.arange(9), counts).tolist()))
        followers = np.array([expected[context, y] for y in range(9)])
        np.testing.assert_allclose(weight * target, followers / total, rtol=1e-13)


def forward(params, context):
    """The logits after a context, from its tokens one by one."""
    W0, WQ, WK, W1 = (np.asarray(getattr(params, n)) for n in ("W0", "WQ", "WK", "W1"))
    x = W0[context]
    scores = (x[-1] @ WQ) @ (x @ WK).T
    attention = np.exp(scores - scores.max())
    return (attention / attention.sum()) @ x @ W1


def test_the_loss_is_the_mean_over_examples_of_a_forward_pass():
    problem = Problem(
        OneLayerTransformer(9, 4), SampledContext(CHAIN, NUMBERS[:500], 6)
    )
    params = problem.init(seed=1, scale=0.8)
    losses = []
    for t in range(6, 500):
        logits = forward(params, NUMBERS[t - 6 : t])
        losses.append(np.log(np.exp(logits).sum()) - logits[NUMBERS[t]])
    assert float(eqx.filter_jit(problem)(params)) == pytest.approx(
        np.mean(losses), rel=1e-12
    )


@eqx.filter_jit
def observed(problem, params):
    """The gradient and all observables of a loss, compiled together."""
    seen = {name: f(params) for name, f in problem.observables.items()}
    return seen | {"gradient": jax.grad(problem)(params)}


def test_all_sequences_by_their_probability_are_the_exact_finite_context():
    chain = MarkovChain.random([0.6, 0.3, 0.1], seed=3)
    rows = np.array(list(itertools.product(range(3), repeat=5)))
    moves = chain.transition[rows[:, :-1], rows[:, 1:]]
    law = chain.stationary[rows[:, 0]] * moves.prod(axis=1)
    sample = Problem(
        OneLayerTransformer(3, 4), SampledContext(chain, rows, 4, counts=law)
    )
    exact = Problem(OneLayerTransformer(3, 4), FiniteContext(chain, 4))
    params = sample.init(seed=2, scale=0.7)
    assert sample.floor == pytest.approx(exact.floor, rel=1e-13)
    found, wanted = (observed(problem, params) for problem in (sample, exact))
    assert {"excess_loss", "gradient", "attention", "alignment"} < set(found)
    for name in found:
        jax.tree.map(
            lambda a, b, name=name: np.testing.assert_allclose(
                a, b, rtol=1e-10, atol=1e-13, err_msg=name
            ),
            found[name],
            wanted[name],
        )


class Tables(AbstractDenseUnorderedPopulation):
    """The same contexts in tables over all tokens."""

    chain: MarkovChain
    weights: np.ndarray
    queries: np.ndarray
    log_multiplicities: np.ndarray
    targets: np.ndarray

    def query_rows(self, table):
        return table[self.queries]


def test_sparse_contexts_give_the_same_numbers_as_dense_tables():
    sample = SampledContext(CHAIN, NUMBERS, 5, examples=400)
    tables = Tables(
        CHAIN,
        sample.weights,
        sample.queries,
        sample.log_multiplicities,
        sample.targets,
    )
    model = OneLayerTransformer(9, 4)
    ours, theirs = (Problem(model, p) for p in (sample, tables))
    params = ours.init(seed=3, scale=1.0)
    assert ours(params) == pytest.approx(float(theirs(params)), rel=1e-12)
    assert ours.floor == pytest.approx(theirs.floor, rel=1e-12)
    for a, b in zip(
        jax.tree.leaves(jax.grad(ours)(params)),
        jax.tree.leaves(jax.grad(theirs)(params)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.max(np.abs(b)))
    for name in ("attention", "attention_entropy", "attention_mass"):
        found = ours.observables[name](params)
        np.testing.assert_allclose(
            found, theirs.observables[name](params), rtol=1e-12, atol=1e-15
        )


def test_too_many_contexts_are_refused_before_all_are_merged(monkeypatch):
    merged = []
    distinct = _sampled_context.distinct

    def counting(rows):
        merged.append(len(rows))
        return distinct(rows)

    monkeypatch.setattr(_sampled_context, "distinct", counting)
    with pytest.raises(ValueError, match=r"at least .* limit is 20 contexts"):
        SampledContext(CHAIN, NUMBERS, 5, max_contexts=20)
    assert merged == [40]


def test_samples_beyond_the_available_memory_are_refused(monkeypatch):
    whole = SampledContext(CHAIN, NUMBERS, 5)
    needed = whole.size * 8 * (10 * 9 + 2)
    monkeypatch.setattr(machine, "available_memory", lambda: needed - 1)
    refused = rf"{whole.size:,} or more distinct .* takes about .* are available: draw"
    with pytest.raises(ValueError, match=refused):
        SampledContext(CHAIN, NUMBERS, 5)
    # The user's own limit takes precedence.
    allowed = SampledContext(CHAIN, NUMBERS, 5, max_contexts=whole.size)
    assert allowed.size == whole.size
    monkeypatch.setattr(machine, "available_memory", lambda: 0)
    with pytest.raises(ValueError, match="and 0 B are available"):
        SampledContext(CHAIN, NUMBERS, 5)
    monkeypatch.setattr(machine, "available_memory", lambda: needed)
    assert SampledContext(CHAIN, NUMBERS, 5).size == whole.size


def test_a_key_draws_the_examples():
    keys = jax.random.split(jax.random.key(0))
    a, b, c = (
        SampledContext(CHAIN, NUMBERS, 3, examples=100, seed=key)
        for key in (*keys, keys[0])
    )
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(c), strict=True):
        np.testing.assert_array_equal(x, y)
    assert a.size != b.size or np.any(a.weights != b.weights)


def test_examples_are_drawn_without_repetition_and_by_seed():
    every = contexts_by_hand([NUMBERS], 3)
    total = sum(every.values())

    def drawn(n, seed):
        sample = SampledContext(CHAIN, NUMBERS, 3, examples=n, seed=seed)
        assert sample.examples == n
        found = Counter()
        tokens = np.rint(np.exp(sample.log_multiplicities)).astype(int)
        for c, y in np.argwhere(sample.targets > 0):
            seen = np.repeat(np.arange(9), tokens[c]).tolist()
            often = n * sample.weights[c] * sample.targets[c, y]
            found[(int(sample.queries[c]), tuple(seen)), int(y)] = round(often)
        return found

    assert drawn(total, 5) == every
    few = drawn(200, 0)
    assert few <= every
    assert few == drawn(200, 0)
    assert few != drawn(200, 1)


@pytest.mark.parametrize("seed", [0, jax.random.key(7)], ids=["integer", "key"])
def test_a_sample_is_stored_and_rebuilt(seed, tmp_path):
    sample = SampledContext(CHAIN, NUMBERS, 4, examples=300, seed=seed)
    path = file_format.write(tmp_path / "run.npz", {"sample": sample})
    again = file_format.read(path, lambda header: header["sample"])
    assert again.chain.labels == CHAIN.labels
    assert (again.length, again.max_contexts) == (4, None)
    assert again.size == sample.size
    np.testing.assert_array_equal(again.queries, sample.queries)
    for name in ("weights", "targets", "log_multiplicities", "examples"):
        np.testing.assert_allclose(
            getattr(again, name), getattr(sample, name), rtol=1e-13, err_msg=name
        )


def test_observables_of_a_sample():
    """The chain provides the frequencies and names of the tokens, also of tokens in
    which no context ends."""
    sample = SampledContext(CHAIN, NUMBERS[:12], 4)
    unseen = np.setdiff1d(np.arange(9), sample.queries)
    assert unseen.size
    problem = Problem(OneLayerTransformer(9, 3), sample)
    params = problem.init(scale=0.5)
    seen = observed(problem, params)
    for name, value in seen.items():
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(value)), name
    attention = np.asarray(seen["attention"])
    assert np.all(attention[unseen] == 0)
    np.testing.assert_allclose(attention[np.unique(sample.queries)].sum(axis=1), 1)
    assert problem.known_saddles == []


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((None, NUMBERS, 3), {}, "`chain` must be a gradflow.MarkovChain, got None"),
        ((CHAIN, NUMBERS, 0), {}, "`length` must be a whole number of at least 1"),
        ((CHAIN, [0, 9, 1], 1), {}, "tokens of `chain`, which has 9, got 9"),
        (
            (CHAIN, [0, 1, 2], 3),
            {},
            "must have 3 tokens and one after them .* at most 3",
        ),
        ((CHAIN, [], 3), {}, "`sequences` must contain tokens, got none"),
        ((CHAIN, ["a", "b"], 1), {}, "`sequences` must be a sequence of whole numbers"),
        ((CHAIN, NUMBERS, 3), {"examples": 10**7}, "`examples` must be at most "),
        ((CHAIN, NUMBERS, 3), {"examples": 0}, "`examples` must be a whole number"),
        ((CHAIN, NUMBERS, 3), {"seed": -1}, "`seed` must be a whole number"),
        ((CHAIN, NUMBERS, 3), {"counts": [1, 2]}, "each of the 1 sequences"),
        (
            (CHAIN, NUMBERS, 3),
            {"max_contexts": 5},
            "distinct contexts, about .* kB .* limit is 5 contexts .draw fewer `exa",
        ),
    ],
)
def test_refused_samples(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        SampledContext(*arguments, **options)


def test_numbers_of_a_vocabulary_also_make_a_sample_with_positions():
    sample = Sample(NUMBERS, 2, vocabulary=WORDS.size)
    assert sample.examples == len(NUMBERS) - 2
