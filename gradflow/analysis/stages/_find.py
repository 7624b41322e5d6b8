"""find_stages(): the stages of a flow or of every member of an ensemble."""

from typing import overload

from ..._core.checks import Checked
from ...flows import AbstractTrajectory, Ensemble, check_flow
from ._clock import Clock, plain_stages
from ._focus_and_dilution import focus_and_dilution
from ._heads import competition_and_cooperation
from ._stage import EnsembleStages, Stages


@overload
def find_stages(flow: AbstractTrajectory) -> Stages: ...
@overload
def find_stages(flow: Ensemble) -> EnsembleStages: ...
def find_stages(
    flow: Checked[AbstractTrajectory | Ensemble],
) -> Stages | EnsembleStages:
    """The stages of a flow, as defined at the top of `gradflow.analysis.stages`.

    The flow of a one-layer Transformer has the stages of Focus and Dilution; a flow of
    several heads with known patterns has competition and cooperation; any other flow
    has plateaus and transitions.

    **Arguments:**

    - `flow`: a flow that knows its loss, or an ensemble of them.

    **Returns:**

    `Stages`, or for an ensemble `EnsembleStages`: the `Stages` of each member. Where
    there are no stages the result is empty and its `reason` says why, for a member that
    failed too.
    """
    if isinstance(flow, Ensemble):
        failed = flow.failed
        return EnsembleStages(
            tuple(
                Stages((), (), f"the flow failed: {failed[i]}")
                if i in failed
                else _stages_of(member)
                for i, member in enumerate(flow)
            )
        )
    return _stages_of(check_flow(flow))


def _stages_of(flow: AbstractTrajectory) -> Stages:
    loss = flow.require_problem("`gradflow.find_stages`")
    clock = Clock(flow, loss)
    if loss.stage_theory == "patterns":
        stages, acquisitions, reason = competition_and_cooperation(clock)
        return Stages(tuple(stages), clock.plateaus, reason, tuple(acquisitions))
    if not clock.peaks:
        return Stages((), (), clock.why_none)
    if loss.stage_theory == "directions":
        stages, reason = focus_and_dilution(clock)
        return Stages(tuple(stages), clock.plateaus, reason)
    return Stages(tuple(plain_stages(clock)), clock.plateaus)
