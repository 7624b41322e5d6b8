"""Experiments 2 to 4 with `--quick`: their numbers agree with the closed forms."""

import subprocess
import sys

import numpy as np
import oracles
import pytest
from experiment_runs import EXPERIMENTS, results

PI = oracles.REFERENCE_LAW
P = oracles.sticky(PI, oracles.REFERENCE_STICKINESS)
WIDTH = 10


def run(name, *options):
    return subprocess.run(
        [sys.executable, str(EXPERIMENTS / f"{name}.py"), *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
    )


def order(x, y):
    return np.polyfit(np.log(x), np.log(y), 1)[0]


def is_falling(errors):
    return np.all(np.diff(errors) < 0)


@pytest.mark.parametrize(
    "name", ["condensation", "first_saddle_and_focus", "linearisation"]
)
def test_unknown_options_are_refused(name):
    done = run(name, "--quik")
    assert done.returncode == 2
    assert "--quik" in done.stderr


def test_condensation(tmp_path):
    found = results("condensation", tmp_path)
    scales, mu = found["scales"], oracles.first_rate(PI)
    errors = np.abs(np.array(found["rates"])[:, 0] / mu - 1)
    assert scales[-1] == 1e-6
    assert errors[-1] < 0.01
    assert is_falling(errors)
    assert order(scales, errors) == pytest.approx(1, rel=0.05)

    tilts = np.array(found["misalignments"])[:, 0]
    assert tilts[scales.index(1e-4)] < 1e-3
    assert order(scales, tilts) == pytest.approx(2, rel=0.05)

    focus = np.array(found["focus"])[:, 0]
    assert order(scales, focus) == pytest.approx(2, rel=0.05)
    growth = np.array(found["attention_growth"])[:, 0]
    np.testing.assert_allclose(growth, growth[-1], rtol=0.01)

    for law, rate in zip(found["random_laws"], found["random_laws_rates"], strict=True):
        assert rate == pytest.approx(oracles.first_rate(np.array(law)), rel=0.01)


@pytest.fixture(scope="module")
def focus(tmp_path_factory):
    return results("first_saddle_and_focus", tmp_path_factory.mktemp("focus"))


def test_first_saddle(focus):
    _, gamma, beta = oracles.first_saddle(PI, WIDTH, WIDTH)
    g = np.linalg.norm(gamma)
    W0, W1 = np.array(focus["saddle_W0"]), np.array(focus["saddle_W1"])
    finest = focus["saddles"][-1]
    assert focus["scales"][-1] == 1e-6
    for saddle in focus["saddles"]:
        assert saddle["loss"] == pytest.approx(oracles.entropy(PI), abs=1e-12)
        assert saddle["index"] == WIDTH
    assert finest["attention"] < 1e-5 * g
    # Rank one, along π and along c, from the weights themselves.
    assert np.linalg.norm(W0 @ W1 - np.outer(gamma, beta)) < 1e-4 * g**2
    for matrix, direction in ((W0, gamma), (W1.T, beta)):
        U, s, _ = np.linalg.svd(matrix)
        assert s[0] == pytest.approx(g, rel=1e-4)
        assert s[1] < 1e-5 * g
        assert abs(U[:, 0] @ direction) / g > 1 - 1e-6
    # The flow comes nearer and nearer to θ¹ as ε falls.
    misses = [saddle["miss_of_M"] for saddle in focus["saddles"]]
    assert is_falling(misses)
    assert is_falling([saddle["distance"] for saddle in focus["saddles"]])
    s, kappa = focus["slowest_relaxation"], oracles.focus_rate(PI, P, gamma, beta)
    assert order(focus["scales"], misses) == pytest.approx(
        2 * s / (s + kappa), rel=0.05
    )


def test_focus_of_the_reference_chain(focus):
    _, gamma, beta = oracles.first_saddle(PI, WIDTH, WIDTH)
    kappa = oracles.focus_rate(PI, P, gamma, beta)
    eigenvalues = np.array(focus["eigenvalues"])
    np.testing.assert_allclose(eigenvalues[:WIDTH], -kappa, rtol=1e-9)
    assert eigenvalues[WIDTH] > -1e-12

    scales = focus["scales"]
    errors = np.abs(np.array(focus["rates"]) / kappa - 1)
    assert errors[-1] < 0.01
    assert is_falling(errors)
    s = focus["slowest_relaxation"]
    assert np.min(np.abs(eigenvalues - s)) == 0
    assert order(scales, errors) == pytest.approx(2 * s / (s + 2 * kappa), rel=0.05)
    assert focus["cosines"][scales.index(1e-4)] > 0.999
    tilts = 1 - np.array(focus["cosines"])
    assert order(scales, tilts) == pytest.approx(2, rel=0.05)


def test_focus_of_other_chains(focus):
    signs = set()
    for row in focus["chains"]:
        transition = np.array(row["transition"])
        pi = oracles.exact_stationary_law(transition)
        _, gamma, beta = oracles.first_saddle(pi, WIDTH, WIDTH)
        kappa = oracles.focus_rate(pi, transition, gamma, beta)
        signs.add(np.sign(kappa))
        eigenvalues = np.array(row["eigenvalues"])
        np.testing.assert_allclose(eigenvalues[:WIDTH], -abs(kappa), rtol=1e-9)
        assert eigenvalues[WIDTH] > -1e-12
        assert row["scales"][-1] == 1e-6
        errors = np.abs(np.array(row["rates"]) / abs(kappa) - 1)
        assert errors[-1] < 0.01
        assert is_falling(errors)
        assert row["cosines"][row["scales"].index(1e-4)] * np.sign(kappa) > 0.999
    assert signs == {1, -1}
    kinds = {row["name"].split()[0] for row in focus["chains"]}
    assert kinds == {"sticky", "not", "Metropolis"}


def test_embeddings_respond_at_second_order(focus):
    found = focus["response"]
    attention, moved = np.array(found["attention"]), np.array(found["moved"])
    assert attention[-1] > 10 * attention[0]
    assert order(attention, moved) == pytest.approx(2, rel=0.05)
    np.testing.assert_allclose(moved / attention**2, found["coefficient"], rtol=0.05)


def test_linearisation(tmp_path):
    found = results("linearisation", tmp_path)
    _, gamma, beta = oracles.first_saddle(PI, WIDTH, WIDTH)
    mu, kappa = oracles.first_rate(PI), oracles.focus_rate(PI, P, gamma, beta)
    for name, power, rate in (("at_zero", 3, mu), ("at_first_saddle", 2, kappa)):
        compared = found[name]
        errors = np.array(compared["errors"])
        for at_a_time in errors.T:
            slope = order(compared["scales"], at_a_time)
            assert slope == pytest.approx(power, rel=0.05)
        # Within C ε^p e^{pμt} all the way, and at the end growing at that rate.
        ts = np.array(compared["ts"])
        bound = errors[:, -1:] * np.exp(power * rate * (ts - ts[-1]))
        assert rate * ts[-1] > 2.9
        assert np.all(errors < 1.05 * bound)
        end = ts > 0.75 * ts[-1]
        for e in errors:
            growth = np.polyfit(ts[end], np.log(e[end]), 1)[0]
            assert growth == pytest.approx(power * rate, rel=0.05)

    stay = found["stay"]
    logs = -np.log(stay["scales"])
    first = np.array(stay["left"]) - np.array(stay["arrived"])
    for times, rate in ((stay["left_zero"], mu), (first, kappa)):
        assert np.polyfit(logs, times, 1)[0] == pytest.approx(1 / rate, rel=0.05)
