"""converged(): the global error of a flow, observed."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from .._core import checks
from .._core.checks import Checked
from .._integrate import integrate, same_solver
from ..flows._flow import Flow

ALLOWED = 10.0
"""By how much the error of a whole flow may exceed rtol · max|θ|."""


class Convergence(eqx.Module):
    """How far a flow is from a more accurate one. True where it is within ten times
    `rtol` times the largest parameter."""

    ts: Float[np.ndarray, " times"]
    error: Float[np.ndarray, " times"]
    """The largest error of a parameter at each saved time."""
    size: float
    """The largest parameter of the whole flow, in absolute value."""
    rtol: float
    against: str
    """What the flow was compared with."""

    @property
    def ratio(self) -> float:
        """The largest error, in units of rtol · max|θ|."""
        error = float(np.max(self.error))
        return 0.0 if error == 0 else error / (self.rtol * self.size)

    def __bool__(self) -> bool:
        return self.ratio <= ALLOWED

    def __str__(self) -> str:
        worst = int(np.argmax(self.error))
        verdict = "converged" if self else "NOT CONVERGED"
        return (
            f"{verdict}: observed error {self.error[worst]:.1e} at "
            f"t = {self.ts[worst]:.4g}, {self.ratio:.2g} × rtol × max|θ| "
            f"(at most {ALLOWED:g}), against {self.against}"
        )


def converged(
    flow: Checked[Flow], *, tighter: Checked[float] = 0.01, solver: Any = None
) -> Convergence:
    """Integrate a flow again at `tighter` times its tolerances, and compare the whole
    trajectories at the saved times.

    **Arguments:**

    - `flow`: a flow that knows its loss.
    - `tighter`: by what factor to multiply both tolerances; below one. A solver with
        steps of one length takes steps half as long instead.
    - `solver`: another solver than the flow's, for an independent check.

    **Returns:**

    A `Convergence`, true where the error is within 10 · rtol · max|θ|.
    """
    if not isinstance(flow, Flow):
        raise ValueError(f"`flow` must be a Flow, got {type(flow).__name__}.")
    tighter = checks.positive_number("tighter", tighter)
    if tighter >= 1:
        raise ValueError(f"`tighter` must be below one, got {tighter:g}.")
    settings = flow.settings
    again: dict[str, Any] = {
        "rtol": max(tighter * settings.rtol, 1e-14),
        "atol": tighter * settings.atol,
    }
    against = f"rtol {again['rtol']:g}"
    if solver is None:
        solver = same_solver(settings, flow.solver)
        if settings.step is not None:
            again["step"] = settings.step / 2
            against = f"a step of {again['step']:g}"
    else:
        against += f" by {solver if isinstance(solver, str) else type(solver).__name__}"
    finer = integrate(
        flow.require_problem("`gradflow.converged`"),
        flow.start,
        float(flow.ts[-1]),
        ts=flow.params_ts,
        save_params=True,
        solver=solver,
        observables=(),
        **again,
    )
    ours, theirs = (
        np.concatenate(
            [np.reshape(x, (len(flow.params_ts), -1)) for x in leaves], axis=1
        )
        for leaves in (jax.tree.leaves(f.params) for f in (flow, finer))
    )
    return Convergence(
        ts=flow.params_ts,
        error=np.max(np.abs(ours - theirs), axis=1),
        size=float(np.max(np.abs(theirs))),
        rtol=settings.rtol,
        against=against,
    )
