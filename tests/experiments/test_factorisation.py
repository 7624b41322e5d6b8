"""The experiments on the tensor factorisation, with `--quick`: their numbers agree with
closed forms and SciPy."""

import jax
import numpy as np
import pytest
from experiment_runs import results
from scipy.integrate import solve_ivp

RATIO, HEADS, POSITIONS = 1.7, 3, 40
IMPORTANCE = RATIO ** -np.arange(3.0)
SIZES = np.sqrt(50) * IMPORTANCE


def states(G, geometry, scale, times):
    """V and s at the given times, from theory.md's equations by SciPy, starting at
    `TensorFactorisation.init(seed=0, scale=scale)`."""
    F, T = G.shape
    a = scale * np.asarray(jax.random.normal(jax.random.key(0), (HEADS, T), float))

    def softmax(a):
        e = np.exp(a - a.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    attention = softmax if geometry == "scores" else (lambda s: s)

    def field(_, y):
        V = y[: HEADS * F].reshape(HEADS, F)
        s = attention(y[HEADS * F :].reshape(HEADS, T))
        R = G - V.T @ s
        g = V @ R
        moved = s * (g - np.sum(s * g, axis=1, keepdims=True))
        return np.concatenate([(s @ R.T).ravel(), moved.ravel()])

    first = a if geometry == "scores" else softmax(a)
    y0 = np.concatenate([np.zeros(HEADS * F), first.ravel()])
    ends = (0.0, float(times[-1]))
    found = solve_ivp(field, ends, y0, "LSODA", t_eval=times, rtol=1e-10, atol=1e-13)
    for y in found.y.T:
        yield (
            y[: HEADS * F].reshape(HEADS, F),
            attention(y[HEADS * F :].reshape(HEADS, T)),
        )


def orthogonal():
    G = np.zeros((3, POSITIONS))
    G[:, :3] = np.diag(SIZES)
    return G


def test_heads_simulation(tmp_path):
    found = results("heads_simulation", tmp_path)
    np.testing.assert_allclose(found["sizes"], SIZES, rtol=1e-12)
    levels = [0.5 * np.sum(SIZES[k:] ** 2) for k in range(4)]
    np.testing.assert_allclose(found["levels"], levels, rtol=1e-12, atol=1e-15)
    assert found["d"] == 50
    assert np.max(np.abs(found["cosines"])) < 1e-12
    for rows in found["geometries"].values():
        assert rows["acquired"] == [0, 1, 2]
        assert rows["names"] == ["competitive", "cooperative", "cooperative"]
        assert sorted(rows["heads"][0]) == [0, 1, 2]
        assert len({*rows["heads"][1], *rows["heads"][2]}) == 2
        assert rows["overlaps"][0] > 0.99
        assert np.max(rows["overlaps"][1:]) < 0.5
        bounds = [0, *rows["boundaries"], 1e5]
        for t, start, end in zip(rows["times"], bounds[:-1], bounds[1:], strict=True):
            assert start < t < end
        np.testing.assert_allclose(rows["plateau_losses"], levels[1:3], rtol=0.002)
        assert 0 <= rows["final_loss"] < 1e-5 * levels[0]
        assert rows["field_error"] < 1e-12
        assert rows["energy_imbalance"] < 1e-6 * levels[0]


def test_head_separation(tmp_path):
    found = results("head_separation", tmp_path)
    # In scores, the square of the largest singular value of the matrix that couples
    # values along A_2, A_3 with scores of positions 1, 2, 3, in the limit; and the
    # replicator's rate.
    w = np.sqrt([HEADS / (2 * POSITIONS * (RATIO**p - 1)) for p in (2, 4)])
    coupling = np.array([[-1, -1], [1, 0], [0, 1]])
    kappa = {
        "scores": np.linalg.norm(coupling * w, 2) ** 2,
        "replicator": HEADS / (RATIO**2 - 1),
    }
    for geometry, rows in found["geometries"].items():
        times = np.array(rows["times"])
        np.testing.assert_allclose(times, rows["predicted"], rtol=0.05)
        # Each factor in 1/ε takes longer than the one before: faster than log(1/ε).
        assert np.all(np.diff(times, 2) > 0)
        slope = rows["root_slope"]
        assert slope == pytest.approx(0.5 * kappa[geometry] ** -0.5, rel=0.2)
        assert rows["unit_overlap_gap"] < 1e-9
        # Check with another solver at the time of separation.
        ((_, s),) = states(orthogonal(), geometry, rows["scales"][0], times[:1])
        z = np.log(s[:, 1])
        assert np.max(np.abs(z - z.mean())) == pytest.approx(0.25, rel=1e-3)
    at = found["eigenvalue_times"][:1]
    ((_, s),) = states(orthogonal(), "scores", 0.0, at)
    assert found["predicted_eigenvalues"][0] == pytest.approx(
        -np.linalg.norm(coupling * SIZES[1:] * s[0, 1:3], 2), rel=1e-5
    )
    lowest = np.array(found["lowest_eigenvalues"])
    assert np.all(np.diff(lowest) > 0)  # the rate is not constant
    assert lowest[-1] == pytest.approx(found["predicted_eigenvalues"][-1], rel=0.02)


def test_stagewise_convergence(tmp_path):
    found = results("stagewise_convergence", tmp_path)["geometries"]
    first, others = IMPORTANCE[0] ** 2, IMPORTANCE[1:] ** 2
    free = POSITIONS - 3
    sums, gaps = first + others, first - others
    C = {
        "scores": np.sqrt((free + np.sum(sums / gaps)) / (2 * POSITIONS)),
        "replicator": np.sqrt(free / first + np.sum(sums / gaps**2)),
    }
    for geometry, n in (("scores", 0.5), ("replicator", 1.0)):
        one = found[geometry]["laws"]["1"]
        assert one["C_theory"] == pytest.approx(C[geometry], rel=0.02)
        assert one["C"] == pytest.approx(C[geometry], rel=0.02)
        assert one["power"] == pytest.approx(1 + 1 / n, rel=0.01)
        assert one["excess_power"] == pytest.approx(2, rel=0.01)
        ends = [p["end"] for p in found[geometry]["plateaus"]]
        starts = [p["start"] for p in found[geometry]["plateaus"]]
        assert ends[:-1] == starts[1:]
        last = found[geometry]["plateaus"][-1]
        assert last["power"] == pytest.approx(1 + 1 / n, rel=0.02)
