"""The experiments on the rank-one manifold, with `--quick`: their numbers agree with
closed forms and with the rank-one flow of a hand-written gradient, by SciPy."""

import numpy as np
import oracles
import pytest
from experiment_runs import results
from scipy.integrate import solve_ivp

PI = oracles.REFERENCE_LAW
LAMBDA = oracles.REFERENCE_STICKINESS


@pytest.fixture(scope="module")
def dilution(tmp_path_factory):
    return results("dilution", tmp_path_factory.mktemp("dilution"))


@pytest.fixture(scope="module")
def degenerate(tmp_path_factory):
    return results("degenerate_point", tmp_path_factory.mktemp("degenerate"))


#
# The rank-one manifold in NumPy and SciPy
#


def parts(pi, y):
    """The gradient on the manifold, G_M, G_Φ and B = [G_M, k G_Φγ, q G_Φᵀγ]."""
    d = len(pi)
    gamma, beta, q, k = y[:d], y[d : 2 * d], y[-2], y[-1]
    P = oracles.sticky(pi, LAMBDA)
    one = np.ones((1, 1))
    _, weights, G_M, G_Phi = oracles.infinite_context_gradient(
        pi, P, gamma[:, None], q * one, k * one, beta[None]
    )
    W0, WQ, WK, W1 = weights
    gradient = np.concatenate([W0.ravel(), W1.ravel(), WQ.ravel(), WK.ravel()])
    B = np.column_stack([G_M, k * G_Phi @ gamma, q * G_Phi.T @ gamma])
    return gradient, G_M, G_Phi, B


def orbit(pi, t1):
    """The rank-one flow that leaves θ¹ along the focus direction."""
    _, gamma, beta = oracles.first_saddle(pi, 1, 1)
    solution = solve_ivp(
        lambda _, y: -parts(pi, y)[0],
        (0, t1),
        np.concatenate([gamma, beta, [1e-7, 1e-7]]),
        method="LSODA",
        rtol=1e-10,
        atol=1e-13,
        max_step=20.0,
    )
    assert solution.success
    return solution.y.T


def attention(pi, y):
    scores = y[-2] * y[-1] * np.outer(y[:4], y[:4])
    weights = pi * np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights[:, 0] / weights.sum(axis=1)


def flat(end):
    return np.concatenate([end["gamma"], end["beta"], [end["q"], end["k"]]])


def largest(matrix):
    return np.linalg.svd(matrix, compute_uv=False)[0]


def slope(x, y):
    return np.polyfit(np.log(x), np.log(y), 1)[0]


def split_law(split):
    return np.array([0.7, 0.1 + split, 0.1, 0.1 - split])


#
# Experiment 5
#


@pytest.fixture(scope="module")
def reference_orbit():
    return orbit(PI, 3000.0)


@pytest.fixture(scope="module")
def rate(reference_orbit):
    """μ = σ₁(B) at the end of the orbit."""
    return largest(parts(PI, reference_orbit[-1])[3])


def test_the_flows_part_at_the_rate_across_the_manifold(dilution, rate):
    assert dilution["rate_measured"] == pytest.approx(rate, rel=0.01)
    assert dilution["rate_across"] == pytest.approx(rate, rel=1e-5)


def test_that_rate_is_an_eigenvalue_of_the_full_hessian(dilution, rate):
    lowest = np.array(dilution["hessian_lowest"])
    np.testing.assert_allclose(lowest[:9], -rate, rtol=1e-5)
    assert abs(lowest[9]) < 0.01 * rate


def test_the_orbit_ends_where_scipy_says(dilution, reference_orbit):
    y = flat(dilution["end"])
    gradient, _, G_Phi, _ = parts(PI, y)
    assert np.linalg.norm(gradient) < 1e-14
    assert np.linalg.norm(G_Phi) < 1e-14
    np.testing.assert_allclose(y, reference_orbit[-1], rtol=1e-5)


def test_parting_takes_longer_for_a_smaller_start_as_linear_theory_says(dilution, rate):
    _, gamma, beta = oracles.first_saddle(PI, 1, 1)
    kappa = oracles.focus_rate(PI, oracles.sticky(PI, LAMBDA), gamma, beta)
    expected = 1 / oracles.first_rate(PI) + 1 / kappa + 1 / rate
    times, scales = dilution["parted_1_percent"], dilution["scales"]
    found = np.polyfit(np.log(1 / np.array(scales)), times, 1)[0]
    assert found == pytest.approx(expected, rel=0.02)
    assert dilution["linear_parting"] == pytest.approx(times[-1], rel=1e-3)


def test_focus_peaks_and_decays(dilution, reference_orbit):
    seen = np.array([attention(PI, y) for y in reference_orbit])
    np.testing.assert_allclose(dilution["peaks"], seen.max(axis=0), rtol=1e-3)
    # theory.md
    np.testing.assert_allclose(
        dilution["peaks"], [1.0, 0.773, 0.754, 0.751], rtol=0, atol=1e-3
    )
    np.testing.assert_allclose(dilution["end_attention"], seen[-1], rtol=1e-4)
    # At parting the flow has not quite got there: its slowest rate is 0.011.
    np.testing.assert_allclose(dilution["decayed"], seen[-1], rtol=0.05)
    np.testing.assert_allclose(
        dilution["decayed"], dilution["orbit_decayed"], rtol=1e-3
    )
    rare = slice(1, None)
    assert np.all(np.array(dilution["decayed"])[rare] < 0.65 * PI[0])


