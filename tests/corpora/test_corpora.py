"""Text as data: against counting by hand and a forward pass on the tokens."""

import itertools
import os
import sys
import time
import types
from collections import Counter
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

from gradflow import (
    FiniteContext,
    MarkovChain,
    OneLayerTransformer,
    Population,
    Problem,
    Sample,
    SampledContext,
    corpora,
)
from gradflow._core import storage
from gradflow.corpora import Vocabulary, tokenise
from gradflow.populations import _unordered

SHARED = Path(
    os.environ.get("GRADFLOW_CORPORA")
    or Path(__file__).parents[3] / "shared" / "corpora"
)
needs_corpora = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"there are no corpora at {SHARED}"
)


def generated_text(sentences=400, seed=0):
    """A few kilobytes of English-like sentences over some forty tokens."""
    rng = np.random.default_rng(seed)
    names = ["Ann", "Ben", "cat", "dog", "bird", "fox", "child", "king"]
    verbs = ["saw", "found", "liked", "chased", "fed", "lost"]
    adjectives = ["small", "old", "red", "happy", "quiet"]
    places = ["park", "garden", "house", "river", "hill"]

    def pick(words):
        # Unequal frequencies, as in a language.
        weights = 1 / np.arange(1, len(words) + 1)
        return words[rng.choice(len(words), p=weights / weights.sum())]

    lines = []
    for _ in range(sentences):
        line = f"the {pick(adjectives)} {pick(names)} {pick(verbs)} a {pick(names)}"
        if rng.random() < 0.4:
            line += f", and then it {pick(verbs)} the {pick(names)}"
        if rng.random() < 0.5:
            line += f" in the {pick(places)}"
        lines.append(line + ("!" if rng.random() < 0.2 else "."))
    return "\n".join(lines) + "\n"


TEXT = generated_text()
TOKENS = tokenise(TEXT)


def counted(sequences):
    """How often each pair occurs."""
    return Counter(
        pair for tokens in sequences for pair in itertools.pairwise(map(str, tokens))
    )


#
# Tokens
#


def test_words_are_split_from_punctuation():
    text = "Don't stop, “he” said:\n\n it's 3 o'clock!<|endoftext|>\nÉté_2 x"
    assert tokenise(text) == [
        *("Don't", "stop", ",", "“", "he", "”", "said", ":", "it's", "3"),
        *("o'clock", "!", "<|endoftext|>", "Été_2", "x"),
    ]


def test_white_space_lines_and_a_function_of_ones_own():
    text = " = A title = \n \nthe @-@ end .\n"
    assert tokenise(text, "whitespace") == text.split()
    marked = tokenise(text, "whitespace", line_end="<eos>")
    expected = "= A title = <eos> <eos> the @-@ end . <eos>"
    assert marked == expected.split()
    assert tokenise(text.rstrip("\n"), "whitespace", line_end="<eos>") == marked
    assert tokenise("abc", list) == ["a", "b", "c"]
    assert tokenise("a-b\nc", lambda t: t.split("-"), line_end="|") == list("ab|c|")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "`text` must hold something beside white space, got 0 characters"),
        ((" \n\t",), "beside white space, got 3 characters"),
        ((b"bytes",), "`text` must be a string, got bytes"),
        (("a", "letters"), "`by` must be 'words', 'whitespace' or a function"),
        (("a", lambda t: [1]), "`by` must return tokens as strings, got 1"),
        (("a", lambda t: []), "`by` must return tokens as strings, got none"),
        (("a", str.lower), "`by` must return a list of tokens, got 'a'"),
    ],
)
def test_refused_texts(arguments, message):
    with pytest.raises(ValueError, match=message):
        tokenise(*arguments)
    with pytest.raises(ValueError, match="`line_end` must be a token or None, got ''"):
        tokenise("a", line_end="")


#
# Vocabularies
#


