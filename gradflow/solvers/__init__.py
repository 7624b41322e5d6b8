"""diffrax solvers that diffrax lacks, and the choice of a solver. Nothing here knows of
chains or attention."""

from ._choice import (
    FIXED_STEP as FIXED_STEP,
    Choice as Choice,
    count_evaluations as count_evaluations,
    memory as memory,
    names as names,
    resolve as resolve,
)
from ._controller import (
    NO_LIMIT as NO_LIMIT,
    ResumableController as ResumableController,
)
from ._fixed import RK4 as RK4, FixedStepController as FixedStepController
from ._kvaerno5 import Kvaerno3 as Kvaerno3, Kvaerno5 as Kvaerno5
from ._low_rank_ndf import LowRankNDF as LowRankNDF
from ._mesh import (
    MeshInterpolation as MeshInterpolation,
    RecentPoints as RecentPoints,
    has_mesh as has_mesh,
    on_mesh as on_mesh,
)
from ._stabilised import ROCK4 as ROCK4
from ._work import PAUSED as PAUSED