def test_frequent_and_rare_embeddings_move_in_opposite_senses(
    dilution, reference_orbit
):
    _, first, _ = oracles.first_saddle(PI, 1, 1)
    moved = np.array(dilution["gamma_moved"])
    expected = reference_orbit[-1, :4] - first
    np.testing.assert_array_equal(np.sign(moved), [1, -1, -1, -1])
    np.testing.assert_allclose(moved, expected, rtol=0.01)


#
# Experiment 6
#


def test_without_a_split_both_gradients_vanish(degenerate):
    gradient, G_M, G_Phi, _ = parts(split_law(0.0), flat(degenerate["ends"][0]))
    assert np.linalg.norm(gradient) < 1e-14
    assert np.linalg.norm(G_M) < 1e-14
    assert np.linalg.norm(G_Phi) < 1e-14
    assert min(degenerate["degenerate_lowest"]) > -1e-14


def test_without_a_split_the_full_flow_stalls(degenerate):
    t, speed = (np.array(degenerate[n]) for n in ("stall_times", "stall_speed"))
    assert t[-1] >= 1e5
    # The speed falls by orders of magnitude to rounding, and stays there.
    for early, late in ((250, 350), (350, 500), (500, 2000)):
        assert np.interp(late, t, speed) < 0.1 * np.interp(early, t, speed)
    assert speed[t > 2000].max() < 1e-14
    second = np.array(degenerate["stall_second"])
    assert second[-1] == pytest.approx(second[np.argmax(t > 1000)], rel=1e-6)
    assert np.array(degenerate["stall_G_M"])[-1] < 1e-12
    assert np.array(degenerate["stall_G_Phi"])[-1] < 1e-12


def test_ends_are_critical_points_where_scipy_says(degenerate):
    splits = [0.0, *degenerate["splits"]]
    for split, end in zip(splits, degenerate["ends"], strict=True):
        assert np.linalg.norm(parts(split_law(split), flat(end))[0]) < 1e-14
    np.testing.assert_allclose(
        flat(end), orbit(split_law(split), 1000.0)[-1], rtol=1e-5
    )


def test_transverse_eigenvalues_are_proportional_to_the_split(degenerate):
    splits, mu = np.array(degenerate["splits"]), np.array(degenerate["transverse"])
    assert splits.min() <= 1e-5
    assert splits.max() <= 1e-3 + 1e-12
    expected = [
        largest(parts(split_law(split), flat(end))[3])
        for split, end in zip(splits, degenerate["ends"][1:], strict=True)
    ]
    np.testing.assert_allclose(mu, expected, rtol=1e-6)
    assert slope(splits, mu) == pytest.approx(1.0, rel=0.05)
    assert degenerate["multiplicity"] == [9] * len(splits)


def test_tangential_eigenvalues_are_of_second_order_at_most(degenerate):
    for split, end, found in zip(
        degenerate["splits"],
        degenerate["ends"][1:],
        degenerate["tangential"],
        strict=True,
    ):
        assert found <= 1e-3 * split**2
        assert found < 1e-14
        # Central differences of the hand-written gradient, accurate to 1e-9.
        pi, y, h = split_law(split), flat(end), 1e-5
        H = np.array(
            [
                (parts(pi, y + h * e)[0] - parts(pi, y - h * e)[0]) / (2 * h)
                for e in np.eye(len(y))
            ]
        )
        assert np.linalg.eigvalsh(0.5 * (H + H.T))[0] > -max(1e-9, 1e-3 * split**2)


def test_the_next_cycle_comes_when_linear_theory_says(degenerate):
    for run in degenerate["escapes"]:
        assert run["time"] == pytest.approx(run["expected"], rel=0.02)
    # Between two initial scales at the same split: 1/μ per e-fold.
    split = max(run["split"] for run in degenerate["escapes"])
    a, b = (run for run in degenerate["escapes"] if run["split"] == split)
    mu = largest(parts(split_law(split), flat(degenerate["ends"][-1]))[3])
    folds = np.log(b["scale"] / a["scale"])
    assert (a["time"] - b["time"]) * mu == pytest.approx(folds, rel=0.05)


def test_the_time_to_the_next_cycle_grows_as_one_over_the_split(degenerate):
    runs = [run for run in degenerate["escapes"] if run["scale"] == 1e-8]
    splits = np.array([run["split"] for run in runs])
    # σ₂ grows from a multiple of ε to a multiple of √δ; the rest is 1/μ ∝ 1/δ.
    folds = np.log([run["largest"] / run["scale"] for run in runs])
    times = np.array([run["time"] for run in runs])
    assert slope(splits, times / folds) == pytest.approx(-1.0, rel=0.05)
    assert slope(splits, [run["largest"] for run in runs]) == pytest.approx(
        0.5, rel=0.05
    )