def test_a_vocabulary_has_the_most_frequent_tokens_and_one_for_the_rest():
    words = Vocabulary.from_tokens(TOKENS, 12)
    frequent = [token for token, _ in Counter(TOKENS).most_common(11)]
    assert words.labels == (*frequent, "<rest>")
    assert words.size == 12
    numbers = words.encode(TOKENS)
    assert numbers.dtype == np.int64
    expected = [t if t in frequent else "<rest>" for t in TOKENS]
    assert [words.labels[i] for i in numbers] == expected
    assert words.labels[words.index("the")] == "the"


def test_tokens_are_kept_by_name_in_the_places_of_the_least_frequent():
    ranked = [token for token, _ in Counter(TOKENS).most_common()]
    rare, common = ranked[-3], ranked[0]
    words = Vocabulary.from_tokens(TOKENS, 8, keep=[rare, common])
    assert words.labels == (*ranked[:6], rare, "<rest>")


def test_the_rest_may_be_a_token_of_the_text():
    tokens = ["a", "a", "a", "<unk>", "<unk>", "<unk>", "<unk>", "b", "b", "c"]
    words = Vocabulary.from_tokens(tokens, 3, rest="<unk>")
    assert words.labels == ("a", "b", "<unk>")
    # It has its place, so to keep it costs none.
    assert Vocabulary.from_tokens(tokens, 3, rest="<unk>", keep=["<unk>"]) == words
    np.testing.assert_array_equal(words.encode(tokens), [0] * 3 + [2] * 4 + [1, 1, 2])


def test_several_sequences_are_encoded_one_by_one():
    pieces = [["a", "b"], [], ["b", "c", "b"]]
    words = Vocabulary.from_tokens(pieces)
    assert words.labels == ("b", "a", "c")
    assert words.rest is None
    found = [list(piece) for piece in words.encode(pieces)]
    assert found == [[1, 0], [], [0, 2, 0]]
    np.testing.assert_array_equal(words.encode(np.array(["c", "a"])), [2, 1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Vocabulary.from_tokens(["a", "b", "a"], 3),
            "`size` must be at most the number of distinct tokens, 2, got 3",
        ),
        (
            lambda: Vocabulary.from_tokens(TOKENS, 9, keep=["the", "whale", "sea"]),
            "`keep` must be tokens that occur in the text, got 'whale', 'sea', which",
        ),
        (
            lambda: Vocabulary.from_tokens(TOKENS, keep=["whale"]),
            "got 'whale', which never do",
        ),
        (
            lambda: Vocabulary.from_tokens(TOKENS, 3, keep=["the", "a", "cat"]),
            "`keep` must leave a place for the rest: at most 2 tokens",
        ),
        (
            lambda: Vocabulary.from_tokens(TOKENS, 3, keep="the"),
            "`keep` must be a list",
        ),
        (lambda: Vocabulary.from_tokens([], 3), "`tokens` must hold at least one"),
        (lambda: Vocabulary.from_tokens([[], []], 3), "must hold at least one token"),
        (lambda: Vocabulary.from_tokens(TEXT, 3), "got a text .*tokenise"),
        (lambda: Vocabulary.from_tokens(7, 3), "`tokens` must be a list of tokens"),
        (lambda: Vocabulary.from_tokens([["a"], "bc"]), "one list of tokens or a list"),
        (lambda: Vocabulary.from_tokens(["a", 1, "b"]), "must be strings, got 1"),
        (lambda: Vocabulary.from_tokens(TOKENS, 1), "`size` must be a whole number"),
        (lambda: Vocabulary.from_tokens(TOKENS, 4, rest=""), "`rest` must be a token"),
        (lambda: Vocabulary(["a", "a"]), "`labels` must be distinct tokens, got 2"),
        (lambda: Vocabulary(["a"], "b"), "`rest` must be one of `labels`, got 'b'"),
        (lambda: Vocabulary(["a"]).encode(["a", "x"]), "in the vocabulary, got 'x'"),
        (lambda: Vocabulary(["a"]).index("x"), "`token` must be in the vocabulary"),
    ],
)
def test_refused_vocabularies(make, message):
    with pytest.raises(ValueError, match=message):
        make()


