"""A second call on new numbers of the same shapes compiles nothing."""

import jax.monitoring
import matplotlib.pyplot as plt
import pytest

import gradflow

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def flows():
    """Two flows of the same shapes, of two chains and seeds."""
    found = []
    for seed, stickiness in ((0, 0.5), (1, 0.45)):
        chain = gradflow.MarkovChain.sticky([0.75, 0.19, 0.05, 0.01], stickiness)
        model = gradflow.OneLayerTransformer(4, 3)
        problem = gradflow.Problem(model, gradflow.InfiniteContext(chain))
        found.append(
            gradflow.integrate(
                problem, problem.init(seed), 400.0, rtol=1e-6, observables=()
            )
        )
    return found


@pytest.fixture
def compilations():
    """The functions that are compiled, from now on."""
    found = []

    def listen(event, duration, **known):
        if event == COMPILED:
            found.append(known.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    "call",
    [
        gradflow.find_stages,
        lambda flow: gradflow.find_events(flow, gradflow.Event(flow.problem)),
        gradflow.plotting.plot_attention,
        gradflow.plotting.plot_singular_values,
        gradflow.plotting.plot_loss,
    ],
    ids=["find_stages", "find_events", "attention", "singular_values", "loss"],
)
def test_a_second_call_compiles_nothing(flows, compilations, call):
    first, second = flows
    call(first)
    compilations.clear()
    call(second)
    assert compilations == []
    plt.close("all")
