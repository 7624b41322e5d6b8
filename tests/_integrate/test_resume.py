"""A flow that goes on from its end is the flow that never stopped."""

import jax
import numpy as np
import pytest

import gradflow
from gradflow._core import machine
from gradflow._integrate import _resume
from gradflow._integrate._request import saved_times

HALF, HORIZON = 60.0, 150.0


@pytest.fixture(scope="module")
def problem(reference_chain):
    model = gradflow.OneLayerTransformer(4, 3)
    return gradflow.Problem(model, gradflow.InfiniteContext(reference_chain))


def integrate(problem, t1, **options):
    names = ("alignment", "attention_entropy")
    return gradflow.integrate(
        problem, problem.init(seed=1), t1, observables=names, **options
    )


@pytest.fixture(scope="module")
def whole(problem):
    return integrate(problem, HORIZON)


@pytest.fixture(scope="module")
def half(problem):
    return integrate(problem, HALF)


@pytest.fixture(scope="module")
def resumed(half):
    return gradflow.resume(half, HORIZON)


def assert_follows(flow, whole, rtol=1e-7):
    """At all of its saved times, and in between."""
    assert flow.ts[-1] == whole.ts[-1]
    for times, states in ((flow.ts, flow.params), (MIDDLES, flow.at(MIDDLES))):
        for a, b in zip(
            jax.tree.leaves(states), jax.tree.leaves(whole.at(times)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.max(np.abs(b)))
    for name, seen in flow.observables.items():
        function = whole.problem.observables[name]
        expected = whole.observe(function, flow.ts)
        np.testing.assert_allclose(seen, expected, rtol=1e-6, atol=1e-9)


MIDDLES = np.array([1.0, 30.0, 59.9, 60.1, 77.7, 149.0])


def test_it_is_the_flow_that_never_stopped(resumed, whole, half):
    assert_follows(resumed, whole)
    np.testing.assert_array_equal(resumed.ts[: len(half.ts)], half.ts)
    assert np.all(np.diff(resumed.ts) > 0)
    assert resumed.settings == whole.settings
    assert resumed.result == whole.result
    assert resumed.stats["reason"] == ""
    for name in ("num_accepted_steps", "num_evaluations", "run_seconds"):
        assert resumed.stats[name] > half.stats[name]


def test_the_certificate_is_of_the_whole(resumed, whole, half):
    """Against the laws themselves, at the ends: L(0) - L(t) and Q(t) - Q(0)."""
    certificate = resumed.certificate
    released = float(whole.problem(whole.start) - whole.problem(resumed.final))
    assert certificate.energy_released == pytest.approx(released, rel=1e-10)
    assert certificate.energy_imbalance < 1e-7
    assert certificate.energy_imbalance >= half.certificate.energy_imbalance
    account = resumed.continuation.account
    assert account.integral == pytest.approx(released, abs=1e-7)
    for name, now in whole.problem.conserved(resumed.final).items():
        then = whole.problem.conserved(whole.start)[name]
        largest = resumed.continuation.drift[name]
        assert np.max(np.abs(now - then)) <= largest * (1 + 1e-6) + 1e-16
        assert largest >= half.continuation.drift[name]


def test_a_loaded_flow_goes_on(half, whole, tmp_path):
    loaded = gradflow.Flow.load(half.save(tmp_path / "half.npz"))
    flow = gradflow.resume(loaded, HORIZON, ts=[90.0, HORIZON])
    np.testing.assert_array_equal(flow.ts, [*half.ts, 90.0, HORIZON])
    assert_follows(flow, whole)
    again = gradflow.Flow.load(flow.save(tmp_path / "flow.npz"))
    assert_follows(again, whole)


def test_one_that_was_stopped_goes_on(problem, whole):
    stopped = integrate(problem, HORIZON, max_steps=200, throw=False)
    assert stopped.ts[-1] < HORIZON
    assert_follows(gradflow.resume(stopped, HORIZON), whole)
    with pytest.raises(gradflow.FlowError, match="`max_steps` = 5 steps") as error:
        gradflow.resume(stopped, HORIZON, max_steps=5)
    assert len(error.value.flow.ts) == len(stopped.ts) + 1

    event = integrate(problem, HORIZON, event=lambda p: (p.W0**2).sum() - 1.0)
    assert event.ts[-1] < HORIZON
    assert_follows(gradflow.resume(event, HORIZON), whole)


def test_one_that_never_began_has_times_to_come():
    """Its first step was rejected, and no more were allowed."""
    times = _resume._later_times(None, 0.0, 10.0)
    np.testing.assert_array_equal(times, saved_times(None, 10.0)[1:])


def test_functions_are_given_again(problem, half):
    size = {"size": lambda p: (p.W0**2).sum()}
    flow = gradflow.integrate(problem, problem.init(seed=1), HALF, observables=size)
    with pytest.raises(ValueError, match=r"`observables` must hold.*got no 'size'"):
        gradflow.resume(flow, HORIZON)
    with pytest.raises(ValueError, match=r"`observables` must hold.*also 'length'"):
        gradflow.resume(half, HORIZON, observables={"length": lambda p: 1.0})
    with pytest.raises(ValueError, match="'size' with another shape"):
        gradflow.resume(flow, HORIZON, observables={"size": lambda p: p.W0})
    longer = gradflow.resume(flow, HALF + 1, observables=size)
    expected = [float(np.sum(np.square(p))) for p in longer.params.W0]
    np.testing.assert_allclose(longer.observables["size"], expected, rtol=1e-12)


def test_bad_input_is_refused(half, resumed):
    with pytest.raises(ValueError, match="`flow` must be a Flow"):
        gradflow.resume("flow", HORIZON)
    with pytest.raises(ValueError, match="`t1` must be later than the flow's end"):
        gradflow.resume(half, HALF)
    with pytest.raises(ValueError, match="`ts` must lie between the flow's end"):
        gradflow.resume(half, HORIZON, ts=[10.0, HORIZON])
    lost = gradflow.Flow.from_contents({**half.contents(), "problem": None})
    with pytest.raises(ValueError, match=r"`gradflow.resume` needs the loss"):
        gradflow.resume(lost, HORIZON)
    training = gradflow.train(half.problem, half.start, 0.1, 2)
    with pytest.raises(ValueError, match=r"got a training run.*gradflow\.compare"):
        gradflow.resume(training, HORIZON)


#
# Parameters at some of the saved times
#


def test_parameters_may_be_stored_at_some_times(problem, whole):
    some = whole.ts[[0, 100, 150]]
    flow = integrate(problem, HORIZON, save_params=some, dense_memory=0)
    np.testing.assert_array_equal(flow.params_ts, [*some, HORIZON])
    np.testing.assert_array_equal(flow.ts, whole.ts)
    np.testing.assert_array_equal(flow.loss, whole.loss)
    # Between them it is integrated again, at many times in one go.
    at = flow.at(whole.ts)
    np.testing.assert_allclose(at.W0, whole.params.W0, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(flow.final.W0, whole.final.W0)
    last = integrate(problem, HORIZON, save_params=False, dense_memory=0)
    np.testing.assert_array_equal(last.params_ts, [HORIZON])
    longer = gradflow.resume(last, HORIZON + 10, dense_memory=0, save_params=False)
    np.testing.assert_array_equal(longer.params_ts, [HORIZON, HORIZON + 10])


def test_stages_figures_and_files_need_no_more(problem, whole, tmp_path):
    flow = integrate(problem, HORIZON, save_params=False)
    assert gradflow.find_stages(flow).names == gradflow.find_stages(whole).names
    flow = gradflow.Flow.load(flow.save(tmp_path / "flow.npz"))
    np.testing.assert_array_equal(flow.params_ts, [HORIZON])
    data = flow.to_xarray()
    assert data["W0"].dims[0] == "params_time"
    assert data["loss"].dims == ("time",)
    from gradflow.plotting._attention import attention_rows, attention_values
    from gradflow.plotting._singular_values import singular_values

    rows = attention_rows(flow)
    np.testing.assert_allclose(
        attention_values(flow, rows), attention_values(whole, rows), atol=1e-7
    )
    name = "singular_values_W0"
    found, expected = singular_values(flow, name), singular_values(whole, name)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def test_many_are_stored_up_to_a_limit(problem, whole, monkeypatch):
    from gradflow._integrate import _run

    monkeypatch.setattr(_run, "PARAMS_MEMORY", 8 * 42 * 20)
    flow = integrate(problem, HORIZON)
    assert len(flow.params_ts) == 20
    assert flow.params_ts[-1] == HORIZON
    assert np.all(np.isin(flow.params_ts, flow.ts))
    with pytest.raises(ValueError, match=r"`save_params` must be.*got 0.123"):
        integrate(problem, HORIZON, save_params=[0.123])


def test_memory_is_stated_and_refused_before_the_run(problem, whole, monkeypatch):
    memory = whole.stats["memory"]
    assert memory["total"] == sum(v for k, v in memory.items() if k != "total")
    assert memory["dense"] == 2**28
    from gradflow._integrate import _run

    monkeypatch.setattr(machine, "available_memory", lambda: memory["total"] - 1)
    monkeypatch.setattr(_run, "start", None)  # no work is begun
    with pytest.raises(ValueError, match=r"42 numbers takes about .*`dense_memory`"):
        integrate(problem, HORIZON)
