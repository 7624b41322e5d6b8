"""A step size controller whose solve can be stopped and gone on with."""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Int

from ._work import PAUSED, CountedError, Verdict, Work, work

NO_LIMIT = 2**62


class ResumableState(eqx.Module):
    inner: Any
    dt: Float[Array, ""]
    """The length of the next step, which diffrax keeps to itself."""
    budget: Int[Array, ""]
    """How many more steps may be tried."""
    work: Work
    """Of all steps so far, from a solver that counts it."""


class ResumableController(diffrax.AbstractAdaptiveStepSizeController):
    """`diffrax.PIDController` for a solve in segments, with three additions:

    - its state holds the next step's length, so that a later segment goes on where this
      one stopped, after a rejected step too;
    - a trial step that overflows is a rejected step (with diffrax 0.7.2 the step size
      turns into NaN and every later step is rejected);
    - it ends the solve where the step no longer moves the time, and when its budget of
      steps is spent.
    """

    rtol: Any
    atol: Any
    norm: Callable[[Any], Any] = optx.rms_norm
    first: Any = None
    """The length of the first step, if it is not to be found out. The `dt0` that
    diffrax takes is checked by a call back to Python, and JAX keeps no compiled code
    on disk that has one."""

    @property
    def _inner(self) -> diffrax.PIDController:
        return diffrax.PIDController(rtol=self.rtol, atol=self.atol, norm=self.norm)

    def wrap(self, direction: Any) -> "ResumableController":
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
        dt0 = self.first if dt0 is None else dt0
        tnext, inner = self._inner.init(terms, t0, t1, y0, dt0, args, func, error_order)
        budget = jnp.asarray(NO_LIMIT, dtype=jnp.int64)
        return tnext, ResumableState(inner, tnext - t0, budget, work())

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
        if isinstance(y_error, CountedError):
            done, y_error = controller_state.work + y_error.work, y_error.error
        else:
            done = controller_state.work
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
        result = out_of_budget(budget, result)
        state = ResumableState(inner, dt, budget, done)
        return keep, tprev, tnext, jump, state, result


def out_of_budget(budget: Int[Array, ""], result: diffrax.RESULTS) -> diffrax.RESULTS:
    """The result, unless the budget of steps is spent."""
    return diffrax.RESULTS.where(budget <= 0, diffrax.RESULTS.max_steps_reached, result)
