"""Step size controllers of solves that can be stopped and continued."""

from collections.abc import Callable

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Int, PyTree

from ._side_channel import PAUSED, CountedError, Verdict, Work, work
from ._types import BoolScalar, RealScalar

NO_LIMIT = 2**62
"""A budget of steps that is never spent."""


class ResumableState(eqx.Module):
    """The state of either controller below."""

    inner: PyTree
    """The state of `diffrax.PIDController`."""
    dt: Float[Array, ""]
    """The length of the next step, which diffrax does not return."""
    budget: Int[Array, ""]
    """The number of further steps that may be attempted."""
    work: Work
    """The work of all steps so far, if the solver counts it."""


VectorField = Callable[[PyTree, RealScalar, PyTree, PyTree], PyTree]
Adapted = tuple[
    BoolScalar,
    RealScalar,
    RealScalar,
    BoolScalar,
    ResumableState,
    diffrax.RESULTS,
]
"""Whether the step is kept, the start and end of the next step, whether there is a
jump, the controller's state and the result so far."""


class ResumableController(
    diffrax.AbstractAdaptiveStepSizeController[ResumableState, RealScalar | None]
):
    """`diffrax.PIDController` for a solve in segments, with four additions:

    - Its state holds the length of the next step, so that a later segment continues
      where this one stopped, even after a rejected step.
    - A trial step that overflows is rejected. (With diffrax 0.7.2 the step size becomes
      NaN and every later step is rejected.)
    - It ends the solve where the step no longer advances the time, and when its budget
      of steps is spent.
    - It reads the counts and verdicts of our own solvers: see `_side_channel.py`.
    """

    rtol: RealScalar
    atol: RealScalar
    norm: Callable[[PyTree], RealScalar] = optx.rms_norm
    first: RealScalar | None = None
    """The length of the first step; None to estimate it. It replaces diffrax's `dt0`,
    which is checked in a callback to Python: JAX does not cache compiled code with
    callbacks on disk."""

    @property
    def _inner(self) -> diffrax.PIDController:
        return diffrax.PIDController(rtol=self.rtol, atol=self.atol, norm=self.norm)

    def wrap(self, direction: RealScalar) -> "ResumableController":
        return self

    def init(
        self,
        terms: PyTree,
        t0: RealScalar,
        t1: RealScalar,
        y0: PyTree,
        dt0: RealScalar | None,
        args: PyTree,
        func: VectorField,
        error_order: RealScalar | None,
    ) -> tuple[RealScalar, ResumableState]:
        dt0 = self.first if dt0 is None else dt0
        tnext, inner = self._inner.init(terms, t0, t1, y0, dt0, args, func, error_order)
        return tnext, ResumableState(inner, jnp.asarray(tnext - t0), _full(), work())

    def adapt_step_size(
        self,
        t0: RealScalar,
        t1: RealScalar,
        y0: PyTree,
        y1_candidate: PyTree,
        args: PyTree,
        y_error: PyTree,
        error_order: RealScalar,
        controller_state: ResumableState,
    ) -> Adapted:
        done = controller_state.work
        if isinstance(y_error, CountedError):
            done, y_error = done + y_error.work, y_error.error
        if isinstance(y_error, Verdict):
            keep, tried = y_error.accepted == 1, y_error.retried == 0
            tprev = jnp.where(keep, t1, t0)
            tnext = tprev + y_error.factor * (t1 - t0)
            jump = jnp.zeros((), bool)
            inner = controller_state.inner
            result = diffrax.RESULTS.where(
                y_error.paused == 1, PAUSED, diffrax.RESULTS.successful
            )
        else:
            tried = True
            # Zero where all is finite, in one pass over the numbers.
            leaves = jax.tree.leaves((y1_candidate, y_error))
            finite = sum(jnp.sum(0 * x) for x in leaves) == 0
            y1 = jax.tree.map(lambda a, b: jnp.where(finite, a, b), y1_candidate, y0)
            y_error = jax.tree.map(lambda e: jnp.where(finite, e, jnp.inf), y_error)
            keep, tprev, tnext, jump, inner, result = self._inner.adapt_step_size(
                t0, t1, y0, y1, args, y_error, error_order, controller_state.inner
            )
        dt = jnp.asarray(tnext - tprev)
        smallest = jnp.maximum(4 * jnp.finfo(dt.dtype).eps * jnp.abs(tprev), 1e-290)
        stuck = ~keep & ~(dt > smallest)
        result = diffrax.RESULTS.where(stuck, diffrax.RESULTS.dt_min_reached, result)
        budget = controller_state.budget - jnp.where(tried, 1, 0)
        result = _out_of_budget(budget, result)
        state = ResumableState(inner, dt, budget, done)
        return keep, tprev, tnext, jump, state, result


class FixedStepController(
    diffrax.AbstractStepSizeController[ResumableState, RealScalar | None]
):
    """Steps of constant length `step`, for a solve in segments as with
    `ResumableController`. A step to a state that is not finite ends the solve."""

    step: RealScalar

    def wrap(self, direction: RealScalar) -> "FixedStepController":
        return self

    def init(
        self,
        terms: PyTree,
        t0: RealScalar,
        t1: RealScalar,
        y0: PyTree,
        dt0: RealScalar | None,
        args: PyTree,
        func: VectorField,
        error_order: RealScalar | None,
    ) -> tuple[RealScalar, ResumableState]:
        dt = jnp.asarray(self.step)
        return t0 + dt, ResumableState(None, dt, _full(), work())

    def adapt_step_size(
        self,
        t0: RealScalar,
        t1: RealScalar,
        y0: PyTree,
        y1_candidate: PyTree,
        args: PyTree,
        y_error: PyTree,
        error_order: RealScalar,
        controller_state: ResumableState,
    ) -> Adapted:
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
        result = _out_of_budget(budget, result)
        return finite, tprev, tprev + dt, jump, state, result


def _full() -> Int[Array, ""]:
    return jnp.asarray(NO_LIMIT, dtype=jnp.int64)


def _out_of_budget(budget: Int[Array, ""], result: diffrax.RESULTS) -> diffrax.RESULTS:
    """`result`, or "out of steps" if the budget of steps is spent."""
    return diffrax.RESULTS.where(budget <= 0, diffrax.RESULTS.max_steps_reached, result)
