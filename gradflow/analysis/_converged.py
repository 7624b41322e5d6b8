"""converged(): the global error of a flow, measured against a more accurate one."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from .._core import checks
from .._core.checks import Checked
from .._integrate import integrate, same_solver
from ..flows import Flow, check_integrated

ALLOWED = 10.0
"""The largest error of a converged flow, in units of rtol · max|θ|."""


class Convergence(eqx.Module):
    """The distance of a flow from a more accurate one. It is true if the largest error
    is at most 10 · rtol · max|θ|."""

    ts: Float[np.ndarray, " times"]
    error: Float[np.ndarray, " times"]
    """The largest error of any parameter at each saved time."""
    size: float
    """max|θ|, the largest absolute value of any parameter along the flow."""
    rtol: float
    against: str
    """The tolerance, step or solver of the more accurate flow."""

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
    flow: Checked[Flow], *, tighter: Checked[float] = 0.01, solver: object = None
) -> Convergence:
    """Integrate a flow again with tighter tolerances, and compare the two trajectories
    at the saved times.

    **Arguments:**

    - `flow`: a flow that knows its loss.
    - `tighter`: the factor, below one, that multiplies both tolerances. A solver of
        constant step takes steps half as long instead.
    - `solver`: a different solver, for an independent check. By default the flow's own.

    **Returns:**

    A `Convergence`, which is true if the error is at most 10 · rtol · max|θ|.
    """
    flow = check_integrated(flow)
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
