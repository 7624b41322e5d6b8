"""The parts of this room that the rooms which run solves need, and users do not."""

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
    FixedStepController as FixedStepController,
    ResumableController as ResumableController,
    ResumableState as ResumableState,
)
from ._side_channel import (
    PAUSED as PAUSED,
    AbstractCountingSolver as AbstractCountingSolver,
    Work as Work,
)
from .ndf import (
    MeshInterpolation as MeshInterpolation,
    RecentPoints as RecentPoints,
    has_mesh as has_mesh,
    on_mesh as on_mesh,
)
