"""The request for a flow: every argument of the verbs, checked before any work."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core import checks
from .._core.compiled import jit
from .._core.power_method import power_method, random_vector
from .._core.ravel import Ravel
from .._stepping import Condition, Past, Settings
from ..flows import Flow, Origin
from ..problems import AbstractLoss, Observable, checked_loss, chosen_observables
from ..solvers import _internals as solvers

SMALLEST_SCALE = 1e-8
"""The smallest root mean square of the parameters that the default `atol` follows."""
SMALLEST_RTOL = 1e-14
DEFAULT_TIMES = 200


class Request(NamedTuple):
    """A flow to integrate."""

    origin: Origin
    choice: solvers.Choice
    times: Float[np.ndarray, " times"]
    save_params: bool | Float[np.ndarray, " stored"] | None
    named: tuple[str, ...]
    """Observables of the loss to record."""
    functions: dict[str, Observable]
    """Further observables, passed by the user."""
    event: Condition | None
    progress: bool
    max_steps: int | None
    throw: bool
    dense_memory: int
    checkpoint: Path | None
    checkpoint_every: float
    notes: tuple[str, ...] = ()
    earlier: Flow | None = None
    """The flow that this one continues."""
    past: Past | None = None
    """What was recorded of the earlier flow."""

    @property
    def loss(self) -> AbstractLoss:
        assert self.origin.problem is not None
        return self.origin.problem

    @property
    def settings(self) -> Settings:
        return self.origin.settings


def requested(
    loss: Any,
    params: PyTree,
    t1: Any,
    *,
    ts: Any = None,
    solver: Any = "auto",
    rtol: Any = 1e-8,
    atol: Any = None,
    observables: Any = None,
    event: Any = None,
    progress: bool = False,
    max_steps: Any = None,
    throw: bool = True,
    dense_memory: Any = 2**28,
    step: Any = None,
    save_params: Any = None,
    checkpoint: Any = None,
    checkpoint_every: Any = 60.0,
    names: tuple[str, str] = ("loss", "params"),
) -> Request:
    """The request that the arguments of `integrate` make, if they are sound. `names`
    are the user's names for the first two."""
    checks.refuse_tracers(loss, params, t1)
    t1 = checks.positive_number("t1", t1)
    times = saved_times(ts, t1)
    solvers.resolve(solver)
    tolerances = _Tolerances(check_rtol(rtol), atol, step).checked()
    limits = run_limits(
        times, max_steps, dense_memory, save_params, checkpoint, checkpoint_every
    )
    loss = checked_loss(loss, params, *names)
    choice = solvers.resolve(solver, Ravel.of(params).size, loss.is_euclidean)
    named, functions = chosen_observables(loss, params, observables)
    check_event(event, params)
    settings = _settings(loss, params, t1, choice, tolerances)
    return Request(
        origin=Origin(loss, params, settings, choice.solver),
        choice=choice,
        times=times,
        named=named,
        functions=functions,
        event=event,
        progress=progress,
        throw=throw,
        notes=checks.promotion_notes(params),
        **limits,
    )


def run_limits(
    times: Float[np.ndarray, " times"],
    max_steps: Any,
    dense_memory: Any,
    save_params: Any,
    checkpoint: Any,
    checkpoint_every: Any,
) -> dict[str, Any]:
    """The options of `integrate` and `resume` that do not depend on the loss, checked,
    by their names in `Request`."""
    if max_steps is not None:
        max_steps = checks.whole_number("max_steps", max_steps)
    return {
        "max_steps": max_steps,
        "dense_memory": checks.whole_number("dense_memory", dense_memory, least=0),
        "save_params": _check_stored(save_params, times),
        "checkpoint": None if checkpoint is None else _check_path(checkpoint),
        "checkpoint_every": checks.positive_number(
            "checkpoint_every", checkpoint_every, zero_allowed=True
        ),
    }


class _Tolerances(NamedTuple):
    """What the steps of a solver are held to; None for what is to be chosen."""

    rtol: float
    atol: Any
    step: Any

    def checked(self) -> "_Tolerances":
        atol, step = self.atol, self.step
        if atol is not None:
            atol = checks.positive_number("atol", atol, zero_allowed=True)
        if step is not None:
            step = checks.positive_number("step", step)
        return _Tolerances(self.rtol, atol, step)