#
# Chains
#


@pytest.mark.parametrize("smoothing", [1e-3, 0.5])
@pytest.mark.parametrize("form", ["strings", "numbers", "list of numbers", "lines"])
def test_a_chain_of_tokens_has_the_frequencies_of_pairs(form, smoothing):
    d = 15
    if form == "lines":
        given = [tokenise(line) for line in TEXT.splitlines()]
        sequences = given
    else:
        given, sequences = TOKENS, [TOKENS]
    words = Vocabulary.from_tokens(given, d)
    vocabulary = words
    if form == "strings":
        vocabulary = d
    elif "numbers" in form:
        given = words.encode(TOKENS)
        given = given.tolist() if form == "list of numbers" else given
    chain = MarkovChain.from_tokens(given, vocabulary, smoothing=smoothing)
    assert chain.labels == words.labels
    known = set(words.labels)
    named = [[t if t in known else "<rest>" for t in line] for line in sequences]
    pairs = counted(named)
    table = np.array([[pairs[a, b] for b in words.labels] for a in words.labels])
    assert table.sum() == sum(len(line) - 1 for line in sequences)
    P = table + smoothing
    P = P / P.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(chain.transition, P, rtol=1e-14)


def test_empty_sequences_count_for_nothing():
    pairs = [[0, 1, 0, 1, 1], []]
    chain = MarkovChain.from_tokens(pairs, smoothing=0.5)
    alone = MarkovChain.from_tokens(pairs[0], smoothing=0.5)
    np.testing.assert_array_equal(chain.transition, alone.transition)
    sample = SampledContext(chain, pairs, 2)
    problem = Problem(OneLayerTransformer(2, 2), sample)
    assert float(problem(problem.init())) == pytest.approx(np.log(2), rel=1e-3)


def test_the_stationary_law_of_a_closed_text_is_its_frequencies():
    # Without smoothing and with the first token again at the end, exactly.
    tokens = [*TOKENS, TOKENS[0]]
    chain = MarkovChain.from_tokens(tokens)
    counts = Counter(TOKENS)
    expected = [counts[label] / len(TOKENS) for label in chain.labels]
    np.testing.assert_allclose(chain.stationary, expected, rtol=1e-12)


