"""Events along flows whose times are known in closed form."""

import jax.numpy as jnp
import numpy as np
import pytest

import gradflow


def decay(x):
    return 0.5 * jnp.sum(x**2)


@pytest.fixture(scope="module")
def decaying():
    """x = (2, -3) exp(-t)."""
    return gradflow.integrate(decay, jnp.array([2.0, -3.0]), 5.0, rtol=1e-10)


def test_events_are_located_and_do_not_stop_the_flow(decaying):
    found = gradflow.find_events(
        decaying,
        [
            gradflow.Event(lambda x: x[0] - 1.0, "halved"),
            gradflow.Event(lambda x: x[1] > -1.0, "third"),
            gradflow.Event(lambda x: (x[0] - 0.5) * (x[0] - 1.5), "twice"),
            gradflow.Event(lambda x: x[0] + 1.0, "never"),
        ],
    )
    exact = [
        ("twice", np.log(2 / 1.5), False),
        ("halved", np.log(2), False),
        ("third", np.log(3), True),
        ("twice", np.log(4), True),
    ]
    assert [(e.name, e.rising) for e in found] == [(n, r) for n, _, r in exact]
    np.testing.assert_allclose(
        [e.t for e in found], [t for _, t, _ in exact], rtol=1e-9
    )
    assert decaying.ts[-1] == 5.0
    titles, first, *_, legend = str(found).splitlines()
    assert titles.split() == ["event", "t", "change"]
    assert first.split() == ["twice", "0.28768207", "falling"]
    assert legend.split()[0] == "change"
    none = gradflow.find_events(decaying, lambda x: x[0] + 1.0)
    assert str(none) == "no event found: no condition changes along the flow"


def test_an_event_also_stops_a_flow():
    event = gradflow.Event(lambda x: x[0] - 1.0, "halved")
    flow = gradflow.integrate(decay, jnp.array([2.0, -3.0]), 5.0, event=event)
    assert flow.ts[-1] == pytest.approx(np.log(2), rel=1e-7)


@pytest.mark.parametrize("dense_memory", [2**28, 0])
def test_observing_and_locating_without_dense_output(dense_memory):
    """Where none was kept the flow is integrated again."""
    ts = np.linspace(0, 5, 11)
    flow = gradflow.integrate(
        decay, jnp.array([2.0, -3.0]), 5.0, ts=ts, dense_memory=dense_memory
    )
    (event,) = gradflow.find_events(flow, lambda x: x[0] - 1.0)
    assert event.t == pytest.approx(np.log(2), rel=1e-7)
    times = np.array([0.0, 0.3, 0.5, 2.2, 5.0])
    seen = flow.observe(lambda x: {"first": x[0]}, times)
    np.testing.assert_allclose(seen["first"], 2 * np.exp(-times), atol=1e-7)
    np.testing.assert_allclose(
        flow.at(times), np.outer(np.exp(-times), [2.0, -3.0]), atol=1e-7
    )


def test_bad_events(decaying):
    with pytest.raises(ValueError, match="`flow` must be a Flow, got int"):
        gradflow.find_events(3, lambda x: x[0])
    with pytest.raises(ValueError, match="`condition` must be a function"):
        gradflow.find_events(decaying, [4])
    with pytest.raises(ValueError, match="'nan' is not a number"):
        gradflow.find_events(decaying, gradflow.Event(lambda x: x[0] * np.nan, "nan"))
    with pytest.raises(ValueError, match="'two' is not a number, or more than one"):
        gradflow.find_events(decaying, gradflow.Event(lambda x: x, "two"))
    with pytest.raises(ValueError, match="`function` must be a function"):
        decaying.observe(3, [0.0])
    with pytest.raises(ValueError, match="`ts` must lie within the flow"):
        decaying.observe(lambda x: x, [6.0])
    with pytest.raises(ValueError, match="`ts` must be a list of times"):
        decaying.observe(lambda x: x, 1.0)
