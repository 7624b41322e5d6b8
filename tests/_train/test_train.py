"""Discrete training: against recursions by hand, Euler's method, and the flow."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

import gradflow
from gradflow import (
    Flow,
    FlowError,
    MarkovChain,
    OneLayerTransformer,
    Problem,
    Training,
)

CURVATURES = np.array([0.5, 2.0])
START = {"w": np.array([1.0, -2.0])}


def bowl(p):
    return 0.5 * jnp.sum(CURVATURES * p["w"] ** 2)


def by_hand(update, rates, steps, state=None):
    """The iterates of `w ← update(state, n, w, gradient, η_n)`, in NumPy."""
    w, iterates = START["w"].copy(), [START["w"]]
    for n in range(steps):
        state, change = update(state, n, w, CURVATURES * w, rates[n])
        w = w + change
        iterates.append(w)
    return np.array(iterates)


def momentum(trace, n, w, gradient, rate):
    trace = gradient + (0 if trace is None else 0.9 * trace)
    return trace, -rate * trace


def adamw(moments, n, w, gradient, rate):
    m, v = (np.zeros(2), np.zeros(2)) if moments is None else moments
    m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
    unbiased = (m / (1 - 0.9 ** (n + 1)), v / (1 - 0.999 ** (n + 1)))
    step = unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8) + 1e-4 * w
    return (m, v), -rate * step


def falling(step):
    return 0.2 / (1 + 0.1 * step)


STEPS = 30
FALLING = falling(np.arange(STEPS))
with_momentum = functools.partial(optax.sgd, momentum=0.9)


@pytest.mark.parametrize(
    ("optimiser", "learning_rate", "rule", "rates", "name"),
    [
        (with_momentum, 0.1, momentum, np.full(STEPS, 0.1), "sgd"),
        (with_momentum, falling, momentum, FALLING, "sgd"),
        (optax.adamw, falling, adamw, FALLING, "adamw"),
        (optax.adamw(falling), falling, adamw, FALLING, "ScaleByAdam"),
        (
            optax.inject_hyperparams(optax.adamw)(falling),
            None,
            adamw,
            FALLING,
            "InjectStatefulHyperparams",
        ),
    ],
)
def test_optimisers_by_hand(optimiser, learning_rate, rule, rates, name):
    training = gradflow.train(
        bowl,
        START,
        optimiser,
        STEPS,
        learning_rate=learning_rate,
        saved=range(STEPS + 1),
    )
    iterates = by_hand(rule, rates, STEPS)
    np.testing.assert_allclose(training.params["w"], iterates, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        training.ts, np.append(0, np.cumsum(rates)), rtol=1e-14, atol=0
    )
    losses = 0.5 * np.sum(CURVATURES * iterates**2, axis=1)
    np.testing.assert_allclose(training.loss, losses, rtol=1e-9, atol=1e-15)
    released = np.append(
        0, np.cumsum(rates * np.sum((CURVATURES * iterates[:-1]) ** 2, axis=1))
    )
    imbalance = np.max(np.abs(losses[0] - losses - released))
    assert training.certificate.energy_imbalance == pytest.approx(imbalance, rel=1e-9)
    assert name in training.stats["solver"]
    assert name in str(training)


def test_a_whole_optimiser_may_count_its_momentum():
    training = gradflow.train(
        bowl, START, optax.sgd(0.01, momentum=0.9), 50, learning_rate=0.1, saved=[50]
    )
    iterates = by_hand(momentum, np.full(50, 0.01), 50)
    np.testing.assert_allclose(training.final["w"], iterates[-1], rtol=1e-12)
    assert training.ts.tolist() == pytest.approx([0.0, 5.0], rel=1e-14)


def test_gradient_descent_by_hand(reference, reference_chain):
    """With the gradient in closed form."""
    start = reference.init(scale=0.3)
    training = gradflow.train(reference, start, 0.25, 40, observables=())
    chain = reference_chain
    weights = [np.asarray(getattr(start, n)) for n in oracles.SHAPES]
    for n in range(41):
        (place,) = np.flatnonzero(np.isclose(training.ts, 0.25 * n))
        for name, ours in zip(oracles.SHAPES, weights, strict=True):
            np.testing.assert_allclose(
                getattr(training.params, name)[place], ours, rtol=1e-9, atol=1e-12
            )
        _, slopes, _, _ = oracles.infinite_context_gradient(
            chain.stationary, chain.transition, *weights
        )
        weights = [w - 0.25 * g for w, g in zip(weights, slopes, strict=True)]


def test_a_loss_with_a_metric_is_descended_in_it():
    """ṡ = J(s)g and V̇ = (G - Ĝ)s by Euler's method."""
    G = np.array([[1.0, 0.3, 0.0], [0.2, 0.1, 0.6]])
    problem = gradflow.TensorFactorisation(G, heads=2, geometry="replicator")
    start = problem.init(seed=1, scale=0.1)
    training = gradflow.train(problem, start, 0.05, 60, saved=range(61))
    V, s = np.asarray(start.V), np.asarray(start.s)
    for n in range(61):
        np.testing.assert_allclose(training.params.V[n], V, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(training.params.s[n], s, rtol=1e-9, atol=1e-12)
        rest = G - np.einsum("ka,ki->ai", V, s)
        g = V @ rest
        along = s * g - s * np.sum(s * g, axis=1, keepdims=True)
        V, s = V + 0.05 * s @ rest.T, s + 0.05 * along


@pytest.fixture(scope="module")
def descents(reference):
    """Gradient descent through condensation and focus at η, η/2, η/4, saved at the same
    times."""
    return [
        gradflow.train(
            reference,
            reference.init(),
            0.1 / n,
            1200 * n,
            saved=n * np.arange(0, 1201, 8),
        )
        for n in (1, 2, 4)
    ]


def test_the_error_of_gradient_descent_is_of_order_eta(reference_flow, descents):
    compared = [gradflow.compare(reference_flow, training) for training in descents]
    largest = [c.largest for c in compared]
    ratios = [a / b for a, b in itertools.pairwise(largest)]
    np.testing.assert_allclose(ratios, 2, atol=0.1)
    # At every time, once there is an error to speak of.
    late = compared[0].ts > 5
    for coarse, fine in itertools.pairwise(compared):
        np.testing.assert_allclose(
            coarse.distance[late] / fine.distance[late], 2, atol=0.2
        )

    # Against a flow by SciPy, which shares nothing with ours.
    c = compared[0]
    chain = reference_flow.problem.population.chain
    weights = [np.asarray(getattr(reference_flow.start, n)) for n in oracles.SHAPES]
    theirs = oracles.scipy_flow(chain.stationary, chain.transition, weights, c.ts)
    flat = np.concatenate(
        [
            np.reshape(getattr(descents[0].params, n), (len(c.ts), -1))
            for n in oracles.SHAPES
        ],
        axis=1,
    )
    np.testing.assert_allclose(
        c.distance, np.linalg.norm(flat - theirs, axis=1), rtol=1e-4, atol=1e-7
    )
    np.testing.assert_allclose(
        c.relative, c.distance / np.linalg.norm(theirs, axis=1), rtol=1e-4
    )
    assert c.largest == c.distance.max() > 0.01
    np.testing.assert_allclose(c.training_loss, descents[0].loss, rtol=1e-14)
    np.testing.assert_allclose(
        c.loss_difference,
        descents[0].loss - reference_flow.observe(reference_flow.problem, c.ts),
        rtol=1e-12,
        atol=1e-14,
    )
    said = str(c)
    assert said.startswith("gradient descent against ndf at 151 times to t = 120")
    assert f"≤ {c.largest:.3g}" in said


def test_stages_plots_and_files_work_unchanged(reference_flow, descents, tmp_path):
    training = descents[-1]
    stages = gradflow.find_stages(training)
    assert stages.names == ("condensation", "focus", "dilution")
    # Those of the flow, as the README has them.
    np.testing.assert_allclose(stages.boundaries, [53.039, 107.01], rtol=5e-3)
    assert gradflow.plotting.plot_attention(training).get_title(loc="left")
    compared = gradflow.compare(reference_flow, training)
    panels = gradflow.plotting.plot_comparison(compared, stages=stages).axes
    assert [ax.get_ylabel() for ax in panels[:2]] == ["loss $L$ (nats)", "distance"]
    np.testing.assert_array_equal(
        panels[1].lines[0].get_ydata(), compared.distance[compared.ts > 0]
    )

    loaded = Training.load(training.save(tmp_path / "training.npz"))
    assert str(loaded) == str(training)
    assert loaded.learning_rates == training.learning_rates
    assert loaded.t1 == training.t1
    with pytest.raises(gradflow.RunFileError, match=r"gradflow\.Training\.load"):
        Flow.load(tmp_path / "training.npz")
    for t in (0.05, 33.3, float(training.ts[7])):
        np.testing.assert_array_equal(loaded.at(t).W0, training.at(t).W0)
    assert training.to_xarray()["loss"].dims == ("time",)
    with pytest.raises(ValueError, match="training run cannot be re-integrated"):
        gradflow.converged(training)


def test_between_saved_steps_is_a_straight_line():
    training = gradflow.train(bowl, START, 0.1, 20, saved=[4, 10])
    ts, w = training.ts, training.params["w"]
    np.testing.assert_allclose(ts, [0.0, 0.4, 1.0, 2.0], rtol=1e-14)
    np.testing.assert_array_equal(w[0], START["w"])
    np.testing.assert_allclose(w[-1], START["w"] * (1 - 0.1 * CURVATURES) ** 20)
    middle = training.at(0.3 * ts[1] + 0.7 * ts[2])["w"]
    np.testing.assert_allclose(middle, 0.3 * w[1] + 0.7 * w[2], rtol=1e-13)
    np.testing.assert_array_equal(training.at(ts)["w"], w)
    np.testing.assert_array_equal(training.mesh, ts)


def test_rates_may_fall_below_the_rounding_of_the_clock():
    training = gradflow.train(
        bowl, START, optax.sgd, 100, learning_rate=lambda n: 0.1 * 0.5**n
    )
    assert training.ts[-1] == training.ts[-2]
    seen = training.observe(lambda p: p["w"], training.ts[-3:])
    np.testing.assert_allclose(seen, training.params["w"][-3:], rtol=1e-12)


def test_a_flow_without_its_parameters_is_compared_too():
    flow, other = (
        gradflow.integrate(bowl, START, 2.0, solver="tsit5", save_params=kept)
        for kept in (True, False)
    )
    assert gradflow.compare(flow, other).largest < 1e-7


def test_what_leaves_the_finite_numbers_says_when():
    def cliff(p):
        return jnp.sum(p["w"] ** 4)

    # By hand: until the gradient, 4 w³, or w itself is too large for a double.
    w, n = START["w"], 0
    with np.errstate(over="ignore", invalid="ignore"):
        while np.all(np.isfinite([w, 4 * w**3])) and np.isfinite(np.sum(w**4)):
            last, w, n = w, w - 4 * w**3, n + 1
    with pytest.raises(FlowError, match=f"at step {n} of 1,000, after t = {n - 1}"):
        gradflow.train(cliff, START, 1.0, 1000)
    kept = gradflow.train(cliff, START, 1.0, 1000, throw=False)
    np.testing.assert_allclose(kept.final["w"], last, rtol=1e-12)
    assert kept.ts[-1] == n - 1
    assert np.all(np.isfinite(kept.loss))
    assert "try a smaller learning rate" in str(kept)


def test_a_second_training_traces_nothing():
    """Not for another learning rate, seed or start; nor more steps, where the rate is
    constant."""
    traced = []

    def loss(p):
        traced.append(1)
        return bowl(p)

    gradflow.train(loss, START, optax.adamw, 30, learning_rate=0.1)
    once = len(traced)
    start = {"w": np.array([0.3, 0.1])}
    gradflow.train(loss, start, optax.adamw, 70, learning_rate=0.2, seed=3)
    assert len(traced) == once


def test_default_saved_steps_are_geometric():
    ts = gradflow.train(bowl, START, 1e-3, 100_000, observables={}).ts
    steps = np.rint(ts / 1e-3)
    assert steps[0] == 0
    assert steps[-1] == 100_000
    assert 130 < len(steps) <= 201
    gaps = np.diff(np.log(steps[steps > 100]))
    np.testing.assert_allclose(gaps, gaps.mean(), rtol=0.2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimiser": 0.0}, "`optimiser` must be a positive number, got 0.0"),
        ({"optimiser": float("nan")}, "`optimiser` must be a positive number, got nan"),
        ({"optimiser": True}, "`optimiser` must be a learning rate, an optax"),
        ({"optimiser": "adam"}, "`optimiser` must be a learning rate.*got 'adam'"),
        (
            {"optimiser": optax.sgd},
            "`learning_rate` must be given if `optimiser` is a function",
        ),
        (
            {"optimiser": optax.sgd(0.1)},
            "`learning_rate` must be given: time is the sum",
        ),
        (
            {"optimiser": optax.lbfgs()},
            "`learning_rate` must be given: time is the sum",
        ),
        ({"learning_rate": 0.1}, "`learning_rate` must be None where `optimiser`"),
        (
            {"optimiser": optax.sgd, "learning_rate": -1.0},
            "`learning_rate` must be a positive number, got -1.0",
        ),
        (
            {"optimiser": optax.sgd, "learning_rate": lambda n: 0.5 - 0.1 * n},
            "`learning_rate` must be positive at every step, got 0 at step 5 of 20",
        ),
        (
            {"optimiser": optax.inject_hyperparams(optax.sgd)(lambda n: 2.0 - n)},
            "`optimiser` must be positive at every step, got 0 at step 2 of 20",
        ),
        (
            {"optimiser": optax.sgd, "learning_rate": lambda n: n > 3},
            "`learning_rate` must give one number for each step, got.*bool",
        ),
        (
            {"optimiser": bowl, "learning_rate": 0.1},
            "`optimiser` must map a learning rate to an optax optimiser, but it failed",
        ),
        ({"steps": 0}, "`steps` must be a whole number of at least 1, got 0"),
        ({"steps": 2.5}, "`steps` must be a whole number of at least 1, got 2.5"),
        ({"saved": [0, 21]}, "`saved` must list steps from 0 to"),
        ({"saved": [0.5]}, "`saved` must list steps from 0 to"),
        ({"saved": [3, 2]}, "`saved` must increase strictly, but is not sorted"),
        ({"seed": -1}, "`seed` must be a whole number"),
        ({"problem": 3}, "`loss` must be a callable on parameters, got int"),
        ({"problem": lambda p: p["w"]}, "`loss` must return a real scalar"),
        (
            {"problem": lambda p: jnp.log(jnp.sum(p["w"]))},
            "`loss` and its gradient must be finite at `params`",
        ),
        ({"params": {"w": np.array([np.inf, 1])}}, "`params.w` must be finite"),
        ({"observables": ["speeed"]}, "`observables` must name observables"),
        ({"sampler": 3}, "`sampler` must be a gradflow sampler.*got int"),
        (
            {
                "sampler": gradflow.SequenceSampler(
                    MarkovChain.sticky([0.6, 0.4], 0.5), 3, 2
                )
            },
            "`loss` must be a gradflow.Problem to train its model.*got Loss",
        ),
    ],
)
def test_bad_input_is_refused(change, said):
    given = {"problem": bowl, "params": START, "optimiser": 0.1, "steps": 20, **change}
    with pytest.raises(ValueError, match=said):
        gradflow.train(
            given.pop("problem"),
            given.pop("params"),
            given.pop("optimiser"),
            given.pop("steps"),
            **given,
        )


