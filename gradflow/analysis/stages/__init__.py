"""The stages of a flow: where it rests, where it moves, and what opens when it does.

**Any flow.** The speed v = ‖∇L‖ falls while the flow comes near a critical point and
grows while it leaves it: d log v/dt = -gᵀHg/gᵀg with g = ∇L, H = ∇²L. So a *plateau*
lies around each local minimum of v, a *transition* around each maximum, and extrema are
where the curvature gᵀHg along the flow changes sign. Speeds are compared by their
ratios: a maximum counts where v rose and fell by `PROMINENCE` about it, and plateau and
transition meet where v is the geometric mean of its two extrema; in the end, which is
none, where it is as slow again as where the last transition began.

**Focus and Dilution.** The weights of the one-layer Transformer start at a small scale
and grow one direction after another: singular values s_i of W0, and in the attention
√σ_j of WQ WKᵀ. A direction is *open* once s(t) > √(s(0) S(t)), half way, on a
logarithmic scale, from where it started to the largest scale S = σ₁(W0) of its time,
which must have grown first. It opens fastest where ds/dt has its first maximum from
then on, from which it falls by `PROMINENCE`. In the order of these times:

- the first direction of W0 is `condensation`;
- a direction of the attention is `focus`, or `anti-focus` where its query side u and
  its key side v, the singular vectors of WQ WKᵀ, point apart: uᵀv < 0, as for κ < 0;
- a further direction of W0 is `new direction`.

Between two of them the stage changes where the speed is least, at the flow's closest
approach to the saddle in between. A focus ends, and `dilution` begins, where the speed
is greatest: from there on the flow relaxes. Directions between whose openings the
speed has no minimum opened in one stage, named after the first. The cycle is the number
of focus stages so far.

**Heads that share out patterns.** A pattern is a block of the chain, or columns of the
target in one direction. With Ĝ = Σ_k V_k ⊗ s_k what the heads compute together, its
share in pattern j is the j-th coefficient of the projection of Ĝ on the patterns: zero
at the start, one where the pattern is learned. A pattern is *acquired* when its share
passes one half for the first time, by the heads that then hold at least half as much of
it as the one that holds most. Acquisitions are of the `competitive` phase as long as
the heads are alike (the least cosine between two of them is above one half), and then
of the `cooperative` phase. There is a stage for each acquisition. Two meet where the
speed is least between them; if it has no minimum there, where the heads come apart, and
else they are one stage. The cycle is the number of patterns acquired so far.

Nothing here depends on the saved times, as long as the flow has its dense output: what
happens is looked for on the steps of the solver, and located between them. Of a large
flow whose dense output was not kept (`stats["dense_until"]`) only the saved times are
at hand from there on: boundaries are the nearest of these, and what is shorter than the
time between two is not seen.
"""

from ..._core.checks import Checked
from ...flows._flow import Flow
from ._clock import PROMINENCE as PROMINENCE, Clock, plain_stages
from ._focus_and_dilution import focus_and_dilution
from ._heads import competition_and_cooperation
from ._stage import (
    Acquisition as Acquisition,
    Plateau as Plateau,
    Stage as Stage,
    Stages as Stages,
)


def find_stages(flow: Checked[Flow]) -> Stages:
    """The stages of a flow; see the definitions at the top of `gradflow.stages`.

    A flow of a one-layer Transformer has those of Focus and Dilution, one of several
    heads and known patterns competition and cooperation, any other plateaus and
    transitions. Where there are none the answer is empty, and says why.
    """
    if not isinstance(flow, Flow):
        raise ValueError(f"`flow` must be a Flow, got {type(flow).__name__}.")
    loss = flow.require_problem("`gradflow.find_stages`")
    clock = Clock(flow, loss)
    if loss.stage_theory == "patterns":
        stages, acquisitions, reason = competition_and_cooperation(clock)
        return Stages(stages, clock.plateaus, reason, acquisitions)
    if not clock.peaks:
        return Stages((), (), clock.why_none)
    if loss.stage_theory == "directions":
        stages, reason = focus_and_dilution(clock)
        return Stages(stages, clock.plateaus, reason)
    return Stages(list(plain_stages(clock)), clock.plateaus)
