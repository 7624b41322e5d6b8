"""The experiments on students of high-order chains, with `--quick`: their numbers agree
with theory."""

import itertools

import numpy as np
import pytest
from experiment_runs import results
from scipy.integrate import solve_ivp
from scipy.optimize import minimize

import gradflow


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


class Singletons:
    """A teacher whose blocks have one lag each, strongest first, and its students, by
    enumerating all contexts."""

    def __init__(self, matrices):
        self.A = np.array(matrices)
        self.h, self.d, _ = self.A.shape
        self.contexts = list(itertools.product(range(self.d), repeat=self.h))
        self.tokens = np.eye(self.d)[np.array(self.contexts)]  # context, lag, token
        self.teachers = [self.law(j) for j in range(1, 1 + self.h)]
        self.weights = self._stationary()

    def law(self, blocks):
        logits = np.einsum("jyx,cjx->cy", self.A[:blocks], self.tokens[:, :blocks])
        return np.exp(log_softmax(logits))

    def _stationary(self):
        place = {c: i for i, c in enumerate(self.contexts)}
        P = np.zeros((len(place), len(place)))
        for c, law in zip(self.contexts, self.teachers[-1], strict=True):
            for token in range(self.d):
                P[place[c], place[(token, *c[:-1])]] = law[token]
        values, vectors = np.linalg.eig(P.T)
        vector = vectors[:, np.argmax(values.real)].real
        return vector / vector.sum()

    @property
    def entropy_rate(self):
        T = self.teachers[-1]
        return -self.weights @ np.sum(T * np.log(T), axis=1)

    def best_loss(self, blocks):
        """The smallest loss of logits linear in the tokens at the first lags, by
        BFGS."""
        X = self.tokens[:, :blocks].reshape(len(self.contexts), -1)
        T, w = self.teachers[-1], self.weights

        def loss(flat):
            log_law = log_softmax(X @ flat.reshape(-1, self.d))
            slope = X.T @ (w[:, None] * (np.exp(log_law) - T))
            return -w @ np.sum(T * log_law, axis=1), slope.ravel()

        start = np.zeros(X.shape[1] * self.d)
        return minimize(loss, start, jac=True, method="BFGS", tol=1e-10).fun

    def _read(self, y):
        a, V = np.split(y, [self.h * self.h])
        a = a.reshape(self.h, self.h)
        return np.exp(log_softmax(a)), V.reshape(self.h, self.d, self.d)

    def field(self, _, y):
        s, V = self._read(y)
        attended = np.einsum("ki,cix->ckx", s, self.tokens)
        law = np.exp(log_softmax(np.einsum("kyx,ckx->cy", V, attended)))
        error = self.weights[:, None] * (self.teachers[-1] - law)
        g = np.einsum("cy,kyx,cix->ki", error, V, self.tokens)
        a_dot = s * (g - np.sum(s * g, axis=1, keepdims=True))
        V_dot = np.einsum("cy,ckx->kyx", error, attended)
        return np.concatenate([a_dot.ravel(), V_dot.ravel()])

    def states(self, start, times):
        y0 = np.concatenate([np.ravel(start.a), np.ravel(start.V)])
        done = solve_ivp(
            self.field, (0, times[-1]), y0, "DOP853", times, rtol=1e-11, atol=1e-14
        )
        return done.y.T

    def ladder(self, y):
        s, V = self._read(y)
        logits = np.einsum("kyx,ki,cix->cy", V, s, self.tokens)
        log_law = log_softmax(logits)
        return [
            self.weights @ np.sum(T * (np.log(T) - log_law), axis=1)
            for T in self.teachers
        ]

    def share(self, y, block):
        """The learned share of a block: at its lag, the part of the student's table
        that the loss depends on, projected on the teacher's."""
        s, V = self._read(y)
        middle = np.eye(self.d) - 1 / self.d
        table = middle @ np.einsum("k,kyx->yx", s[:, block], V) @ middle
        A = middle @ self.A[block] @ middle
        return np.sum(table * A) / np.sum(A * A)


def start_of(d, h, seed, scale):
    return gradflow.PositionalHeads(d, h, h).init(seed, scale)


