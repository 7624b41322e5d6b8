"""The stages of every member of an ensemble, and their medians."""

import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow.analysis.stages import EnsembleStages, Stage, Stages


def well(p):
    """A saddle at zero, which x = ε exp(t) leaves, and a minimum at one. The root is
    not a number for y < 0 and does not move y otherwise."""
    return -0.5 * p["x"] ** 2 + 0.25 * p["x"] ** 4 + 0.0 * jnp.sqrt(p["y"])


@pytest.fixture(scope="module")
def ensemble():
    start = {"x": np.array([1e-6, 1e-5, 1e-4, 1e-4]), "y": np.array([1, 1, 1, -1.0])}
    return gradflow.integrate_ensemble(well, start, 60.0, throw=False)


def test_one_result_for_each_member(ensemble):
    stages = gradflow.find_stages(ensemble)
    assert isinstance(stages, EnsembleStages)
    assert len(stages) == len(ensemble) == 4
    for member, flow in zip(stages[:3], list(ensemble)[:3], strict=True):
        alone = gradflow.find_stages(flow)
        assert member.names == alone.names == ("plateau", "transition", "plateau")
        np.testing.assert_array_equal(member.boundaries, alone.boundaries)
    assert len(stages[3]) == 0
    assert stages[3].reason.startswith("the flow failed: ")


def test_the_medians_are_those_of_the_members_that_have_the_stage(ensemble):
    stages = gradflow.find_stages(ensemble)
    first, transition, last = stages.medians
    assert [m.name for m in stages.medians] == ["plateau", "transition", "plateau"]
    assert {m.members for m in stages.medians} == {3}
    ends = [member.boundaries for member in stages[:3]]
    assert (first.start, last.end) == (0.0, 60.0)
    np.testing.assert_allclose(
        [first.end, transition.end], np.median(ends, axis=0), rtol=1e-12
    )
    # The speed of x is greatest where it is 2/√27 and the start is 1e-5 in the median.
    assert first.end == pytest.approx(0.5 * np.log(2e5 / np.sqrt(27)), rel=1e-3)
    titles, *rows = str(stages).splitlines()
    assert titles.split() == ["stage", "cycle", "members", "start", "end"]
    assert rows[0].split()[:4] == ["plateau", "3", "of", "4"]
    assert rows[3].startswith("no stage found in 1 member; the first: the flow failed")
    assert [line.split()[0] for line in rows[4:]] == titles.split()


def test_stages_of_members_correspond_by_name_cycle_and_number():
    def member(*ends, cycle):
        names = ["plateau", "focus", "plateau"]
        starts = [0.0, *ends[:-1]]
        return Stages(
            tuple(
                Stage(name, start, end, cycle if name == "focus" else 0, {})
                for name, start, end in zip(names, starts, ends, strict=False)
            ),
            (),
        )

    stages = EnsembleStages(
        (
            member(1.0, 2.0, 9.0, cycle=1),
            member(3.0, 4.0, 9.0, cycle=1),
            member(5.0, 6.0, cycle=2),
        )
    )
    assert [tuple(m) for m in stages.medians] == [
        ("plateau", 0, 3, 0.0, 3.0),
        ("focus", 1, 2, 2.0, 3.0),
        ("plateau", 0, 2, 3.0, 9.0),
        ("focus", 2, 1, 5.0, 6.0),
    ]
    assert repr(stages) == "EnsembleStages(3 members: plateau, focus, plateau, focus)"


def test_an_ensemble_without_stages_says_why():
    none = Stages((), (), "the flow does not move")
    said = str(EnsembleStages((none, none)))
    assert said == (
        "no stage found in any of 2 members; the first: the flow does not move"
    )
