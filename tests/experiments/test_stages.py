"""The experiments on stages, with `--quick`: their numbers agree with theory."""

import math

import numpy as np
import oracles
import pytest
from experiment_runs import results

PI = oracles.REFERENCE_LAW
P = oracles.sticky(PI, oracles.REFERENCE_STICKINESS)
RATE = oracles.first_rate(PI)


def kappa(transition, law=PI):
    _, gamma, beta = oracles.first_saddle(law, 10, 10)
    return oracles.focus_rate(law, np.array(transition), gamma, beta)


def entropy_rate(transition, law=PI):
    rows = [oracles.entropy(row) for row in np.array(transition)]
    return law @ np.array(rows)


def test_stages(tmp_path, reference, weights):
    found = results("stages", tmp_path)
    cycle = ["focus", "dilution", "new direction"]
    assert found["names"] == ["condensation", *cycle, *cycle]
    assert found["cycles"] == 2
    assert np.all(np.diff([0, *found["boundaries"], found["horizon"]]) > 0)
    assert found["final_loss"] == pytest.approx(entropy_rate(P), rel=1e-6)
    assert found["final_loss"] == pytest.approx(0.553611, abs=5e-7)
    small = found["small_scale"]
    assert small["plateau_loss"] == pytest.approx(oracles.entropy(PI), rel=1e-5)
    assert small["condensation_rate"] == pytest.approx(RATE, rel=1e-3)
    assert small["focus_rate"] == pytest.approx(kappa(P), rel=5e-3)
    # theory.md: 1.0, 0.773, 0.754, 0.751, one for each query
    np.testing.assert_allclose(
        found["peak_attention_to_frequent"], [1.0, 0.773, 0.754, 0.751], atol=1e-3
    )

    # The heat maps up to focus, with another solver and a hand-written gradient.
    start = weights(reference.init(seed=0, scale=found["scale"]))
    times = found["times"][:2]
    states = oracles.scipy_flow(PI, P, start, times, rtol=1e-9)
    for state, attention in zip(states, found["attention"], strict=False):
        W0, WQ, WK = (
            part.reshape(w.shape)
            for part, w in zip(
                np.split(state, np.cumsum([w.size for w in start])[:-1]),
                start[:3],
                strict=False,
            )
        )
        A = PI * np.exp(W0 @ WQ @ WK.T @ W0.T)
        np.testing.assert_allclose(
            attention, A / A.sum(axis=1, keepdims=True), atol=1e-5
        )


def test_transition_matrices(tmp_path):
    found = results("transition_matrices", tmp_path)
    signs = set()
    for row in found.values():
        np.testing.assert_allclose(
            oracles.exact_stationary_law(row["transition"]), PI, rtol=1e-12
        )
        k = kappa(row["transition"])
        signs.add(np.sign(k))
        assert row["kappa"] == pytest.approx(k, rel=1e-10)
        assert row["condensation_rate"] == pytest.approx(RATE, rel=1e-3)
        assert row["attention_rate"] == pytest.approx(abs(k), rel=0.01)
        assert row["sides"] == pytest.approx(np.sign(k), abs=1e-3)
        assert row["phi"] == pytest.approx(np.sign(k), abs=1e-3)
        focus = "focus" if k > 0 else "anti-focus"
        assert row["names"][:3] == ["condensation", focus, "dilution"]
        assert row["time_slope"] == pytest.approx(1 / RATE + 1 / abs(k), rel=0.01)
        # From 0.75, the frequent token turns towards itself or away from itself.
        assert (row["frequent_to_itself"] > PI[0]) == (k > 0)
        H = entropy_rate(row["transition"])
        assert row["entropy_rate"] == pytest.approx(H, rel=1e-12)
        assert -1e-12 < row["final_excess"] < oracles.entropy(PI) - H
    assert signs == {-1.0, 1.0}


def initial_rates(law, transition, length):
    """The singular values of ∂L/∂M at 0, from powers of P: the expected counts in a
    context of this length, given its last token, are a sum over earlier times."""
    d = len(law)
    powers = [np.linalg.matrix_power(transition, t) for t in range(length)]
    counted = np.diag(law) @ np.mean(powers, axis=0)  # [j, i]: count j, end in i
    G = np.outer(law, np.ones(d)) / d - counted @ transition
    return np.linalg.svd(G, compute_uv=False)


def test_finite_context(tmp_path):
    (found,) = results("finite_context", tmp_path).values()
    law = np.array(found["law"])
    d, transition = len(law), oracles.sticky(law, found["stickiness"])
    lengths = found["lengths"]
    limit = lengths.pop("∞")
    assert limit["condensation_rate"] == pytest.approx(
        oracles.first_rate(law), rel=0.01
    )
    for name, row in lengths.items():
        s = int(name)
        assert row["contexts"] == d * math.comb(s + d - 2, d - 1)
        assert row["total_weight"] == pytest.approx(1, rel=1e-12)
        rates = initial_rates(law, transition, s)
        np.testing.assert_allclose(row["initial_rates"], rates, rtol=1e-9, atol=1e-12)
        assert row["condensation_rate"] == pytest.approx(rates[0], rel=0.01)
        assert row["final_loss"] >= entropy_rate(transition, law) - 1e-12
    # Closed forms and flows converge to the limit like 1/s.
    s = sorted(int(name) for name in lengths)[-2:]
    for key in ("condensation_rate", "plateau_loss", "focus_rate"):
        far, near = (abs(lengths[str(n)][key] - limit[key]) for n in s)
        assert np.log(near / far) / np.log(s[1] / s[0]) == pytest.approx(-1, abs=0.1)


def test_initial_scale(tmp_path):
    found = results("initial_scale", tmp_path)
    rows, scales = found["rows"], found["scales"]
    first, last = rows[0], rows[-1]
    assert (first["scale"], last["scale"]) == (scales[0], scales[-1])
    assert (scales[0], scales[-1]) == pytest.approx((1e-5, 1.0), rel=1e-12)
    cycle = ["focus", "dilution", "new direction"]
    assert first["names"] == found["expected"] == ["condensation", *cycle, *cycle]
    assert first["condensation_rate"] == pytest.approx(RATE, rel=1e-3)
    assert first["focus_rate"] == pytest.approx(kappa(P), rel=0.01)
    assert first["condensation"] == pytest.approx(1, abs=1e-4)
    assert first["phi"] == pytest.approx(1, abs=1e-3)
    assert last["names"] != first["names"]

    def off(row):
        errors = [
            row["condensation_rate"] / RATE - 1,
            row["focus_rate"] / kappa(P) - 1,
        ]
        return not np.all(np.abs(errors) <= 0.1)  # also if one is NaN

    assert found["rates_end"] == min(r["scale"] for r in rows if off(r))
    assert found["sequence_ends"] == min(
        r["scale"] for r in rows if r["names"] != first["names"]
    )
    assert found["cycle_ends"] == min(
        r["scale"] for r in rows if r["names"][:4] != first["names"][:4]
    )
