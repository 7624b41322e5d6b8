"""The experiments on discrete training, with `--quick`: their numbers agree with
recursions written by hand."""

import numpy as np
import oracles
import pytest
from experiment_runs import results

import gradflow


def descend(eta, steps):
    """Gradient descent with the closed-form gradient on the reference instance, from
    the experiments' start, and the flow at the same times; both flattened."""
    pi = np.array(oracles.REFERENCE_LAW)
    P = oracles.sticky(pi, oracles.REFERENCE_STICKINESS)
    start = gradflow.OneLayerTransformer(4, 10).init(0, 1e-3)
    weights = [np.asarray(getattr(start, name)) for name in oracles.SHAPES]
    first = weights
    iterates = []
    for _ in range(steps + 1):
        iterates.append(np.concatenate([w.ravel() for w in weights]))
        _, slopes, _, _ = oracles.infinite_context_gradient(pi, P, *weights)
        weights = [w - eta * g for w, g in zip(weights, slopes, strict=True)]
    ts = eta * np.arange(steps + 1)
    return np.array(iterates), oracles.scipy_flow(pi, P, first, ts, rtol=1e-10)


def test_gradient_descent(tmp_path):
    found = results("gradient_descent", tmp_path)
    # The error computed by hand, at all steps.
    iterates, flow = descend(0.1, 300)
    errors = np.linalg.norm(iterates - flow, axis=1)
    assert found["halved_errors"][0] == pytest.approx(errors.max(), rel=2e-2)
    first, second, third = found["halved_errors"]
    assert first / second == pytest.approx(2, abs=0.1)
    assert second / third == pytest.approx(2, abs=0.1)
    np.testing.assert_allclose(found["slopes"], 1, atol=0.05)
    # No rate below the edge at the horizon breaks; the largest rate, beyond it, does.
    edge = 2 / np.max(found["sharpness"])
    assert all(b["eta"] > edge for b in found["breaks"])
    assert max(found["rates"]) in [b["eta"] for b in found["breaks"]]
    assert all(b["product"] > 2 for b in found["breaks"])


def test_optimisers(tmp_path):
    found = results("optimisers", tmp_path)
    for name in ("SGD", "momentum"):
        row = found["rows"][name]
        assert row["same_order"] == row["seeds"] == 2
    # Condensation with momentum in the linearised flow at 0, by hand: the growth factor
    # z of (z - 1)(z - β) = η μ z, compared with exp(μ t) on the clock Σ η/(1-β).
    (rate,) = [s["rate"] for s in found["flow_stages"] if s["name"] == "condensation"]
    beta, worth = 0.9, 0.3
    eta = worth * (1 - beta)
    z = np.max(np.roots([1, -(1 + beta + eta * rate), beta]))
    expected = rate * worth / np.log(z)
    flow = found["flow_openings"]["condensation"]
    times = np.array(found["rows"]["momentum"]["openings"]["condensation"])
    np.testing.assert_allclose(times / flow, expected, rtol=0.06)
    np.testing.assert_allclose(
        np.array(found["rows"]["SGD"]["openings"]["condensation"]) / flow, 1, atol=0.1
    )
    for run in found["runs"]:
        assert run["final_loss"] > found["floor"]


def test_paper_size(tmp_path):
    found = results("paper_size", tmp_path)["runs"]
    trained, exact = found
    assert trained["clock"] == "steps"
    for run in found:
        assert [a["block"] for a in run["acquisitions"]] == [1, 2]
        assert run["acquisitions"][0]["heads"] == [1, 2]
        assert run["final_rung"] == 2
        assert run["final_loss"] > run["floor"]
        np.testing.assert_allclose(
            np.sum(run["final_attention_to_blocks"], axis=1), 1, rtol=1e-12
        )
    assert exact["final_loss"] - exact["floor"] < 0.05
