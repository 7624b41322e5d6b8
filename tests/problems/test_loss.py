"""The Loss protocol: `gradflow.Loss`, its defaults, and the library's own losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow import (
    AbstractLoss,
    AllContexts,
    FiniteContext,
    HighOrderChain,
    InfiniteContext,
    Loss,
    MarkovChain,
    OneLayerTransformer,
    PositionalHeads,
    Problem,
    RankOneProblem,
    Sample,
    SampledContext,
    SymmetricHeads,
    TensorFactorisation,
)
from gradflow.problems import (
    RESERVED_NAMES,
    UnknownLoss,
    _matrix_products,
    as_loss,
    checked_loss as checked,
)

CHAIN = MarkovChain.random([0.5, 0.3, 0.2], seed=1)
DEEP = HighOrderChain.random(3, (1, 1), seed=3)


def product(params):
    """½(xy - 1)² + ¼: its gradient flow conserves x² - y²."""
    x, y = params["x"], params["y"]
    return 0.5 * jnp.sum(x * y - 1) ** 2 + 0.25


START = {"x": np.array([1.5]), "y": np.array([-0.2])}
RIGHT = {"balance": lambda p: p["x"] ** 2 - p["y"] ** 2}


def library_losses():
    heads = Problem(PositionalHeads(3, 2, 2), AllContexts(DEEP))
    tokens = DEEP.sample(40, seed=2)[0]
    sample = Sample(tokens, 2, source=AllContexts(DEEP))
    return {
        "infinite": Problem(OneLayerTransformer(3, 2), InfiniteContext(CHAIN)),
        "finite": Problem(OneLayerTransformer(3, 2), FiniteContext(CHAIN, 3)),
        "sampled": Problem(OneLayerTransformer(3, 2), SampledContext(CHAIN, tokens, 2)),
        "rank one": RankOneProblem(InfiniteContext(CHAIN)),
        "heads": heads,
        "sample": Problem(PositionalHeads(3, 2, 2), sample),
        "equal heads": SymmetricHeads(heads),
        "scores": TensorFactorisation(np.eye(3), 2),
        "replicator": TensorFactorisation(np.eye(3), 2, "replicator"),
    }


LIBRARY = library_losses()


#
# gradflow.Loss
#


def test_floor_conserved_quantities_and_observables_reach_the_flow():
    loss = Loss(
        product,
        floor=0.25,
        conserved=RIGHT,
        observables={"product": lambda p: p["x"] * p["y"]},
    )
    assert loss.floor == 0.25
    flow = gradflow.integrate(loss, START, 20.0, rtol=1e-9)
    np.testing.assert_array_equal(
        flow.observables["product"], flow.params["x"] * flow.params["y"]
    )
    assert set(flow.certificate.drift) == {"balance"}
    assert flow.certificate.drift["balance"] < 1e-8
    assert "above its floor 0.25" in str(flow)
    assert "balance" in str(flow.certificate)
    plain = gradflow.integrate(product, START, 20.0, rtol=1e-9)
    np.testing.assert_allclose(flow.loss, plain.loss, rtol=1e-14)
    assert "floor" not in str(plain)
    assert plain.certificate.drift == {}
    assert plain.observables == {}


def test_a_quantity_that_is_not_conserved_is_seen_to_drift():
    flow = gradflow.integrate(
        Loss(product, conserved={"sum": lambda p: p["x"] + p["y"]}), START, 20.0
    )
    sums = flow.params["x"] + flow.params["y"]
    expected = np.max(np.abs(sums - sums[0])) / np.max(np.abs(sums))
    assert flow.certificate.drift["sum"] == pytest.approx(expected, rel=1e-12)
    assert expected > 0.1


def test_the_drift_of_a_tuple_is_relative_to_its_largest_term():
    """Here x² + y² drifts, and its terms are larger with 100 added and subtracted."""
    loss = Loss(
        product,
        conserved={
            "whole": lambda p: p["x"] ** 2 + p["y"] ** 2,
            "terms": lambda p: (p["x"] ** 2 + 100, p["y"] ** 2 - 100),
        },
    )
    flow = gradflow.integrate(loss, START, 20.0)
    x, y = flow.params["x"] ** 2, flow.params["y"] ** 2
    moved = np.max(np.abs(x + y - x[0] - y[0]))
    drift = flow.certificate.drift
    assert drift["whole"] == pytest.approx(moved / np.max(x + y), rel=1e-12)
    assert drift["terms"] == pytest.approx(moved / np.max(x + 100), rel=1e-12)
    sums = loss.conserved(START)
    np.testing.assert_allclose(sums["whole"], sums["terms"], rtol=1e-13)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Loss(3), "`function` must be a callable on parameters, got int"),
        (lambda: Loss(dict), "`function` must be a callable .* got the class dict"),
        (lambda: Loss(product, floor="low"), "`floor` must be a finite number, got"),
        (lambda: Loss(product, floor=np.nan), "`floor` must be a finite number, got"),
        (lambda: Loss(product, conserved=[product]), "`conserved` must map names to"),
        (lambda: Loss(product, conserved={"a": 1}), "`conserved` must map .* 'a': 1"),
        (lambda: Loss(product, observables=product), "`observables` must map names"),
        (lambda: Loss(product, observables={1: product}), "`observables` must map"),
        (lambda: as_loss("loss"), "`loss` must be a callable on parameters, got str"),
        (lambda: as_loss(Loss), "`loss` must be a callable .* got the class Loss"),
        (
            lambda: checked(lambda p: p["x"], START),
            "`loss` must return a real scalar, got .*shape=.1,",
        ),
        (
            lambda: checked(lambda p: {"value": 1.0}, START),
            "`loss` must return a real scalar",
        ),
        (lambda: checked(product, {"x": 1}, of="start"), "`start.x` must be a float"),
        (lambda: UnknownLoss()(START), "This flow was loaded without its loss"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["ts", "loss", "speed"])
def test_reserved_names_are_refused(name):
    assert name in RESERVED_NAMES
    with pytest.raises(ValueError, match=f"must not use the names .* got '{name}'"):
        Loss(product, observables={name: product})


def test_a_loss_enters_the_library_once():
    loss = as_loss(product)
    assert isinstance(loss, Loss)
    assert loss.function is product
    assert as_loss(loss) is loss
    assert as_loss(LIBRARY["scores"]) is LIBRARY["scores"]


#
# Defaults
#


class Bare(AbstractLoss):
    """A loss about which nothing is known."""

    def __call__(self, params):
        return product(params)


@pytest.mark.parametrize("loss", [Bare(), Loss(product), UnknownLoss()], ids=type)
def test_defaults_say_that_nothing_is_known(loss):
    assert loss.floor is None
    assert loss.baselines == {}
    assert loss.observables == {}
    assert loss.axes == {}
    assert loss.token_labels is None
    assert loss.token_frequencies is None
    assert loss.conserved_terms(START) == loss.conserved(START) == {}
    assert loss.is_euclidean
    assert list(loss.known_saddles) == []
    assert loss.symmetry_generators(START) is None
    assert loss.stage_theory == "speed"
    loss.check("anything")
    with pytest.raises(ValueError, match="does not know how to initialise"):
        loss.init()


def test_the_default_velocity_is_the_negative_gradient():
    value, gradient = Bare().value_and_grad(START)
    expected = jax.grad(product)(START)
    assert float(value) == float(product(START))
    velocity = Bare().velocity(START, gradient)
    for name in START:
        np.testing.assert_array_equal(gradient[name], expected[name])
        np.testing.assert_array_equal(velocity[name], -expected[name])


def test_single_precision_is_promoted():
    single = Loss(lambda p: jnp.sum(p.astype(jnp.float32) ** 2))
    value, gradient = single.value_and_grad(jnp.ones(2))
    assert value.dtype == gradient.dtype == jnp.float64


#
# The library's own losses
#


@pytest.mark.parametrize("name", LIBRARY)
def test_the_librarys_losses_keep_the_protocol(name):
    loss = LIBRARY[name]
    assert isinstance(loss, AbstractLoss)
    assert as_loss(loss) is loss
    params = loss.init(seed=0, scale=0.3)
    loss.check(params)
    assert loss.floor <= float(loss(params))
    assert not set(loss.observables) & set(RESERVED_NAMES)
    assert loss.stage_theory in ("speed", "directions", "patterns")
    seen = jax.eval_shape(
        lambda p: {k: f(p) for k, f in loss.observables.items()}, params
    )
    arrays = seen | {
        field: getattr(params, field) for field in params.__dataclass_fields__
    }
    for field, axes in loss.axes.items():
        if field in arrays:
            assert len(axes) == arrays[field].ndim, field


@pytest.mark.parametrize("name", LIBRARY)
def test_a_key_initialises_as_the_integer_that_made_it(name):
    loss = LIBRARY[name]
    by_integer = loss.init(seed=5, scale=0.1)
    by_key = loss.init(seed=jax.random.key(5), scale=0.1)
    other = loss.init(seed=jax.random.key(6), scale=0.1)
    same = jax.tree.map(np.array_equal, by_integer, by_key)
    assert all(jax.tree.leaves(same))
    assert not all(jax.tree.leaves(jax.tree.map(np.array_equal, by_integer, other)))


#
# Who is differentiated how
#


@pytest.fixture
def no_interpreter(monkeypatch):
    def refuse(*_):
        raise AssertionError("a gradient went through the interpreter of jaxprs")

    monkeypatch.setattr(_matrix_products, "_evaluate", refuse)


@pytest.mark.usefixtures("no_interpreter")
def test_losses_of_users_are_differentiated_by_jax_alone():
    for loss in (Loss(product), Bare()):
        gradient = loss.value_and_grad(START)[1]
        np.testing.assert_array_equal(gradient["x"], jax.grad(product)(START)["x"])
    flow = gradflow.integrate(lambda p: product(p) + 0.0, START, 1.0)
    assert flow.loss[-1] < flow.loss[0]
    for name in ("scores", "replicator", "equal heads"):
        LIBRARY[name].value_and_grad(LIBRARY[name].init())


@pytest.mark.usefixtures("no_interpreter")
@pytest.mark.parametrize("name", ["infinite", "rank one", "heads"])
def test_gradients_of_the_librarys_models_go_through_the_interpreter(name):
    loss = LIBRARY[name]
    with pytest.raises(AssertionError, match="interpreter of jaxprs"):
        loss.value_and_grad(loss.init())
