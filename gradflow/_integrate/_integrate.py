"""integrate(): a loss, a start and a horizon in, a flow out."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .. import solvers
from .._core import checks
from .._core.checks import Checked
from .._core.ravel import Ravel
from .._stepping._segments import advance, start
from ..flows._flow import Flow, Settings, set_integrate_again
from ..problems._loss import checked_loss
from ._checkpoint import check_path
from ._solve import Wanted, equation_of, how_it_ended, solve

SMALLEST_SCALE = 1e-8
"""The least root mean square of the parameters that the default `atol` follows."""
SMALLEST_RTOL = 1e-14
DEFAULT_TIMES = 200
POWER_ITERATIONS = 60
OWN_NAMES = ("ts", "loss", "speed")
"""Of what a flow has beside its observables."""
LARGEST_DEFAULT_OBSERVABLE = 2**16
"""Numbers in an observable at one time, above which it must be asked for by name."""


def integrate(
    loss: Checked[Callable[[PyTree], Any]],
    params: PyTree,
    t1: Checked[float],
    *,
    ts: Any = None,
    solver: Any = "auto",
    rtol: Checked[float] = 1e-8,
    atol: Checked[float | None] = None,
    observables: Checked[
        Mapping[str, Callable[[PyTree], Any]] | Iterable[str] | None
    ] = None,
    event: Checked[Callable[[PyTree], Any] | None] = None,
    progress: bool = False,
    max_steps: Checked[int | None] = None,
    throw: bool = True,
    dense_memory: Checked[int] = 2**28,
    step: Checked[float | None] = None,
    save_params: Any = None,
    checkpoint: Checked[str | os.PathLike | None] = None,
    checkpoint_every: Checked[float] = 60.0,
) -> Flow:
    """Integrate the gradient flow θ̇ = -∇L(θ) from `params` at time 0 to time `t1`.

    **Arguments:**

    - `loss`: any callable from parameters to a scalar; a `Problem` brings its conserved
        quantities and observables along. Compiled code is reused for problems of the
        same shapes, and for the same function object otherwise.
    - `params`: where the flow starts; any pytree of floating arrays.
    - `t1`: the horizon.
    - `ts`: increasing times in [0, t1] at which to save. By default 0 and 200
        geometrically spaced times, as learning lives on a logarithmic clock.
    - `solver`: a name (`gradflow.solvers.names()`) or an adaptive diffrax solver.
    - `rtol`, `atol`: tolerances of a step, for each entry of the parameters. By default
        `atol` follows the initial scale: 1e-3·rtol times the root mean square of
        `params`, or times 1e-8 where that is smaller (a start at zero).
    - `observables`: functions of the parameters to watch, by name, or names among
        `loss.observables`. By default all of these but those with more than 65,536
        numbers each time.
    - `event`: a condition on the parameters that ends the flow: where a real function
        crosses zero, or after the first step at which a boolean one holds.
    - `progress`: whether to show a progress bar, on the logarithmic clock.
    - `max_steps`: give up after so many attempted steps; by default never.
    - `throw`: whether a solve that cannot go on raises a `FlowError`, whose `flow`
        holds what was computed, or returns that flow.
    - `dense_memory`: bytes of dense output to keep for `Flow.at`.
    - `step`: the length of a step of `rk4` and `euler`, which take steps of one length;
        by default 1/λ_max at the start, which may well be too long later on.
    - `save_params`: whether to store the parameters at all saved times (True), at the
        last only (False), or at which of them (a list). By default at all, or where
        that would take more than 256 MiB at as many, evenly spread, as do not. The
        loss, its speed and the observables are saved at every time of `ts`.
    - `checkpoint`: a file in which the solve keeps its state, so that a run that was
        killed goes on from there when it is called again in the same way. Another
        flow's file is refused. It is removed when the flow is complete: that is then
        the caller's to save.
    - `checkpoint_every`: seconds between two checkpoints; longer where writing one
        takes more than a twentieth of that.

    **Returns:**

    A `Flow`.
    """
    t1 = checks.positive_number("t1", t1)
    times = saved_times(ts, t1)
    solvers.resolve(solver)
    rtol = check_rtol(rtol)
    if atol is not None:
        atol = checks.positive_number("atol", atol, zero_allowed=True)
    if max_steps is not None:
        max_steps = checks.whole_number("max_steps", max_steps)
    dense_memory = checks.whole_number("dense_memory", dense_memory, least=0)
    if step is not None:
        step = checks.positive_number("step", step)
    loss = checked_loss(loss, params)
    named, functions = chosen_observables(loss, params, observables)
    check_event(event, params)
    stored = check_stored(save_params, times)
    path = None if checkpoint is None else check_path(checkpoint)
    every = checks.positive_number(
        "checkpoint_every", checkpoint_every, zero_allowed=True
    )

    ravel = Ravel.of(params)
    choice = solvers.resolve(solver, ravel.size, loss.is_euclidean)
    if atol is None:
        atol = float(default_atol(np.asarray(ravel.ravel(params)), rtol))
    if choice.takes_fixed_steps:
        step = _stable_step(loss, ravel, params) if step is None else step
    elif step is not None:
        raise ValueError(
            f"`step` must be None but for solvers with steps of one length "
            f"({', '.join(solvers.FIXED_STEP)}), got {step:g} with {choice.name}."
        )
    return solve(
        Wanted(
            loss=loss,
            start=params,
            choice=choice,
            settings=Settings(t1, choice.name, rtol, atol, step),
            times=times,
            save_params=stored,
            named=named,
            functions=functions,
            event=event,
            progress=progress,
            max_steps=max_steps,
            throw=throw,
            dense_memory=dense_memory,
            checkpoint=path,
            checkpoint_every=every,
        )
    )


@eqx.filter_jit
def _largest_curvature(
    loss: Callable, ravel: Ravel, y: Float[Array, " n"]
) -> Float[Array, ""]:
    """|λ|_max of the Hessian, by the power method."""
    gradient = jax.grad(lambda y: jnp.asarray(loss(ravel.unravel(y)), jnp.float64))

    def iterate(_: Any, v: Float[Array, " n"]) -> Float[Array, " n"]:
        product = jax.jvp(gradient, (y,), (v / jnp.linalg.norm(v),))[1]
        return jnp.where(jnp.any(product != 0), product, v)

    noise = jax.random.normal(jax.random.key(0), y.shape, y.dtype)
    return jnp.linalg.norm(jax.lax.fori_loop(0, POWER_ITERATIONS, iterate, noise))


def _stable_step(loss: Callable, ravel: Ravel, params: PyTree) -> float:
    largest = float(_largest_curvature(loss, ravel, ravel.ravel(params)))
    if not (np.isfinite(largest) and largest > 0):
        raise ValueError(
            "`step` must be given, as the curvature at `params`, from which it would "
            f"follow, is {largest:g}."
        )
    return 1 / largest


def same_solver(
    settings: Settings, solver: diffrax.AbstractSolver | None
) -> str | diffrax.AbstractSolver:
    """What to ask `integrate` for to have a flow's solver again: its name where that
    says all, else the object itself."""
    if settings.discrete:
        raise ValueError(
            "A training cannot be integrated again, as it is no solution of the flow's "
            "equation; `gradflow.compare` holds it against a flow."
        )
    named = settings.solver in solvers.names()
    if solver is None and not named:  # a loaded flow knows only its solver's name
        raise ValueError(
            f"The flow was integrated by {settings.solver!r}, which goes by no "
            "name here: give it as `Flow.load(path, solver=...)`."
        )
    if solver is None or (
        named and eqx.tree_equal(solver, solvers.resolve(settings.solver).solver)
    ):
        return settings.solver
    return solver


def _integrate_again(
    loss: Callable,
    settings: Settings,
    solver: diffrax.AbstractSolver | None,
    params: PyTree,
    t0: float,
    t1: float,
) -> Iterator[tuple[float, Any]]:
    """Dense output from t0 to t1, piece by piece with its end, of the flow that is at
    `params` at t0."""
    ravel = Ravel.of(params)
    again = solvers.resolve(same_solver(settings, solver)).solver
    equation = equation_of(loss, ravel, again, settings)
    end, unlimited = jnp.asarray(t1), jnp.asarray(solvers.NO_LIMIT)
    state, steps = start(equation, ravel.ravel(params), end, unlimited, jnp.asarray(t0))
    ended = None
    while ended is None:
        segment = advance(equation, state, end, steps, None)
        state = segment.state
        ended = how_it_ended(segment.state, segment.result, t1, 0, None)
        if ended is None or ended[0] == diffrax.RESULTS.successful:
            yield float(state.t), segment.dense
    result, reason = ended
    if result != diffrax.RESULTS.successful:
        raise RuntimeError(f"Integrated again from t = {t0:.10g}, the flow {reason}.")


set_integrate_again(_integrate_again)


#
# Checks, before any work starts
#


def default_atol(
    y0: Float[np.ndarray, "*members n"], rtol: float
) -> Float[np.ndarray, "*members"]:
    """What follows from the scale of the states that flows start from."""
    # Relative to the largest entry, whose square may be no finite number.
    largest = np.maximum(np.max(np.abs(y0), axis=-1), SMALLEST_SCALE)
    rms = largest * np.sqrt(np.mean((y0 / largest[..., None]) ** 2, axis=-1))
    return np.asarray(1e-3 * rtol * np.maximum(rms, SMALLEST_SCALE))


def check_rtol(rtol: Any) -> float:
    rtol = checks.positive_number("rtol", rtol)
    if rtol < SMALLEST_RTOL:
        raise ValueError(
            f"`rtol` must be at least {SMALLEST_RTOL:g}, as double precision holds no "
            f"more, got {rtol:g}."
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


def check_stored(save_params: Any, times: Float[np.ndarray, " times"]) -> Any:
    if save_params is None or isinstance(save_params, bool):
        return save_params
    stored = checks.increasing_times("save_params", save_params)
    unknown = stored[~np.isin(stored, times)]
    if unknown.size:
        raise ValueError(
            "`save_params` must be None, a boolean or some of the saved times `ts`, "
            f"got {unknown[0]:g}, which is none."
        )
    return stored


class _AllObservables(eqx.Module):
    loss: Any

    def __call__(self, params: PyTree) -> dict[str, Any]:
        return {name: f(params) for name, f in self.loss.observables.items()}


def chosen_observables(
    loss: Any, params: PyTree, observables: Any
) -> tuple[tuple[str, ...], dict[str, Callable]]:
    """Names among the loss's own observables, and functions of the user's."""
    if isinstance(observables, Mapping):
        for name, function in observables.items():
            if not isinstance(name, str) or not callable(function):
                raise ValueError(
                    "`observables` must map names to functions of the parameters, got "
                    f"{name!r}: {function!r}."
                )
            _check_observable(name, function, params)
        return (), dict(observables)
    if observables is None:
        shapes = checks.shape_of_result(_AllObservables(loss), params)
        sizes = {
            name: sum(leaf.size for leaf in jax.tree.leaves(shape))
            for name, shape in shapes.items()
        }
        return tuple(k for k, n in sizes.items() if n <= LARGEST_DEFAULT_OBSERVABLE), {}
    if not isinstance(observables, Iterable):
        raise ValueError(
            "`observables` must map names to functions of the parameters, or list "
            f"names of the loss's own, got {observables!r}."
        )
    known = loss.observables
    names = (observables,) if isinstance(observables, str) else tuple(observables)
    for name in names:
        if name not in known:
            raise ValueError(
                f"`observables` must name observables of the loss "
                f"({', '.join(known) or 'it has none'}), got {name!r}."
            )
    return names, {}


def _check_observable(name: str, function: Callable, params: PyTree) -> None:
    if name in OWN_NAMES:
        raise ValueError(
            f"`observables` must have other names than {', '.join(OWN_NAMES)}, which "
            f"every flow has, got {name!r}."
        )
    value = checks.traced_result(f"observables[{name!r}]", function, params)
    leaves = jax.tree.leaves(value)
    if not leaves or any(leaf.dtype.kind not in "fiub" for leaf in leaves):
        raise ValueError(
            f"`observables[{name!r}]` must return real numbers, got {value!r}."
        )


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