def _settings(
    loss: AbstractLoss,
    params: PyTree,
    t1: float,
    choice: solvers.Choice,
    tolerances: _Tolerances,
) -> Settings:
    """The settings of a flow, with defaults for what was not given."""
    rtol, atol, step = tolerances
    if atol is None:
        atol = float(default_atol(_flat(params), rtol))
    if choice.takes_fixed_steps:
        step = _stable_step(loss, params) if step is None else step
    elif step is not None:
        raise ValueError(
            "`step` is only for solvers with a fixed step "
            f"({', '.join(solvers.FIXED_STEP)}), got {step:g} with {choice.name}."
        )
    return Settings(t1, choice.name, rtol, atol, step)


def _flat(params: PyTree) -> Float[np.ndarray, " n"]:
    return np.asarray(Ravel.of(params).ravel(params))


def default_atol(
    y0: Float[np.ndarray, "*members n"], rtol: float
) -> Float[np.ndarray, "*members"]:
    """1e-3·rtol times the scale of the states that flows start from."""
    # Relative to the largest entry, whose square may overflow.
    largest = np.maximum(np.max(np.abs(y0), axis=-1), SMALLEST_SCALE)
    rms = largest * np.sqrt(np.mean((y0 / largest[..., None]) ** 2, axis=-1))
    return np.asarray(1e-3 * rtol * np.maximum(rms, SMALLEST_SCALE))


def check_rtol(rtol: Any) -> float:
    rtol = checks.positive_number("rtol", rtol)
    if rtol < SMALLEST_RTOL:
        raise ValueError(
            f"`rtol` must be at least {SMALLEST_RTOL:g}, the limit of double "
            f"precision, got {rtol:g}."
        )
    return rtol


def saved_times(ts: Any, t1: float) -> Float[np.ndarray, " times"]:
    if ts is None:
        return np.append(0.0, np.geomspace(1e-5 * t1, t1, DEFAULT_TIMES))
    times = checks.increasing_times("ts", ts)
    if times[0] < 0 or times[-1] > t1:
        raise ValueError(
            f"`ts` must lie between 0 and `t1` = {t1:g}, got times from {times[0]:g} "
            f"to {times[-1]:g}."
        )
    return times


def _check_stored(save_params: Any, times: Float[np.ndarray, " times"]) -> Any:
    if save_params is None or isinstance(save_params, bool):
        return save_params
    stored = checks.increasing_times("save_params", save_params)
    unknown = stored[~np.isin(stored, times)]
    if unknown.size:
        raise ValueError(
            "`save_params` must be None, a boolean or some of the saved times `ts`, "
            f"got {unknown[0]:g}, which is not one of them."
        )
    return stored


def _check_path(path: Any) -> Path:
    """`path`, if a file can be written there."""
    if not isinstance(path, str | os.PathLike) or Path(path).is_dir():
        raise ValueError(f"`checkpoint` must be the path of a file, got {path!r}.")
    if not Path(path).parent.is_dir():
        raise ValueError(
            f"`checkpoint` must be in a folder that exists, got '{os.fspath(path)}'."
        )
    return Path(path)


def check_event(event: Any, params: PyTree) -> None:
    if event is None:
        return
    if not callable(event):
        raise ValueError(
            f"`event` must be a function of the parameters, got {type(event).__name__}."
        )
    value = checks.traced_result("event", event, params)
    if not checks.is_scalar(value, "fb"):
        raise ValueError(
            f"`event` must return a real scalar or a boolean, got {value!r}."
        )
    now: Any = event(jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params))
    if np.isnan(now):
        raise ValueError("`event` must be a number at `params`, got NaN.")


POWER_ITERATIONS = 60


@jit
def _largest_curvature(
    loss: AbstractLoss, ravel: Ravel, y: Float[Array, " n"]
) -> Float[Array, ""]:
    """|λ|_max of the Hessian."""
    gradient = jax.grad(lambda y: loss.in_double(ravel.unravel(y)))

    def product(v: Float[Array, " n"]) -> Float[Array, " n"]:
        return jax.jvp(gradient, (y,), (v,))[1]

    return power_method(product, random_vector(y), POWER_ITERATIONS).size


def _stable_step(loss: AbstractLoss, params: PyTree) -> float:
    ravel = Ravel.of(params)
    largest = float(_largest_curvature(loss, ravel, ravel.ravel(params)))
    if not (np.isfinite(largest) and largest > 0):
        raise ValueError(
            "`step` must be given: its default follows from the curvature at `params`, "
            f"which is {largest:g}."
        )
    return 1 / largest