def test_head_dynamics(tmp_path):
    found = results("head_dynamics", tmp_path)
    oracle = Singletons(found["matrices"])
    h = oracle.h
    assert found["names"] == ["competitive"] + ["cooperative"] * (h - 1)
    acquired = found["acquisitions"]
    assert [a["block"] for a in acquired] == list(range(1, h + 1))
    assert sorted(acquired[0]["heads"]) == list(range(1, h + 1))
    assert acquired[0]["overlap"] > 0.99
    assert found["entropy_rate"] == pytest.approx(oracle.entropy_rate, rel=1e-12)
    assert found["final_loss"] >= oracle.entropy_rate
    assert found["final_loss"] == pytest.approx(oracle.entropy_rate, rel=1e-3)
    best = [np.log(oracle.d), *(oracle.best_loss(j) for j in range(1, h + 1))]
    np.testing.assert_allclose(found["optima"], best, rtol=1e-8)
    np.testing.assert_allclose(found["plateau_losses"], best[1:-1], rtol=5e-3)
    np.testing.assert_allclose(np.sum(found["final_shares"], axis=0), 1, atol=0.02)
    assert max(found["drift"].values()) < 1e-9

    # Half of the first block is learned at that time, according to another solver with
    # a hand-written gradient.
    start = start_of(oracle.d, h, 0, found["scale"])
    (state,) = oracle.states(start, [acquired[0]["t"]])
    assert oracle.share(state, 0) == pytest.approx(0.5, abs=1e-6)


def test_head_variants(tmp_path):
    found = results("head_variants", tmp_path)["variants"]
    for name, row in found.items():
        order = [a["block"] for a in row["acquisitions"]]
        assert order == row["importance"], name
        assert row["acquisitions"][0]["overlap"] > 0.99
    assert found["reversed"]["importance"] == [2, 1]
    assert found["ε = 0"]["overlap_until_1000"] == pytest.approx(1, abs=1e-9)
    names = ("ε = 0", "ε = 0.001", "ε = 1e-06")
    times = [[a["t"] for a in found[name]["acquisitions"]] for name in names]
    assert times[1][0] == pytest.approx(times[0][0], rel=1e-2)
    assert times[2][0] == pytest.approx(times[0][0], rel=1e-5)
    # Rounding is the smallest perturbation of all.
    assert times[1][1] < times[2][1] < times[0][1]
    attention = np.array(found["α = (0.7, 0.3)"]["final_attention"])
    reading = attention[attention[:, :2].sum(axis=1) > 0.05]
    assert len(reading)
    np.testing.assert_allclose(
        reading[:, 0] / reading[:, :2].sum(axis=1), 0.7, rtol=0.01
    )


def centred_teacher(d, spans, seed, size):
    """A teacher with centred Gaussian matrices, rescaled to their norms before
    centring."""
    A = gradflow.HighOrderChain.random(d, spans, 1.7, seed=seed, scale=size).matrices
    middle = np.eye(d) - 1 / d
    B = middle @ A @ middle
    norms = [np.linalg.norm(m, axis=(1, 2))[:, None, None] for m in (A, B)]
    return Singletons(B * norms[0] / norms[1])


def test_ladder(tmp_path):
    found = results("ladder", tmp_path)
    h = len(found["spans"])
    ((strength, row),) = found["rows"]["centred"].items()
    runs = found["runs"]
    assert row["runs"] == len(runs)
    reaching = [r for r in runs if h in r["path"]]
    assert row["reaching"] == len(reaching) > 0
    for r in reaching:
        visited = [float(r["left"][k - 1]) for k in sorted(set(r["path"]))]
        assert np.all(np.diff(visited) > 0)
    climbed = [r for r in runs if r["path"] == list(range(1, h + 1))]
    assert row["monotone_fraction"] == len(climbed) / len(runs) > 0

    # Another solver leaves the rungs for the last time at the same times.
    r = climbed[0]
    d, seed = found["vocabulary"], r["seed"]
    oracle = centred_teacher(d, found["spans"], seed, float(strength))
    times = [x * t for t in r["left"][:-1] for x in (0.999, 1.001)]
    states = oracle.states(start_of(d, h, seed, 1e-3), times)
    rungs = [1 + np.argmin(oracle.ladder(state)) for state in states]
    assert rungs == [1, 2, 2, 3]


def test_early_stopping(tmp_path):
    found = results("early_stopping", tmp_path)
    sizes, stops = found["sizes"], found["stops"]
    assert len(sizes) >= 5
    rungs = [[s["rung"] for s in stops if s["size"] == n] for n in sizes]
    times = [[s["t"] for s in stops if s["size"] == n] for n in sizes]
    assert all(len(row) == found["seeds"] >= 3 for row in rungs)
    assert np.all(np.diff(np.median(rungs, axis=1)) >= 0)
    first = list(np.median(rungs, axis=1)).index(len(found["spans"]))
    assert first > 0
    assert np.all(np.diff(np.median(times, axis=1)[: first + 1]) > 0)
    for stop in stops:
        assert found["entropy_rate"] <= stop["loss"] <= stop["final_loss"] + 1e-12
        if stop["size"] < sizes[first]:
            assert stop["final_loss"] - stop["loss"] > 1e-9
            assert stop["empirical_loss"] < stop["final_loss"]
