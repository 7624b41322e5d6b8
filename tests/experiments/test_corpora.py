"""The experiments on corpora, with `--quick` on the text that the project ships: their
numbers agree with counts by hand and with a flow integrated by SciPy."""

import math
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import oracles
import pytest
from experiment_runs import EXPERIMENTS, results
from scipy.integrate import solve_ivp

import gradflow

SMALL_TEXT = EXPERIMENTS / "data" / "small.txt"
SIZE, WIDTH, SMOOTHING = 20, 8, 1e-3


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One directory for all tests, so that each flow is integrated only once."""
    return tmp_path_factory.mktemp("corpora")


@pytest.fixture(scope="module")
def wikitext(out):
    (flow,) = results("wikitext", out)["flows"]
    return flow


@pytest.fixture(scope="module")
def frequency(wikitext, out):
    return results("token_frequency", out)


@pytest.fixture(scope="module")
def chain():
    """π, P and the index of `continue`, counted by hand: the 19 most frequent tokens,
    including `continue`, and then the rest."""
    tokens = SMALL_TEXT.read_text().split()
    ranked = [token for token, _ in Counter(tokens).most_common()]
    kept = [token for token in ranked if token != "continue"][: SIZE - 2]
    number = {token: i for i, token in enumerate([*kept, "continue"])}
    counts = np.full((SIZE, SIZE), SMOOTHING)
    for a, b in pairwise(tokens):
        counts[number.get(a, SIZE - 1), number.get(b, SIZE - 1)] += 1
    P = counts / counts.sum(axis=1, keepdims=True)
    values, vectors = np.linalg.eig(P.T)
    pi = np.real(vectors[:, np.argmax(np.real(values))])
    return pi / pi.sum(), P, number["continue"]


def test_the_text_is_what_its_script_writes(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "data"))
    import generate

    assert SMALL_TEXT.read_text() == generate.text()
    assert SMALL_TEXT.stat().st_size < 200_000
    sys.modules.pop("generate")


def test_the_flow_starts_as_closed_forms_say(wikitext, chain):
    pi, _, at = chain
    assert wikitext["loss"][0] == pytest.approx(math.log(SIZE), rel=1e-5)
    entropy = -pi @ np.log(pi)
    for band in wikitext["bands"].values():
        assert band[0] == pytest.approx(entropy, rel=1e-5)
    np.testing.assert_allclose(wikitext["attention"][0][0], pi, rtol=1e-4)
    found = wikitext["inputs"]["continue"]
    assert found["frequency"] == pytest.approx(pi[at], rel=1e-9)
    first = wikitext["stages"][0]
    assert first["name"] == "condensation"
    rate = float(first["evidence"]["rate"])
    assert rate == pytest.approx(oracles.first_rate(pi), rel=0.02)
    slope = wikitext["rate_of_condensation"]
    assert slope == pytest.approx(oracles.first_rate(pi), rel=1e-3)


def test_attention_follows_the_flow_by_scipy(wikitext, chain):
    """The loss and the attention of `continue` throughout condensation and beyond."""
    pi, P, at = chain
    ts = np.array(wikitext["ts"])
    until = ts <= 200
    model = gradflow.OneLayerTransformer(SIZE, WIDTH)
    start = model.init(0, 1e-3)
    shapes = [(SIZE, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, SIZE)]
    cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]

    def matrices(y):
        return [x.reshape(s) for x, s in zip(np.split(y, cuts), shapes, strict=True)]

    def velocity(t, y):
        _, gradient, _, _ = oracles.infinite_context_gradient(pi, P, *matrices(y))
        return -np.concatenate([g.ravel() for g in gradient])

    y0 = np.concatenate([np.ravel(x) for x in (start.W0, start.WQ, start.WK, start.W1)])
    solution = solve_ivp(
        velocity, (0, 200), y0, method="LSODA", rtol=1e-8, atol=1e-11, t_eval=ts[until]
    )
    for i, y in enumerate(solution.y.T):
        W0, WQ, WK, W1 = matrices(y)
        scores = W0[at] @ WQ @ WK.T @ W0.T
        row = pi * np.exp(scores - scores.max())
        np.testing.assert_allclose(
            wikitext["attention"][i][0], row / row.sum(), rtol=1e-3, atol=1e-9
        )
        loss = oracles.infinite_context_gradient(pi, P, W0, WQ, WK, W1)[0]
        assert wikitext["loss"][i] == pytest.approx(float(loss), rel=1e-5)


def test_times_are_read_off_the_norms(frequency, chain):
    pi, _, _ = chain
    np.testing.assert_allclose(frequency["frequency"], pi, rtol=1e-9)
    norms, ts = np.array(frequency["norms"]), np.array(frequency["ts"])
    for token, when in enumerate(frequency["embedded"]):
        column = norms[:, token]
        level = math.sqrt(column[0] * column.max())
        i = int(np.argmax(column > level))
        assert ts[i - 1] <= when <= ts[i]
    assert frequency["rank_correlation"]["embedded"] < -0.5


def test_samples_of_contexts_condense_first(tmp_path):
    flows = results("real_contexts", tmp_path)["flows"]
    assert {flow["kind"] for flow in flows} == {
        "real contexts",
        "Markov contexts",
        "chain",
    }
    for flow in flows:
        assert flow["names"][0] == "condensation"
        assert flow["loss"][0] == pytest.approx(math.log(12), rel=1e-4)
        assert np.all(np.diff(flow["loss"]) < 1e-9)


def test_tinystories_watches_its_five_inputs(out):
    (flow,) = results("tinystories", out)["flows"]
    assert list(flow["inputs"]) == ["the", ",", "a", "full", "been"]
    assert all(found["phases"] for found in flow["inputs"].values())
