"""Kvaerno's implicit methods from diffrax, with three repairs:

- The root finder. With diffrax 0.7.2 and optimistix 0.1.0, `diffrax.VeryChord` reports
  divergence whenever it has not converged after two iterations, and optimistix's loop
  ends at any result but success: most steps of a nonlinear equation are rejected.
- The dense output of Kvaerno5. The error of Hermite's cubic is O(h⁴) between steps of
  order five, so it exceeds any tolerance that the steps meet: a term of fourth degree
  is added.
- The error estimate of Kvaerno5, which is scaled so that the error of a whole flow
  stays near the tolerances.
"""

import dataclasses
from typing import Any, ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Float, PyTree

from ._types import DiffraxField, RealScalar

STRICTNESS = 10.0
"""The factor by which Kvaerno5's error estimate is scaled."""


class PatientChord(optx.AbstractRootFinder):
    """`diffrax.VeryChord`, iterated until it has converged or diverged."""

    rtol: DiffraxField
    atol: DiffraxField
    norm: DiffraxField = optx.max_norm

    @property
    def _chord(self) -> diffrax.VeryChord:
        return diffrax.VeryChord(rtol=self.rtol, atol=self.atol, norm=self.norm)

    def init(self, *args: Any, **kwargs: Any) -> Any:
        return self._chord.init(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self._chord.step(*args, **kwargs)

    def terminate(self, *args: Any, **kwargs: Any) -> Any:
        terminate, result = self._chord.terminate(*args, **kwargs)
        unfinished = ~jnp.asarray(terminate)
        return terminate, optx.RESULTS.where(
            unfinished, optx.RESULTS.successful, result
        )

    def postprocess(self, *args: Any, **kwargs: Any) -> Any:
        return self._chord.postprocess(*args, **kwargs)


_patient_chord = diffrax.with_stepsize_controller_tols(PatientChord)


class Kvaerno3(diffrax.AbstractESDIRK):
    """`diffrax.Kvaerno3` with a patient root finder."""

    tableau: ClassVar = diffrax.Kvaerno3.tableau
    interpolation_cls: ClassVar = diffrax.Kvaerno3.interpolation_cls

    root_finder: DiffraxField = _patient_chord()
    root_find_max_steps: DiffraxField = 10

    def order(self, terms: PyTree) -> int:
        return 3


def _fourth_degree(tableau: diffrax.ButcherTableau) -> Float[np.ndarray, " stages"]:
    """β such that Hermite's cubic + θ²(1-θ)² Σ β_i k_i is of order four.

    The weights β must give the term in θ⁴ of each elementary weight with at most four
    nodes. As Ac = c²/2 in this method, these are zero for 1, c and c², 1/4 for c³ and
    1/12 for Ac².
    """
    A = np.diag(np.asarray(tableau.a_diagonal))
    for i, row in enumerate(tableau.a_lower):
        A[i + 1, : i + 1] = row
    c = A.sum(1)
    conditions = np.stack([np.ones_like(c), c, c**2, c**3, A @ c**2])
    return np.linalg.lstsq(conditions, np.array([0, 0, 0, 1 / 4, 1 / 12]))[0]


_BETA = _fourth_degree(diffrax.Kvaerno5.tableau)


class _Kvaerno5Interpolation(diffrax.AbstractLocalInterpolation):
    t0: DiffraxField
    t1: DiffraxField
    y0: PyTree
    y1: PyTree
    k: PyTree

    def evaluate(
        self, t0: RealScalar, t1: RealScalar | None = None, left: bool = True
    ) -> PyTree:
        if t1 is not None:
            at_t1, at_t0 = self.evaluate(t1), self.evaluate(t0)
            return jax.tree.map(jnp.subtract, at_t1, at_t0)
        hermite = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k(
            t0=self.t0, t1=self.t1, y0=self.y0, y1=self.y1, k=self.k
        )
        h = self.t1 - self.t0
        # A step of length zero occurs only where its result is discarded.
        theta = (t0 - self.t0) / jnp.where(h == 0, 1.0, h)
        bubble = (theta * (1 - theta)) ** 2
        return jax.tree.map(
            lambda y, k: y + bubble * jnp.tensordot(jnp.asarray(_BETA, k.dtype), k, 1),
            hermite.evaluate(t0),
            self.k,
        )


class Kvaerno5(diffrax.AbstractESDIRK):
    """`diffrax.Kvaerno5` with a patient root finder, dense output of order four and a
    calibrated error estimate."""

    tableau: ClassVar = dataclasses.replace(
        diffrax.Kvaerno5.tableau,
        b_error=STRICTNESS * diffrax.Kvaerno5.tableau.b_error,
    )
    interpolation_cls: ClassVar = _Kvaerno5Interpolation

    root_finder: DiffraxField = _patient_chord()
    root_find_max_steps: DiffraxField = 10

    def order(self, terms: PyTree) -> int:
        return 5