def test_numbers_may_have_names_or_none():
    chain = MarkovChain.from_tokens([0, 1, 1, 0], labels=["x", "y"])
    np.testing.assert_allclose(chain.transition, [[0, 1], [0.5, 0.5]])
    assert chain.labels == ("x", "y")
    wider = MarkovChain.from_tokens([0, 1, 1, 0], 3, smoothing=1.0)
    assert wider.labels == ("0", "1", "2")
    np.testing.assert_allclose(wider.transition[2], 1 / 3)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([],), {}, "`tokens` must hold at least one token, got none"),
        ((["a"],), {}, "`tokens` must hold a token and one after it, got no pair"),
        (([["a"], ["b"]],), {}, "got no pair"),
        ((TEXT,), {}, "`tokens` must be a list of tokens, got a text"),
        ((TOKENS, 1000), {}, "at most the number of distinct tokens, "),
        ((TOKENS, 1), {}, "`vocabulary` must be a whole number of at least 2, got 1"),
        ((TOKENS, 9), {"keep": ["whale"]}, "got 'whale', which never do"),
        ((TOKENS, 9), {"smoothing": -1}, "`smoothing` must be a finite number"),
        ((TOKENS, 9), {"labels": list("abcdefghi")}, "`labels` must be left out"),
        (([0, 2], 2), {}, "`vocabulary` must be a whole number of at least 3, got 2"),
        (([0, 2], Vocabulary(["a"])), {}, "in the vocabulary of 1, got 2"),
        (([0, -1],), {}, "`tokens` must not be negative, got -1"),
        (([0, 1],), {"keep": ["a"]}, "`keep` must be left out where `tokens` are num"),
        ((["a", "b"], Vocabulary(["a", "b"])), {"keep": ["a"]}, "where a `vocabulary`"),
        ((["a", 1],), {}, "`tokens` must be strings, got 1"),
    ],
)
def test_refused_tokens(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        MarkovChain.from_tokens(*arguments, **options)


def test_a_reducible_chain_is_refused_by_the_names_of_its_tokens():
    wanted = "`tokens` must make an irreducible chain .or have more `smoothing`., but "
    with pytest.raises(ValueError, match=f"{wanted}nothing ever follows 'end'"):
        MarkovChain.from_tokens(["a", "b", "a", "b", "a", "end"])
    once = ["start", "a", "b", "a", "b", "a", "b"]
    with pytest.raises(
        ValueError, match=f"{wanted}from the states 'a', 'b' the states 'start' cannot"
    ):
        MarkovChain.from_tokens(once)
    # A smoothing that is lost in rounding leaves it as it was.
    with pytest.raises(ValueError, match="'start' cannot be reached"):
        MarkovChain.from_tokens(once, smoothing=5e-324)
    assert MarkovChain.from_tokens(once, smoothing=1e-3).size == 3


#
# Samples of real contexts
#

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
    """The loss's gradient and all that is worth watching; compiled as one."""
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
    assert {"loss", "gradient", "attention", "alignment"} < set(found)
    for name in found:
        jax.tree.map(
            lambda a, b, name=name: np.testing.assert_allclose(
                a, b, rtol=1e-10, atol=1e-13, err_msg=name
            ),
            found[name],
            wanted[name],
        )


class Tables(Population):
    """The same contexts in tables over all tokens."""

    chain: MarkovChain
    weights: np.ndarray
    queries: np.ndarray
    log_multiplicities: np.ndarray
    targets: np.ndarray

    def query_rows(self, table):
        return table[self.queries]


def test_short_lists_are_read_as_the_tables_that_they_stand_for():
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
    distinct = _unordered.distinct

    def counting(rows):
        merged.append(len(rows))
        return distinct(rows)

    monkeypatch.setattr(_unordered, "distinct", counting)
    with pytest.raises(ValueError, match=r"at least .* limit is 20 contexts"):
        SampledContext(CHAIN, NUMBERS, 5, max_contexts=20)
    assert merged == [40]


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


def test_a_sample_is_stored_and_rebuilt(tmp_path):
    sample = SampledContext(CHAIN, NUMBERS, 4, examples=300)
    path = storage.write(tmp_path / "run.npz", {"sample": sample})
    again = storage.read(path, lambda header: header["sample"])
    assert again.chain.labels == CHAIN.labels
    assert (again.length, again.max_contexts) == (4, None)
    assert again.size == sample.size
    np.testing.assert_array_equal(again.queries, sample.queries)
    for name in ("weights", "targets", "log_multiplicities", "examples"):
        np.testing.assert_allclose(
            getattr(again, name), getattr(sample, name), rtol=1e-13, err_msg=name
        )


def test_observables_of_a_sample():
    """What refers to the law and names of tokens finds them in the chain, also for a
    token in which no context ends."""
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
            "must hold 3 tokens and one after them .* at most 3",
        ),
        ((CHAIN, [], 3), {}, "`sequences` must hold tokens, got none"),
        ((CHAIN, ["a", "b"], 1), {}, "`sequences` must be whole numbers"),
        ((CHAIN, NUMBERS, 3), {"examples": 10**7}, "`examples` must be at most "),
        ((CHAIN, NUMBERS, 3), {"examples": 0}, "`examples` must be a whole number"),
        ((CHAIN, NUMBERS, 3), {"seed": -1}, "`seed` must be a whole number"),
        ((CHAIN, NUMBERS, 3), {"counts": [1, 2]}, "each of the 1 sequences"),
        (
            (CHAIN, NUMBERS, 3),
            {"max_contexts": 5},
            "distinct contexts, about .* GiB .* limit is 5 contexts .draw fewer `exa",
        ),
    ],
)
def test_refused_samples(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        SampledContext(*arguments, **options)


def test_numbers_of_a_vocabulary_also_make_a_sample_with_positions():
    sample = Sample(NUMBERS, 2, vocabulary=WORDS.size)
    assert sample.examples == len(NUMBERS) - 2


#
# Files, cache and hub
#


def test_a_text_is_read_as_it_is(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffErste Zeile: ü\r\nzweite\n".encode())
    assert corpora.read_text(file) == "Erste Zeile: ü\nzweite\n"
    assert corpora.read_text(str(file)) == corpora.read_text(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"some text \xff\xfe and more", "bytes that are no text at position 10"),
        (b"PK\x03\x04\x00\x00", "bytes that are no text at position 4"),
        (b"", "which is empty"),
        (b" \n ", "which is empty"),
    ],
)
def test_files_that_are_no_text(content, message, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(content)
    for read in (corpora.read_text, corpora.wikitext2, corpora.tinystories):
        with pytest.raises(ValueError, match=f"`path` must be a text.*file.*{message}"):
            read(file)


def test_loaders_read_a_file_or_a_folder(tmp_path):
    (tmp_path / "train.txt").write_text(TEXT)
    (tmp_path / "valid.txt").write_text("One day , it's \n\nover.")
    wiki = corpora.wikitext2(tmp_path)
    assert wiki == TEXT.replace("\n", " <eos> ").split()
    assert corpora.wikitext2(tmp_path / "train.txt") == wiki
    valid = corpora.wikitext2(tmp_path, split="valid")
    assert valid == ["One", "day", ",", "it's", "<eos>", "<eos>", "over.", "<eos>"]
    assert corpora.tinystories(str(tmp_path)) == TOKENS
    valid = corpora.tinystories(tmp_path, split="valid")
    assert valid == ["One", "day", ",", "it's", "over", "."]
    assert corpora.tinystories(tmp_path, split="valid", lines=2) == valid[:-2]


def test_loaders_refuse_what_is_not_there(tmp_path):
    for load in (corpora.wikitext2, corpora.tinystories):
        with pytest.raises(FileNotFoundError, match=r"must be a file, got '.*nowhere'"):
            load(tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match=r"got '.*train\.txt', which is no"):
            load(tmp_path)
        with pytest.raises(ValueError, match="`split` must be one of 'train', 'valid'"):
            load(tmp_path, split="dev")
        with pytest.raises(
            ValueError, match="`path` must be the path of a file, got 3"
        ):
            load(3)


class FakeHub(types.ModuleType):
    """A hub with these files, or one that cannot be reached."""

    def __init__(self, files):
        super().__init__("huggingface_hub")
        self.files, self.asked = files, []

    def HfFileSystem(self):
        return self

    def open(self, name, mode):
        self.asked.append(name)
        if self.files is None:
            raise ConnectionError("Name or service not known")
        assert mode == "rb"
        return self.files[name].open("rb")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


@pytest.mark.parametrize("there", [False, True], ids=["no library", "no network"])
def test_without_hub_and_cache_one_sentence_says_where_to_put_the_file(
    there, cache, monkeypatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    parquet = types.ModuleType("parquet")
    monkeypatch.setattr(sys.modules["pyarrow"], "parquet", parquet, raising=False)
    # None in the table of modules makes an import fail.
    monkeypatch.setitem(
        sys.modules, "huggingface_hub", FakeHub(None) if there else None
    )
    for load, folder in (
        (corpora.wikitext2, "wikitext-2"),
        (corpora.tinystories, "tinystories"),
    ):
        start = time.monotonic()
        with pytest.raises(FileNotFoundError, match="is not at hand: put it") as caught:
            load()
        assert time.monotonic() - start < 1
        message = str(caught.value)
        assert f"put it at '{cache / folder / 'train.txt'}', pass the `path`" in message
        remedy = "failed with ConnectionError." if there else "'gradflow[hub]' to fetch"
        assert remedy in message
        assert message.count(". ") == 0
    assert not cache.exists()


def test_what_the_hub_gives_is_kept_in_the_cache(cache, monkeypatch, tmp_path):
    wiki, stories = tmp_path / "wiki", tmp_path / "stories"
    wiki.write_text("")
    stories.write_text("A story.\n" * 12_000)
    hub = FakeHub(
        {
            "datasets/Salesforce/wikitext/wikitext-2-v1/"
            "validation-00000-of-00001.parquet": wiki,
            "datasets/roneneldan/TinyStories/TinyStoriesV2-GPT4-train.txt": stories,
        }
    )
    rows = ["", " = Title = \n", "", " Some text . \n"]
    column = types.SimpleNamespace(to_pylist=lambda: rows)
    parquet = types.SimpleNamespace(read_table=lambda file, columns: {"text": column})
    arrow = types.ModuleType("pyarrow")
    monkeypatch.setattr(arrow, "parquet", parquet, raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", arrow)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    for _ in range(2):
        tokens = corpora.wikitext2(split="valid")
        assert tokens == [
            "<eos>",
            "=",
            "Title",
            "=",
            "<eos>",
            "<eos>",
            "Some",
            "text",
            ".",
            "<eos>",
        ]
        assert corpora.tinystories() == ["A", "story", "."] * 10_000
    assert len(hub.asked) == 2
    assert (cache / "wikitext-2" / "valid.txt").is_file()
    assert (cache / "tinystories" / "train.txt").is_file()


def test_the_cache_is_where_the_system_keeps_caches(tmp_path, monkeypatch):
    monkeypatch.delenv("GRADFLOW_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "gradflow" / "corpora" / "tinystories"
    folder.mkdir(parents=True)
    (folder / "train.txt").write_text("Once upon a time.")
    assert corpora.tinystories() == ["Once", "upon", "a", "time", "."]


#
# The corpora themselves
#


@needs_corpora
def test_wikitext_makes_a_chain_of_a_thousand_tokens():
    tokens = corpora.wikitext2(SHARED / "wikitext-2")
    chain = MarkovChain.from_tokens(tokens, 1000, keep=["continue"], smoothing=1e-3)
    assert len(tokens) == 2_088_628
    assert tokens.count("continue") == 169
    assert chain.labels[:5] == ("the", ",", ".", "of", "<unk>")
    assert chain.labels[-2:] == ("continue", "<rest>")
    at = chain.labels.index("continue")
    after = Counter(b for a, b in itertools.pairwise(tokens) if a == "continue")
    to = chain.labels.index("to")
    expected = (after["to"] + 1e-3) / (169 + 1000 * 1e-3)
    assert after["to"] > 20
    assert chain.transition[at, to] == pytest.approx(expected, rel=1e-12)
    assert chain.stationary[0] == pytest.approx(tokens.count("the") / len(tokens), 1e-3)


@needs_corpora
def test_tinystories_and_a_sample_of_its_contexts():
    tokens = corpora.tinystories(SHARED / "tinystories")
    assert len(tokens) == 336_445
    words = Vocabulary.from_tokens(tokens, 100, keep=["full", "been"])
    assert words.labels[:5] == (".", ",", "the", "and", "a")
    numbers = words.encode(tokens)
    chain = MarkovChain.from_tokens(numbers, words, smoothing=1e-3)
    sample = SampledContext(chain, numbers, 16, examples=2000)
    np.testing.assert_allclose(
        np.exp(sample.log_multiplicities).sum(axis=1), 16, rtol=1e-13
    )
    # The last tokens of 2,000 contexts have the chain's law, up to chance.
    spread = np.sqrt(chain.stationary / 2000)
    miss = np.asarray(sample.query_weights) - chain.stationary
    assert np.max(np.abs(miss) / spread) < 5
