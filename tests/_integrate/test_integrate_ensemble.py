"""Many flows at once are the flows that `integrate` brings one by one."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow import plotting
from gradflow._core import machine

HORIZON, RTOL = 60.0, 1e-7
OBSERVABLES = ("alignment", "singular_values_W0")


@pytest.fixture(scope="module")
def problem(reference_chain):
    model = gradflow.OneLayerTransformer(4, 3)
    return gradflow.Problem(model, gradflow.InfiniteContext(reference_chain))


@pytest.fixture(scope="module")
def starts(problem):
    return [problem.init(seed=i, scale=10.0 ** -(1 + i % 3)) for i in range(5)]


@pytest.fixture(scope="module")
def ensemble(problem, starts):
    return gradflow.integrate_ensemble(
        problem,
        gradflow.stack(starts),
        HORIZON,
        rtol=RTOL,
        observables=OBSERVABLES,
    )


def assert_same(flow, expected, rtol=10 * RTOL):
    """Whole trajectories, not ends alone."""
    np.testing.assert_array_equal(flow.ts, expected.ts)
    scale = max(np.abs(x).max() for x in jax.tree.leaves(expected.params))
    for found, wanted in zip(
        jax.tree.leaves(flow.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=rtol * scale)
    np.testing.assert_allclose(flow.loss, expected.loss, rtol=0, atol=rtol)
    np.testing.assert_allclose(flow.speed, expected.speed, rtol=0, atol=rtol)
    assert flow.result == expected.result


def test_members_are_the_flows_of_a_loop(problem, starts, ensemble):
    assert len(ensemble) == len(starts)
    assert not ensemble.failed
    for start, flow in zip(starts, ensemble, strict=True):
        alone = gradflow.integrate(
            problem, start, HORIZON, rtol=RTOL, observables=OBSERVABLES
        )
        assert_same(flow, alone)
        assert flow.settings == alone.settings
        for name in OBSERVABLES:
            seen, wanted = flow.observables[name], alone.observables[name]
            # The alignment of the small start with nothing is rounding's to say.
            np.testing.assert_allclose(seen, wanted, atol=1e-4)
        for name in ("num_accepted_steps", "num_evaluations"):
            assert flow.stats[name] == pytest.approx(alone.stats[name], rel=0.1)
        one, other = flow.certificate, alone.certificate
        assert one.energy_released == pytest.approx(other.energy_released, abs=1e-7)
        assert one.energy_imbalance < 1e-6
        assert max(one.drift.values()) < 1e-6


def test_the_certificate_is_each_members_own(problem, starts, ensemble):
    """Against the laws themselves, from the stored parameters."""
    for start, flow in zip(starts, ensemble, strict=True):
        released = float(problem(start) - problem(flow.final))
        assert flow.certificate.energy_released == pytest.approx(released, rel=1e-12)
        integral = np.trapezoid(flow.speed**2, flow.ts)  # on the saved times alone
        assert integral == pytest.approx(released, rel=0.02)


def test_steps_are_each_members_own(ensemble):
    steps = [flow.stats["num_accepted_steps"] for flow in ensemble]
    assert len(set(steps)) > 2


@pytest.mark.parametrize(("threads", "batch"), [(2, 1), (1, 3)])
def test_neither_threads_nor_batches_change_it(
    problem, starts, ensemble, threads, batch
):
    again = gradflow.integrate_ensemble(
        problem,
        gradflow.stack(starts),
        HORIZON,
        rtol=RTOL,
        observables=OBSERVABLES,
        threads=threads,
        batch=batch,
    )
    for flow, expected in zip(again, ensemble, strict=True):
        assert_same(flow, expected, 1e-9 if batch == 1 else 10 * RTOL)


def test_chains_of_equal_size():
    """One for each member: π, P and what follows from them vary along it."""
    laws = [[0.75, 0.19, 0.05, 0.01], [0.4, 0.3, 0.2, 0.1], [0.6, 0.2, 0.15, 0.05]]
    chains = [
        gradflow.MarkovChain.sticky(law, stay)
        for law, stay in zip(laws, (0.5, 0.2, 0.7), strict=True)
    ]
    model = gradflow.OneLayerTransformer(4, 3)
    problems = [
        gradflow.Problem(model, gradflow.InfiniteContext(chain)) for chain in chains
    ]
    start = problems[0].init(seed=1)
    ensemble = gradflow.integrate_ensemble(
        problems, gradflow.stack([start] * 3), HORIZON, rtol=RTOL, observables=()
    )
    for one, flow in zip(problems, ensemble, strict=True):
        assert flow.problem is one
        alone = gradflow.integrate(one, start, HORIZON, rtol=RTOL, observables=())
        assert_same(flow, alone)
    assert len({float(flow.loss[-1]) for flow in ensemble}) == 3


def quadratic(x):
    return 0.5 * jnp.sum(jnp.array([1.0, 30.0]) * x**2)


QUADRATIC_STARTS = np.random.default_rng(0).normal(size=(7, 2))


def test_a_closed_form_and_times_of_ones_own():
    starts, ts = QUADRATIC_STARTS, [0.0, 0.03, 0.4, 2.0]
    ensemble = gradflow.integrate_ensemble(quadratic, starts, 2.0, ts=ts, rtol=1e-8)
    np.testing.assert_array_equal(ensemble.ts, ts)
    exact = starts[:, None] * np.exp(-np.outer(ts, [1.0, 30.0]))
    found = np.stack([flow.params for flow in ensemble])
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-7)
    np.testing.assert_allclose(ensemble.final, exact[:, -1], rtol=0, atol=1e-7)
    np.testing.assert_allclose(
        ensemble.loss, 0.5 * (exact**2 @ [1.0, 30.0]), rtol=1e-6, atol=1e-12
    )


def test_events_end_members_at_their_own_times():
    starts = np.array([[2.0], [4.0], [0.5]])
    ensemble = gradflow.integrate_ensemble(
        lambda x: 0.5 * jnp.sum(x**2),
        starts,
        5.0,
        rtol=1e-8,
        event=lambda x: x[0] - 1.0,
    )
    np.testing.assert_allclose(ensemble.end, [np.log(2), np.log(4), 5.0], rtol=1e-7)
    assert not ensemble.failed
    assert ensemble[0].result == diffrax.RESULTS.event_occurred
    assert ensemble[2].result == diffrax.RESULTS.successful
    # NaN from a member's end on, and a median of those that are left.
    assert np.isnan(ensemble.loss[0, -1])
    assert ensemble.median()[-1] == ensemble.loss[2, -1]


def test_a_failed_member_is_reported_and_the_rest_kept():
    """Down x³/3 to infinity at t = -1/x(0) from the left, to rest from the right."""

    def loss(x):
        return jnp.sum(x**3) / 3

    starts = np.array([[1.0], [-0.25], [2.0], [-0.5]])
    with pytest.raises(gradflow.EnsembleError, match=r"2 of 4 .* member 1 ") as error:
        gradflow.integrate_ensemble(loss, starts, 10.0, rtol=1e-8)
    ensemble = error.value.ensemble
    assert sorted(ensemble.failed) == [1, 3]
    np.testing.assert_allclose(ensemble.end[[1, 3]], [4.0, 2.0], rtol=1e-3)
    for i, flow in enumerate(ensemble):
        inside = flow.ts < 0.99 * ensemble.end[i]
        exact = 1 / (1 / starts[i] + flow.ts[inside])
        np.testing.assert_allclose(flow.params[inside, 0], exact, rtol=1e-5)
    returned = gradflow.integrate_ensemble(loss, starts, 10.0, rtol=1e-8, throw=False)
    assert returned.failed == ensemble.failed


def test_a_budget_of_steps_is_each_members_own():
    ensemble = gradflow.integrate_ensemble(
        quadratic, QUADRATIC_STARTS, 2.0, max_steps=40, throw=False
    )
    assert sorted(ensemble.failed) == list(range(len(QUADRATIC_STARTS)))
    for flow in ensemble:
        assert "`max_steps` = 40" in flow.stats["reason"]
        tried = flow.stats["num_accepted_steps"] + flow.stats["num_rejected_steps"]
        assert tried == 40
        assert 0 < flow.ts[-1] < 2.0


def test_a_start_at_which_the_loss_is_not_finite_fails_alone():
    ensemble = gradflow.integrate_ensemble(
        lambda x: jnp.sum(jnp.log(x)), np.array([[2.0], [-1.0]]), 0.1, throw=False
    )
    assert list(ensemble.failed) == [1]
    assert "not finite" in ensemble.failed[1]
    # x² falls by 2t.
    assert ensemble[0].final[0] ** 2 == pytest.approx(4 - 0.2, rel=1e-7)


def test_stored_parameters():
    few = gradflow.integrate_ensemble(
        quadratic, QUADRATIC_STARTS, 2.0, save_params=False
    )
    for flow in few:
        np.testing.assert_array_equal(flow.params_ts, [2.0])
        assert len(flow.ts) > 100
    every = gradflow.integrate_ensemble(
        quadratic, QUADRATIC_STARTS, 2.0, save_params=True
    )
    assert len(every[0].params_ts) == len(every[0].ts)
    np.testing.assert_allclose(few.final, every.final, rtol=0, atol=1e-12)


def test_a_member_can_be_looked_at_between_its_times(problem, starts, ensemble):
    flow = ensemble[1]
    alone = gradflow.integrate(problem, starts[1], HORIZON, rtol=RTOL, observables=())
    for t in (0.7, 33.3):
        np.testing.assert_allclose(flow.at(t).W0, alone.at(t).W0, rtol=0, atol=1e-5)
    assert gradflow.find_stages(flow).names == gradflow.find_stages(alone).names


def test_other_solvers():
    starts = np.array([[1.0, 1.0], [2.0, 0.5]])
    for solver in ("tsit5", "rock4", "kvaerno5"):
        ensemble = gradflow.integrate_ensemble(quadratic, starts, 1.0, solver=solver)
        exact = starts * np.exp(-np.array([1.0, 30.0]))
        np.testing.assert_allclose(ensemble.final, exact, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"`solver` must be adaptive.*got 'euler'"):
        gradflow.integrate_ensemble(quadratic, starts, 1.0, solver="euler")


def test_threads_keep_off_batches_of_matrices(problem):
    """Where jaxlib was seen to wait for ever."""
    from gradflow._stepping import factorised

    params = problem.init()

    def one(p):
        return jnp.linalg.svd(p.W0, compute_uv=False)

    def several(p):
        return jax.jit(jax.vmap(jnp.linalg.eigvalsh))(jnp.ones((3, 2, 2)) * p.W0[0, 0])

    known = {name: factorised(f, params) for name, f in problem.observables.items()}
    assert factorised(one, params) == known["alignment"] == {2}
    assert known["attention"] == set()
    assert all(axes <= {2} for axes in known.values())
    assert factorised(several, params) == {3}


def test_reductions(ensemble):
    assert ensemble.loss.shape == (5, len(ensemble.ts))
    np.testing.assert_array_equal(ensemble.median(), np.median(ensemble.loss, axis=0))
    low, high = ensemble.quantiles([0.1, 0.9], "speed")
    assert np.all(low <= high)
    values = ensemble.values("singular_values_W0")
    assert values.shape == (5, len(ensemble.ts), 3)
    assert ensemble.median("singular_values_W0").shape == values.shape[1:]
    with pytest.raises(ValueError, match="`name` must be one of loss, speed"):
        ensemble.values("colour")
    with pytest.raises(ValueError, match="`q` must hold numbers from 0 to 1"):
        ensemble.quantiles(2.0)
    assert "Ensemble of 5 flows" in str(ensemble)


def test_it_is_a_dataset(ensemble):
    data = ensemble.to_xarray()
    assert dict(data.sizes)["member"] == 5
    assert data.singular_values_W0.dims[:2] == ("member", "time")
    np.testing.assert_array_equal(data.loss, ensemble.loss)


def test_bands(ensemble):
    ax = plotting.plot_band(ensemble, "singular_values_W0", component=0)
    (line,) = ax.get_lines()
    np.testing.assert_array_equal(
        line.get_ydata(), ensemble.median("singular_values_W0")[1:, 0]
    )
    assert len(ax.collections) == 2
    with pytest.raises(ValueError, match="`component` must select one number"):
        plotting.plot_band(ensemble, "singular_values_W0")
    with pytest.raises(ValueError, match="`component` must lie within"):
        plotting.plot_band(ensemble, "singular_values_W0", component=3)


def test_bands_tell_who_is_left():
    """Of four flows ẋ = -x one fails where it starts, and one ends at an event."""

    def loss(x):
        return 0.5 * jnp.sum(x**2) + 0 * jnp.sum(jnp.sqrt(x))

    ensemble = gradflow.integrate_ensemble(
        loss,
        np.array([[1.0], [2.0], [4.0], [-1.0]]),
        1.0,
        solver="tsit5",
        event=lambda x: x[0] - 1.2,
        observables={"x": lambda x: x[0]},
        throw=False,
    )
    assert list(ensemble.failed) == [3]
    assert np.isnan(ensemble[3].certificate.energy_imbalance)
    printed = str(ensemble)
    assert "(1 failed, left out below)" in printed
    assert "nan" not in printed
    ax = plotting.plot_band(ensemble, "x", label="x")
    whole, rest = ax.get_lines()
    ends = np.log(2 / 1.2)  # of the second; the first starts below the event's zero
    assert whole.get_xdata()[-1] <= ends < rest.get_xdata()[1]
    expected = 2 * np.exp(-whole.get_xdata())
    np.testing.assert_allclose(whole.get_ydata(), expected, rtol=1e-6)
    expected = 2.5 * np.exp(-rest.get_xdata()[1:])
    np.testing.assert_allclose(rest.get_ydata()[1:], expected, rtol=1e-6)
    assert "Median of 3 flows" in ax.get_title(loc="left")
    assert "(1 failed; dashed: members that have not" in ax.get_title(loc="left")
    with pytest.raises(ValueError, match="`ensemble` must be an Ensemble, got Flow"):
        plotting.plot_band(ensemble[0])
    with pytest.raises(ValueError, match="`flow` must be a Flow, got Ensemble"):
        plotting.plot_loss(ensemble)


def test_bad_input(problem, starts):
    batch = gradflow.stack(starts)

    def run(params=batch, loss=problem, **options):
        gradflow.integrate_ensemble(loss, params, options.pop("t1", 1.0), **options)

    with pytest.raises(ValueError, match="`params_batch` must have a leading axis"):
        run(params={"a": np.zeros((2, 3)), "b": np.zeros((3, 3))}, loss=lambda p: 0.0)
    broken = gradflow.stack([starts[0], jax.tree.map(lambda x: x * np.nan, starts[1])])
    with pytest.raises(ValueError, match="finite, but member 1 is not"):
        run(params=broken)
    with pytest.raises(ValueError, match=r"one for each of the 5 members.*got 2"):
        run(loss=[problem, problem])
    other = gradflow.Problem(
        gradflow.OneLayerTransformer(4, 3),
        gradflow.FiniteContext(problem.population.chain, 3),
    )
    with pytest.raises(ValueError, match=r"of one structure.*member 4"):
        run(loss=[problem] * 4 + [other])
    for options, message in (
        ({"t1": 0.0}, "`t1`"),
        ({"rtol": -1.0}, "`rtol`"),
        ({"threads": 0}, "`threads`"),
        ({"batch": 0}, "`batch`"),
        ({"max_steps": 0}, "`max_steps`"),
        ({"save_params": 3}, "`save_params` must be True, False or None"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**options)
    with pytest.raises(ValueError, match="`params` must be a list of parameters"):
        gradflow.stack([])
    with pytest.raises(ValueError, match="`params` must have one structure"):
        gradflow.stack([np.zeros(2), np.zeros(3)])


#
# Memory
#


@pytest.mark.parametrize("save_params", [True, False])
def test_memory_is_what_is_stated(save_params, monkeypatch):
    """The compiled loop's own account of what it takes beside its results."""
    from gradflow._integrate import _ensemble as ensembles
    from gradflow._integrate._memory import memory_of_ensemble
    from gradflow._stepping import Snapshot

    def bowl(x):
        return 0.5 * jnp.sum(x**2)

    def account(common, members, way, progress, memory):
        calls.append((common, members, way.batch, memory))
        raise InterruptedError

    calls = []
    monkeypatch.setattr(ensembles, "_run_all", account)
    with pytest.raises(InterruptedError):
        gradflow.integrate_ensemble(
            bowl,
            np.ones((4, 3_000)),
            10.0,
            solver="tsit5",
            observables={"some": lambda x: x[:100]},
            save_params=save_params,
            threads=1,
        )
    ((common, members, batch, total),) = calls
    row = gradflow.integrate(bowl, np.ones(3_000), 1.0, ts=[1.0], solver="tsit5")
    row = row.observe(lambda x: (x, x[0], x[0], x[:100]), [1.0])
    row = jax.tree.map(lambda x: np.asarray(x[0]), row)
    shape = Snapshot(row[0], row[1], row[2], {"some": row[3]}, {}, {})
    stated = memory_of_ensemble(common, shape, 4, 1)
    assert stated["total"] == total
    lowered = ensembles.some_flows_small.lower(
        common, jax.tree.map(jnp.asarray, members), batch
    )
    taken = lowered.compile().compiled.memory_analysis()
    working = total - stated["saved"]
    assert 0.5 * working < taken.temp_size_in_bytes < 1.1 * working
    results = stated["saved"] / 2
    assert 0.9 * results < taken.output_size_in_bytes < 1.1 * results


def test_too_much_memory_is_refused_before_the_run(monkeypatch, problem):
    from gradflow._integrate import _ensemble as ensembles

    monkeypatch.setattr(machine, "available_memory", lambda: 10**6)
    monkeypatch.setattr(ensembles, "_run_all", None)  # no work is begun
    starts = gradflow.stack([problem.init(seed=seed) for seed in range(3)])
    wanted = r"3 flows of \d+ numbers takes about .*1 MB are available.*`save_params`"
    with pytest.raises(ValueError, match=wanted):
        gradflow.integrate_ensemble(problem, starts, 10.0)
