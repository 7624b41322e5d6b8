"""diffrax solvers that diffrax lacks. Nothing here knows about chains or attention.

They can be passed to `diffrax.diffeqsolve` as they are, and to `gradflow.integrate` as
objects or by name: `names()` lists the names, which include some of diffrax's own.
"""

from ._choice import names
from ._kvaerno import Kvaerno3, Kvaerno5
from ._rk4 import RK4
from ._rock4 import ROCK4
from .ndf import LowRankNDF

__all__ = ["RK4", "ROCK4", "Kvaerno3", "Kvaerno5", "LowRankNDF", "names"]


def __dir__() -> list[str]:
    return __all__
