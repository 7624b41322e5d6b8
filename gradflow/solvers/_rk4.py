"""The classical Runge-Kutta method, for comparison with hand-written loops."""

from typing import ClassVar

import diffrax
import numpy as np
from jaxtyping import PyTree


class RK4(diffrax.AbstractERK):
    """The classical Runge-Kutta method of order four. It does not estimate its error,
    so it needs a step size controller with constant steps."""

    tableau: ClassVar = diffrax.ButcherTableau(
        a_lower=(np.array([0.5]), np.array([0.0, 0.5]), np.array([0.0, 0.0, 1.0])),
        b_sol=np.array([1, 2, 2, 1]) / 6,
        b_error=np.zeros(4),
        c=np.array([0.5, 0.5, 1.0]),
    )
    interpolation_cls: ClassVar = (
        diffrax.ThirdOrderHermitePolynomialInterpolation.from_k
    )

    def order(self, terms: PyTree) -> int:
        return 4
