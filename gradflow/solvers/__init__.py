"""The choice of a solver. Solvers are diffrax solvers; nothing here knows of chains or
attention."""

from ._choice import (
    count_evaluations as count_evaluations,
    names as names,
    resolve as resolve,
)
from ._controller import (
    NO_LIMIT as NO_LIMIT,
    ResumableController as ResumableController,
)
from ._kvaerno5 import Kvaerno3 as Kvaerno3, Kvaerno5 as Kvaerno5
from ._low_rank_ndf import LowRankNDF as LowRankNDF
from ._stabilised import ROCK4 as ROCK4