def test_bad_comparisons_are_refused(reference_flow, descents):
    with pytest.raises(ValueError, match="`flow` must be a Flow, got function"):
        gradflow.compare(bowl, descents[0])
    other = gradflow.train(bowl, START, 0.1, 5)
    with pytest.raises(ValueError, match="`training` must have parameters of the same"):
        gradflow.compare(reference_flow, other)
    short = gradflow.train(bowl, START, 0.01, 1)
    with pytest.raises(ValueError, match=r"a saved time between 0 and 0\.01"):
        gradflow.compare(short, other)


def test_samplers_must_fit_the_model():
    two, three = (MarkovChain.sticky(law, 0.5) for law in ([0.6, 0.4], [0.5, 0.3, 0.2]))
    problem = Problem(OneLayerTransformer(3, 2), gradflow.InfiniteContext(three))
    with pytest.raises(ValueError, match="draws from 2 tokens, but the model"):
        gradflow.train(
            problem,
            problem.init(),
            0.1,
            3,
            sampler=gradflow.SequenceSampler(two, 4, 2),
        )
    chain = gradflow.HighOrderChain.random(3, (1, 2))
    heads = Problem(gradflow.PositionalHeads(3, 3, 2), gradflow.AllContexts(chain))
    sampler = gradflow.SequenceSampler(three, 2, 2)
    with pytest.raises(ValueError, match=r"contexts of at least 3 tokens.*got 2"):
        gradflow.train(heads, heads.init(), 0.1, 3, sampler=sampler)
