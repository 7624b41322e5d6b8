"""Steps of one length, as hand-written loops take them: for comparison."""

from typing import Any, ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from ._controller import NO_LIMIT, ResumableState, out_of_budget
from ._work import work


class RK4(diffrax.AbstractERK):
    """The classical Runge-Kutta method of order four. It does not estimate its error,
    so that it takes a controller of constant steps."""

    tableau: ClassVar = diffrax.ButcherTableau(
        a_lower=(np.array([0.5]), np.array([0.0, 0.5]), np.array([0.0, 0.0, 1.0])),
        b_sol=np.array([1, 2, 2, 1]) / 6,
        b_error=np.zeros(4),
        c=np.array([0.5, 0.5, 1.0]),
    )
    interpolation_cls: ClassVar = (
        diffrax.ThirdOrderHermitePolynomialInterpolation.from_k
    )

    def order(self, terms: diffrax.AbstractTerm) -> int:
        return 4


class FixedStepController(diffrax.AbstractStepSizeController):
    """Steps of length `step`, for a solve in segments like `ResumableController`'s. A
    step that leaves the finite numbers ends the solve."""

    step: Any

    def wrap(self, direction: Any) -> "FixedStepController":
        return self

    def init(
        self,
        terms: Any,
        t0: Any,
        t1: Any,
        y0: Any,
        dt0: Any,
        args: Any,
        func: Any,
        error_order: Any,
    ) -> tuple[Any, ResumableState]:
        budget = jnp.asarray(NO_LIMIT, dtype=jnp.int64)
        dt = jnp.asarray(self.step)
        return t0 + dt, ResumableState(None, dt, budget, work())

    def adapt_step_size(
        self,
        t0: Any,
        t1: Any,
        y0: Any,
        y1_candidate: Any,
        args: Any,
        y_error: Any,
        error_order: Any,
        controller_state: ResumableState,
    ) -> tuple[Any, Any, Any, Any, ResumableState, diffrax.RESULTS]:
        finite = jnp.all(
            jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(y1_candidate)])
        )
        tprev = jnp.where(finite, t1, t0)
        budget = controller_state.budget - 1
        result = diffrax.RESULTS.where(
            finite, diffrax.RESULTS.successful, diffrax.RESULTS.internal_error
        )
        dt = jnp.asarray(self.step)
        state = ResumableState(None, dt, budget, controller_state.work)
        jump = jnp.zeros((), bool)
        result = out_of_budget(budget, result)
        return finite, tprev, tprev + dt, jump, state, result
