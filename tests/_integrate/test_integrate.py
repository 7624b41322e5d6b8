"""integrate(): right, certified, and saved as asked for."""

import math

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from quadratics import HESSIAN, START, exact_quadratic, flat, quadratic

import gradflow
from gradflow import InfiniteContext, MarkovChain, OneLayerTransformer, Problem
from gradflow._integrate._request import default_atol


def flat_weights(flow):
    return np.concatenate(
        [getattr(flow.params, n).reshape(len(flow.ts), -1) for n in oracles.SHAPES], 1
    )


#
# Right
#


@pytest.mark.parametrize("solver", ["tsit5", "dopri8", diffrax.Dopri5()])
@pytest.mark.parametrize("rtol", [1e-5, 1e-8])
def test_quadratic_flow_is_the_matrix_exponential(solver, rtol):
    flow = gradflow.integrate(quadratic, START, 3.0, solver=solver, rtol=rtol)
    exact = np.stack([exact_quadratic(t) for t in flow.ts])
    error = np.abs(flat(jax.tree.map(np.asarray, flow.params)) - exact)
    assert np.max(error) < 10 * rtol * np.max(np.abs(exact))
    np.testing.assert_allclose(
        flow.loss,
        0.5 * np.einsum("ti,ij,tj->t", exact, HESSIAN, exact),
        atol=1e2 * rtol,
    )
    np.testing.assert_allclose(
        flow.speed, np.linalg.norm(exact @ HESSIAN, axis=1), rtol=1e3 * rtol
    )


@pytest.mark.parametrize("scale", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_whole_trajectory_is_scipys(reference, scale, weights):
    params = reference.init(seed=1, scale=scale)
    flow = gradflow.integrate(reference, params, 400.0, observables=())
    exact = oracles.scipy_flow(
        oracles.REFERENCE_LAW,
        oracles.sticky(oracles.REFERENCE_LAW, 0.5),
        weights(params),
        flow.ts,
    )
    error = np.max(np.abs(flat_weights(flow) - exact))
    assert error < 10 * 1e-8 * np.max(np.abs(exact))
    assert flow.loss[-1] < 0.66  # past condensation (0.727) and into focus
    # With an absolute tolerance that followed nothing, a start at 1e-6 would lose its
    # digits at the first saddle; this one keeps them relative to its own size.
    early = flow.ts < 10
    assert np.max(np.abs(flat_weights(flow) - exact)[early]) < 1e-6 * np.max(
        np.abs(exact[early])
    )


@pytest.mark.parametrize("seed", range(3))
def test_conserved_quantities_drift_by_less_than_1e_9(reference, seed):
    flow = gradflow.integrate(reference, reference.init(seed=seed), 600.0)
    assert set(flow.certificate.drift) == set(reference.conserved(flow.final))
    assert max(flow.certificate.drift.values()) < 1e-9
    # The certificate against a second computation of the same drift, by hand.
    W0, WQ, WK, W1 = (getattr(flow.params, n) for n in oracles.SHAPES)
    gram = {"W0": np.einsum("tdi,tdj->tij", W0, W0)}
    gram |= {
        name: np.einsum("tid,tjd->tij", w, w)
        for name, w in (("W1", W1), ("WQ", WQ), ("WK", WK))
    }
    balance = gram["W0"] - gram["W1"] - gram["WQ"] - gram["WK"]
    drift = np.max(np.abs(balance - balance[0]))
    scale = max(np.max(np.abs(g)) for g in gram.values())
    assert flow.certificate.drift["embedding_balance"] == pytest.approx(
        drift / scale, rel=1e-2
    )


def test_energy_balance(reference_flow):
    certificate = reference_flow.certificate
    assert certificate.energy_released == pytest.approx(
        reference_flow.loss[0] - reference_flow.loss[-1], rel=1e-14
    )
    assert certificate.energy_imbalance < 1e-8
    assert certificate.quadrature_error < 1e-8
    assert certificate.largest_rise == 0.0


def test_certificate_of_a_loose_flow_is_worse(reference, reference_flow):
    loose = gradflow.integrate(reference, reference.init(), 400.0, rtol=1e-4)
    tight = reference_flow.certificate
    assert loose.certificate.energy_imbalance > 100 * tight.energy_imbalance
    assert max(loose.certificate.drift.values()) > 100 * max(tight.drift.values())


def test_energy_balance_against_the_exact_energy_of_a_quadratic():
    flow = gradflow.integrate(quadratic, START, 2.0)
    x0, x1 = exact_quadratic(0.0), exact_quadratic(2.0)
    released = 0.5 * (x0 @ HESSIAN @ x0 - x1 @ HESSIAN @ x1)
    assert flow.certificate.energy_released == pytest.approx(released, rel=1e-7)
    assert flow.certificate.energy_imbalance < 1e-6 * released
    assert flow.certificate.drift == {}


def test_a_rise_of_the_loss_is_reported():
    """A vector field that is no gradient: the loss's derivative is told a lie."""

    @jax.custom_jvp
    def climbing(x):
        return jnp.sum(x**2)

    climbing.defjvp(lambda x, v: (climbing(x[0]), -jnp.sum(x[0] * v[0])))
    flow = gradflow.integrate(climbing, jnp.ones(2), 1.0, ts=[0.0, 0.5, 1.0])
    exact = 2 * np.exp(2 * np.array([0.5, 1.0]))
    assert flow.certificate.largest_rise == pytest.approx(exact[1] - exact[0], rel=1e-6)
    assert flow.certificate.energy_imbalance > 1


def test_uniform_law_stays_on_its_plateau():
    chain = MarkovChain.sticky(np.full(4, 0.25), 0.5)
    problem = Problem(OneLayerTransformer(4, 10), InfiniteContext(chain))
    flow = gradflow.integrate(problem, problem.init(), 300.0)
    np.testing.assert_allclose(flow.loss, np.log(4), rtol=1e-6)
    assert np.max(flow.observables["singular_values_W0"]) < 0.05
    assert flow.result == diffrax.RESULTS.successful


def test_zero_start_stays_at_zero(reference):
    flow = gradflow.integrate(reference, reference.init(scale=0.0), 10.0)
    assert flow.settings.atol == 1e-3 * 1e-8 * 1e-8
    np.testing.assert_allclose(flow.loss, np.log(4), rtol=1e-15)


def test_atol_follows_the_initial_scale(reference):
    params = reference.init(scale=1e-5)
    flow = gradflow.integrate(reference, params, 1.0, rtol=1e-6, observables=())
    leaves = [np.ravel(x) for x in jax.tree.leaves(params)]
    rms = np.sqrt(np.mean(np.concatenate(leaves) ** 2))
    assert flow.settings.atol == pytest.approx(1e-3 * 1e-6 * rms, rel=1e-12)


def test_atol_of_starts_whose_squares_are_no_numbers():
    y0 = np.array([[3.0, -4.0], [3e200, -4e200], [3e-200, 4e-200], [0.0, 0.0]])
    rms, least = math.sqrt(12.5), 1e-8
    wanted = 1e-9 * np.array([rms, 1e200 * rms, least, least])
    np.testing.assert_allclose(default_atol(y0, 1e-6), wanted, rtol=1e-15)
    for start, atol in zip(y0, wanted, strict=True):
        assert default_atol(start, 1e-6) == pytest.approx(atol, rel=1e-15)


def test_single_precision_parameters_flow_in_double(reference):
    params = jax.tree.map(lambda x: x.astype(np.float32), reference.init())
    flow = gradflow.integrate(reference, params, 1.0)
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(flow.params))
    assert flow.stats.notes == ("`params.W1` was promoted from float32 to float64",)
    assert "note             `params.W1` was promoted" in str(flow)
    double = gradflow.integrate(reference, reference.init(), 1.0)
    assert double.stats.notes == ()


