"""The stages of a flow: where it rests, where it moves, and what opens as it moves.

**Any flow.** The speed v = ‖∇L‖ falls while the flow approaches a critical point and
grows while it leaves: d log v/dt = -gᵀHg/gᵀg with g = ∇L and H = ∇²L. There is a
*plateau* around each local minimum of v and a *transition* around each local maximum;
the extrema are the times at which the curvature gᵀHg along the flow changes sign.
Speeds are compared by their ratios. A maximum counts if v rises and falls by a factor
of `PROMINENCE` around it. A plateau and a transition meet where v is the geometric mean
of its two extrema. The last transition has no minimum after it: it ends where the flow
is as slow again as where that transition began.

**Focus and Dilution.** The weights of the one-layer Transformer start at a small scale
and grow one direction at a time: the singular values s_i of W0, and in the attention
√σ_j of WQ WKᵀ. A direction is *open* once s(t) > √(s(0) S(t)): half way, on a
logarithmic scale, from its start to the largest scale of that time, S = σ₁(W0), which
must have grown first. It opens fastest at the first maximum of ds/dt after that from
which ds/dt falls by a factor of `PROMINENCE`. In the order of these times:

- the first direction of W0 is `condensation`;
- a direction of the attention is `focus`, or `anti-focus` if its query side u and its
  key side v, the singular vectors of WQ WKᵀ, point apart: uᵀv < 0, as for κ < 0;
- a further direction of W0 is `new direction`.

Between two of them the stage changes where the speed is least: at the flow's closest
approach to the saddle in between. A focus ends, and `dilution` begins, where the speed
is greatest: from there on the flow relaxes. If the speed has no minimum between the
openings of two directions, both open in one stage, named after the first. The cycle is
the number of focus stages so far.

**Heads that share out patterns.** A pattern is a block of the chain, or the columns of
the target that point in one direction. Let Ĝ = Σ_k V_k ⊗ s_k be what the heads compute
together. Its share in pattern j is the j-th coefficient of the projection of Ĝ on the
patterns: zero at the start, one once the pattern is learned. A pattern is *acquired*
when its share first passes one half, by the heads that then hold at least half as much
of it as the head that holds most. An acquisition belongs to the `competitive` phase as
long as the heads are alike (the least cosine between two of them exceeds one half), and
to the `cooperative` phase afterwards. Each acquisition is a stage. Two stages meet
where the speed is least between them. If the speed has no minimum there, they meet
where the heads come apart; if the heads do not come apart either, they are one stage.
The cycle is the number of patterns acquired so far.

None of this depends on the saved times as long as the flow has its dense output: events
are searched for on the steps of the solver and located between them. For a large flow
whose dense output was not kept (`stats.dense_until`), only the saved times are
available from there on: boundaries are the nearest saved times, and anything shorter
than the gap between two of them is missed.
"""

from ._clock import PROMINENCE as PROMINENCE
from ._find import find_stages as find_stages
from ._stage import (
    Acquisition as Acquisition,
    EnsembleStages as EnsembleStages,
    Plateau as Plateau,
    Stage as Stage,
    StageMedian as StageMedian,
    Stages as Stages,
)
