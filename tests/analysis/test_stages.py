"""Stages of flows whose times are known in closed form, and of flows on chains."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow import InfiniteContext, MarkovChain, OneLayerTransformer, Problem
from gradflow.flows import _trajectory


def decay(x):
    return 0.5 * jnp.sum(x**2)


@pytest.fixture(scope="module")
def decaying():
    """x = (2, -3) exp(-t)."""
    return gradflow.integrate(decay, jnp.array([2.0, -3.0]), 5.0, rtol=1e-10)


#
# Any flow
#


def saddle(p):
    """Two saddles in a row, of rates 1 and 0.1 along x and along y, which waits for x:
    L = -x²/2 + x⁴/4 - 0.05 x² y² + 0.05 y⁴/2 + …"""
    x, y = p["x"], p["y"]
    return -0.5 * x**2 + 0.25 * x**4 + 0.05 * (-(x**2) * y**2 + 0.5 * y**4)


def test_plateaus_are_where_the_flow_is_slow():
    start = {"x": jnp.asarray(1e-6), "y": jnp.asarray(1e-6)}
    flow = gradflow.integrate(saddle, start, 400.0)
    stages = gradflow.find_stages(flow)
    assert stages.names == ("plateau", "transition") * 2 + ("plateau",)
    first, second, last = stages.plateaus
    # Near zero x = 1e-6 exp(t), and then near x = 1 it is y = 1e-6 exp(t/10).
    assert first.slowest == 0.0
    # The speed of x is greatest where it is 2/√27.
    assert first.end == pytest.approx(0.5 * np.log(2e6 / np.sqrt(27)), rel=1e-3)
    assert second.loss == pytest.approx(-0.25, abs=1e-3)
    assert 15 < second.slowest < 60
    # slowest where the speed is least, on a grid much finer than the solver's steps
    times = np.linspace(second.start, second.end, 20_001)
    speed = flow.observe(lambda p: jnp.hypot(*_gradient(p)), times)
    assert second.slowest == pytest.approx(
        times[np.argmin(speed)], abs=2 * times[1] - 2 * times[0]
    )
    assert second.speed == pytest.approx(speed.min(), rel=1e-6)
    # where the speed is the geometric mean of that and the next maximum
    (peak,) = (s.evidence["speed"] for s in stages if s.start == second.end)
    at = flow.observe(lambda p: jnp.hypot(*_gradient(p)), [second.end])[0]
    assert at == pytest.approx(np.sqrt(peak * second.speed), rel=1e-6)
    assert last.end == 400.0


def _gradient(p):
    x, y = p["x"], p["y"]
    return -x + x**3 - 0.1 * x * y**2, 0.1 * (-(x**2) * y + y**3)


def test_flows_without_stages_say_so(decaying, reference):
    stages = gradflow.find_stages(decaying)
    assert len(stages) == 0
    assert str(stages).startswith("no stage found: until t = 5 the flow only loses")
    short = gradflow.integrate(reference, reference.init(), 3.0)
    assert "only gains speed" in str(gradflow.find_stages(short))
    resting = gradflow.integrate(decay, jnp.zeros(2), 1.0)
    assert "does not move" in str(gradflow.find_stages(resting))
    uniform = Problem(
        OneLayerTransformer(4, 10), InfiniteContext(MarkovChain.sticky([0.25] * 4, 0.5))
    )
    flow = gradflow.integrate(uniform, uniform.init(), 50.0)
    assert str(gradflow.find_stages(flow)).startswith("no stage found: ")


def test_a_loaded_flow_needs_its_loss(decaying, tmp_path):
    flow = gradflow.Flow.load(decaying.save(tmp_path / "run.gradflow"))
    with pytest.raises(ValueError, match="needs the loss"):
        gradflow.find_stages(flow)


#
# Focus and Dilution
#

TWO_CYCLES = ("condensation", *("focus", "dilution", "new direction") * 2)


@pytest.fixture(scope="module")
def through_two_cycles(reference):
    return gradflow.integrate(reference, reference.init(), 1e4, observables=())


def test_the_reference_instance_has_two_cycles(through_two_cycles):
    flow = through_two_cycles
    stages = gradflow.find_stages(flow)
    assert stages.names == TWO_CYCLES
    assert [s.cycle for s in stages] == [0, 1, 1, 1, 2, 2, 2]
    assert stages[0].start == 0.0
    assert stages[-1].end == 1e4
    for one, next_ in itertools.pairwise(stages):
        assert one.end == next_.start
    # One direction more on each plateau that the flow passes from saddle to saddle.
    ranks = [p.ranks for p in stages.plateaus]
    assert [r["W0"] for r in ranks] == [0, 1, 1, 2, 3, 3]
    assert [r["WQ"] for r in ranks] == [0, 0, 1, 1, 2, 2]
    for word in ("condensation", "new direction", "opens", "0.4585"):
        assert word in str(stages)


def test_the_table_explains_its_columns(through_two_cycles):
    stages = gradflow.find_stages(through_two_cycles)
    titles, *lines = str(stages).splitlines()
    rows, legend = lines[: len(stages)], lines[len(stages) :]
    explained = [line[:20].strip() for line in legend]
    columns = ["stage", "cycle", "start", "end"]
    assert titles.split() == [*columns, "evidence"]
    evidence = ["opens", "from", "to", "rate", "sides", "others' attention"]
    assert explained == columns + evidence
    assert all(any(name in row for row in rows) for name in evidence)
    assert all(line.endswith(".") for line in legend)


def _refuse(flow, params, t0, t1):
    raise AssertionError("a large flow is integrated again")


def test_large_flows_are_evaluated_at_their_saved_times(
    through_two_cycles, reference, monkeypatch
):
    """Without dense output, and too large to be integrated again."""
    flow, stages = through_two_cycles, gradflow.find_stages(through_two_cycles)
    kept = gradflow.integrate(
        reference, reference.init(), float(flow.ts[-1]), observables=(), dense_memory=0
    )
    monkeypatch.setattr(_trajectory, "COSTLY", 0)
    monkeypatch.setattr(gradflow.Flow, "pieces_again", _refuse)
    found = gradflow.find_stages(kept)
    assert found.names == stages.names
    assert set(found.boundaries) <= set(kept.ts)
    for ours, exact in zip(found.boundaries, stages.boundaries, strict=True):
        near = np.searchsorted(kept.ts, exact)
        assert kept.ts[max(near - 2, 0)] <= ours <= kept.ts[near + 1]


def test_what_moves_in_each_stage(through_two_cycles, reference):
    """Attention in the focus, embeddings in condensation and dilution: by lengths of
    paths, which the definitions do not use."""
    flow = through_two_cycles

    def lengths(stage):
        times = np.linspace(stage.start, stage.end, 400)
        params = flow.at(times)
        paths = {
            name: np.sum(
                np.linalg.norm(np.diff(getattr(params, name), axis=0), axis=(1, 2))
            )
            for name in ("W0", "W1", "WQ", "WK")
        }
        return np.hypot(paths["W0"], paths["W1"]), np.hypot(paths["WQ"], paths["WK"])

    condensation, focus, dilution, new, *_ = gradflow.find_stages(flow)
    for stage, attention_moves_most in (
        (condensation, False),
        (focus, True),
        (dilution, False),
        (new, False),
    ):
        embeddings, attention = lengths(stage)
        assert (attention > embeddings) == attention_moves_most, stage.name
    attention = flow.observe(
        reference.observables["attention"], [focus.start, focus.end, dilution.end]
    )
    assert attention[0, 0, 0] == pytest.approx(0.75, abs=2e-3)
    assert attention[1, 0, 0] > 0.98
    assert np.all(attention[2, 1:, 0] < attention[0, 1:, 0] - 0.2)


@pytest.mark.parametrize(
    ("d", "sticky", "seed"),
    [(3, True, 2), (3, False, 3), (5, True, 1), (5, False, 6), (8, True, 0)],
)
def test_boundaries_move_with_neither_tolerance_nor_grid(d, sticky, seed):
    rng = np.random.default_rng(seed)
    if sticky:
        chain = MarkovChain.sticky(rng.dirichlet(np.ones(d)), rng.uniform(0.2, 0.8))
    else:
        chain = MarkovChain(rng.dirichlet(np.ones(d), size=d))
    problem = Problem(OneLayerTransformer(d, 5), InfiniteContext(chain))
    start = problem.init(seed)

    def stages(**options):
        flow = gradflow.integrate(problem, start, 3e3, observables=(), **options)
        return gradflow.find_stages(flow)

    one = stages()
    other = stages(rtol=5e-9, ts=np.geomspace(1e-2, 3e3, 401))
    assert len(one) >= 3
    assert one.names == other.names
    np.testing.assert_allclose(one.boundaries, other.boundaries, rtol=1e-3)
    for a, b in zip(one.plateaus, other.plateaus, strict=True):
        np.testing.assert_allclose(
            [a.start, a.end, a.slowest], [b.start, b.end, b.slowest], rtol=1e-3
        )
