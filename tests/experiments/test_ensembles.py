"""The experiments over ensembles, with `--quick`: their numbers agree with single
flows, whose maxima are located on the dense output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiment_runs import results

import gradflow


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("ensembles")


def fastest(problem, scale, horizon, stage):
    """The time of the highest speed within the given stage, from a single flow."""
    flow = gradflow.integrate(
        problem, problem.init(seed=0, scale=scale), horizon, rtol=1e-9, observables=()
    )
    stages = gradflow.find_stages(flow)
    names = [s.name for s in stages]
    if stage == "focus":  # which ends where the speed is highest
        return stages[names.index("focus")].end
    inside = stages[names.index(stage)]
    times = np.geomspace(max(inside.start, 1.0), inside.end, 4000)

    def speed(params):
        leaves = jax.tree.leaves(jax.grad(problem)(params))
        return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in leaves))

    return times[np.argmax(flow.observe(speed, times))]


def sticky(law, stickiness):
    chain = gradflow.MarkovChain.sticky(law, stickiness)
    model = gradflow.OneLayerTransformer(4, 10)
    return gradflow.Problem(model, gradflow.InfiniteContext(chain))


def test_phase_diagrams(out):
    found = results("phase_diagrams", out)
    assert found["flows"] == 27
    # A second run reads the stored results.
    assert results("phase_diagrams", out)["focus"] == found["focus"]

    frequency, stickiness = found["frequency"][1], found["stickiness"][2]
    law = [frequency, *((1 - frequency) * np.array([0.76, 0.2, 0.04]))]
    problem, scale = sticky(law, stickiness), found["scales"][0]
    end = fastest(problem, scale, 2 * found["focus"][0][2][1], "focus")
    assert found["focus"][0][2][1] == pytest.approx(end, rel=1e-3)

    split, scale = found["split"][2], found["scale"][1]
    problem = sticky([0.7, 0.1 + split, 0.1, 0.1 - split], 0.5)
    seen = found["next_cycle"][2][1]
    end = fastest(problem, scale, 1.3 * seen, "new direction")
    assert seen == pytest.approx(end, rel=1e-2)


def test_focus_time(out):
    found = results("focus_time", out)
    times = np.array(found["times"])
    assert times.shape == (2, 40, 2)
    problem = sticky([0.75, 0.19, 0.05, 0.01], 0.5)
    end = fastest(problem, found["scales"][1], 2 * times[1, 0, 1], "focus")
    assert times[1, 0, 1] == pytest.approx(end, rel=1e-3)
    np.testing.assert_allclose(np.median(times, axis=1), found["medians"])
    # Closed forms of the reference instance: 1/μ, and 1/μ + 1/κ.
    np.testing.assert_allclose(found["law_slopes"], [2.1763, 14.710], rtol=1e-4)