#
# What is saved
#


def test_default_times_are_zero_and_a_geometric_grid(reference_flow):
    ts = reference_flow.ts
    assert ts[0] == 0
    assert ts[-1] == 400.0
    ratios = ts[2:] / ts[1:-1]
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-9)


def test_given_times_are_kept_as_they_are():
    ts = [0.1, 0.2, 1.5]
    flow = gradflow.integrate(quadratic, START, 2.0, ts=ts)
    np.testing.assert_array_equal(flow.ts[:3], ts)
    assert len(flow.ts) == 4  # where the flow ended comes last
    assert flow.ts[-1] == 2.0


def test_observables_are_those_of_the_saved_parameters(reference, reference_flow):
    index = 150
    params = jax.tree.map(lambda x: jnp.asarray(x[index]), reference_flow.params)
    for name, function in reference.observables.items():
        np.testing.assert_allclose(
            reference_flow.observables[name][index], function(params), atol=1e-10
        )
    assert reference_flow.loss[index] == pytest.approx(float(reference(params)), 1e-14)


def test_chosen_observables(reference):
    params = reference.init()
    named = gradflow.integrate(reference, params, 1.0, observables=["alignment"])
    assert set(named.observables) == {"alignment"}
    own = gradflow.integrate(
        reference, params, 1.0, observables={"norm": lambda p: jnp.sum(p.W0**2)}
    )
    np.testing.assert_allclose(
        own.observables["norm"], np.sum(own.params.W0**2, axis=(1, 2)), rtol=1e-12
    )
    assert gradflow.integrate(reference, params, 1.0, observables=()).observables == {}


def test_large_observables_must_be_asked_for():
    d = 300
    chain = MarkovChain.sticky(np.full(d, 1 / d), 0.5)
    problem = Problem(OneLayerTransformer(d, 2), InfiniteContext(chain))
    params, ts = problem.init(), [0.0, 1.0]
    short = {"ts": ts, "solver": "tsit5"}
    default = gradflow.integrate(problem, params, 1.0, **short)
    assert "attention" not in default.observables
    assert "attention_entropy" in default.observables
    asked = gradflow.integrate(problem, params, 1.0, observables=["attention"], **short)
    assert asked.observables["attention"].shape == (2, d, d)


@pytest.mark.parametrize(("rtol", "most"), [(1e-4, 2.0), (1e-6, 0.9)])
def test_energy_balance_is_as_fine_as_the_tolerance_asks_for(reference, rtol, most):
    """Its quadrature is well below the imbalance that it is to show, by few evaluations
    a step: split down to rounding it takes more."""
    flow = gradflow.integrate(
        reference, reference.init(), 1e3, rtol=rtol, observables=()
    )
    certificate, stats = flow.certificate, flow.stats
    assert 0 < certificate.quadrature_error < 0.1 * certificate.energy_imbalance
    assert certificate.energy_imbalance < rtol
    per_step = stats["num_certificate_evaluations"] / stats["num_accepted_steps"]
    assert per_step < most
