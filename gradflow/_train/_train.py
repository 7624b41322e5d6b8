"""train(): a loss, a start and a discrete optimiser in, a flow out."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .. import solvers
from .._core import checks
from .._core.checks import Checked
from .._core.compiled import CompileClock, compiled, make_room_for_code
from .._core.progress import Report, progress_bar
from .._core.ravel import Ravel
from .._integrate._integrate import chosen_observables
from .._stepping._energy import Certificate
from .._stepping._record import Snapshot, Watch, relative_drift
from .._stepping._segments import Equation
from ..flows._flow import RESULTS, DenseOutput, Flow, FlowError, Settings
from ..problems._loss import checked_loss
from ._optimiser import resolved
from ._samplers import AbstractSampler
from ._step import Plan, State, advance, start

DEFAULT_SAVED = 200
LONGEST_CHUNK = 1000
"""Steps between two looks at the progress, however far apart the saved ones are."""


def train(
    problem: Checked[Callable[[PyTree], Any]],
    params: PyTree,
    optimiser: Any,
    steps: Checked[int],
    *,
    sampler: Checked[AbstractSampler | None] = None,
    learning_rate: Any = None,
    saved: Any = None,
    observables: Checked[
        Mapping[str, Callable[[PyTree], Any]] | Iterable[str] | None
    ] = None,
    seed: Checked[int] = 0,
    progress: bool = False,
    throw: bool = True,
) -> Flow:
    """Train by a discrete optimiser, on the clock of the flow: after n steps it is

        t_n = η_0 + … + η_{n-1},

    the sum of the learning rates, so that gradient descent follows θ̇ = -∇L(θ) with an
    error of order η.

    **Arguments:**

    - `problem`: the loss, as for `integrate`; with a `sampler`, a [`Problem`][], whose
        model is trained and whose population is where loss, speed and observables are
        measured.
    - `params`: where the training starts.
    - `optimiser`: a learning rate η, for gradient descent; or what makes an optax
        optimiser of a learning rate, such as `optax.adamw` or
        `lambda eta: optax.sgd(eta, momentum=0.9)`; or an optax optimiser.
    - `steps`: how many to take.
    - `sampler`: what draws a fresh batch of token sequences for each step, such as a
        [`SequenceSampler`][]; by default the gradient is that of the loss, exactly.
    - `learning_rate`: a number, or a schedule: a function of the step, counted from
        zero. It goes to the `optimiser` and to the clock. An optimiser that was made
        with its own does not tell it, unless by `optax.inject_hyperparams`: then
        `learning_rate` sets the clock alone, and is taken at its word. So it may count
        what a step is worth: η/(1-β) for a momentum β, by whose factor steps of
        momentum are longer than those of plain descent.
    - `saved`: increasing steps at which to save, beside the first and the last; by
        default about 200 geometrically spaced ones.
    - `observables`: as for `integrate`.
    - `seed`: of the sampled sequences.
    - `progress`: whether to show a progress bar.
    - `throw`: whether a training that leaves the finite numbers raises a `FlowError`,
        whose `flow` holds what was computed, or returns that flow.

    **Returns:**

    A `Flow` whose `ts` are the times t_n of the saved steps. `flow.at(t)` lies on the
    straight line between two saved iterates, and its certificate says how far the
    training is from a flow: the drift of what a flow conserves, and of
    L(0) - L(t) - Σ η‖∇L‖².
    """
    steps = checks.whole_number("steps", steps)
    seed = checks.whole_number("seed", seed, least=0)
    due = _saved_steps(saved, steps)
    problem = checked_loss(problem, params, "problem")
    _check_sampler(sampler, problem)
    named, functions = chosen_observables(problem, params, observables)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
    name, make, rates = resolved(optimiser, learning_rate, params, steps)

    make_room_for_code()
    began, compiling = time.perf_counter(), CompileClock()
    # Summed in a longer precision, where there is one: millions of roundings add up.
    clock = np.append(0.0, np.cumsum(rates, dtype=np.longdouble)).astype(float)
    constant = bool(np.all(rates == rates[0]))
    plan = Plan(
        problem,
        make,
        jnp.asarray(rates[0] if constant else rates),
        sampler,
        jax.random.key(seed),
    )
    state = start(plan, params)
    if not state.is_finite:
        raise ValueError(
            "`problem` must be finite at `params`, where the training starts, and its "
            f"gradient too; it is {float(state.value):g}."
        )
    watch = _watch(problem, params, named, functions)
    with progress_bar(clock[-1], progress) as report:
        state, reached, seen = _run(plan, state, watch, due, clock, report)
    ts, taken = clock[reached], int(state.step)
    finite = bool(state.is_finite)
    reason = (
        ""
        if finite
        else f"left the finite numbers at step {taken + 1:,} of {steps:,}, after "
        f"t = {clock[taken]:.10g}, where the loss was {float(seen.loss[-1]):.6g}: a "
        "smaller learning rate may hold it"
    )
    origin = jax.tree.map(np.asarray, params)
    compile_seconds = compiling.seconds()
    flow = Flow(
        ts=ts,
        params=seen.params,
        loss=np.asarray(seen.loss),
        speed=np.asarray(seen.speed),
        observables=seen.observables,
        stats={
            "solver": name,
            "choice": "",
            "num_accepted_steps": taken,
            "num_rejected_steps": 0,
            "num_evaluations": taken + 1,
            "num_hessian_products": None,
            "learning_rates": (float(rates.min()), float(rates.max())),
            "sampler": "" if sampler is None else repr(sampler),
            "seed": seed,
            "compile_seconds": compile_seconds,
            "run_seconds": time.perf_counter() - began - compile_seconds,
            "dense_until": float(ts[-1]),
            "reason": reason,
        },
        result=RESULTS.successful if finite else RESULTS.internal_error,
        certificate=_certificate(seen, math.nan if sampler else float(state.imbalance)),
        start=origin,
        settings=Settings(
            float(clock[-1]),
            name,
            0.0,
            0.0,
            float(rates[0]) if constant else None,
            True,
        ),
        problem=problem,
        dense=DenseOutput.of_training(ts, seen.params),
    )
    if throw and not finite:
        raise FlowError(
            f"The training {reason}. What was computed until then is in this "
            "exception's `flow`; `throw=False` returns it instead.",
            flow,
        )
    return flow


def _run(
    plan: Plan,
    state: State,
    watch: Watch,
    due: Int[np.ndarray, " due"],
    clock: Float[np.ndarray, " steps_and_start"],
    report: Report,
) -> tuple[State, list[int], Snapshot]:
    """Step by step to the last that is due, or as far as numbers stay finite: where
    that ended, which steps were looked at, and what was seen there."""
    reached: list[int] = []
    snapshots: list[Snapshot] = []

    def look() -> None:
        snapshot = _snapshot(watch, watch.equation.ravel.ravel(state.params))
        snapshots.append(jax.tree.map(np.asarray, snapshot))
        reached.append(int(state.step))

    for until in due:
        while state.is_finite and state.step < until:
            chunk = min(int(until), int(state.step) + LONGEST_CHUNK)
            state = advance(plan, state, jnp.asarray(chunk))
            taken = int(state.step)
            report(float(clock[taken]), float(state.value), taken)
        if not reached or state.step > reached[-1]:
            look()
        if not state.is_finite:
            break
    return state, reached, jax.tree.map(lambda *rows: np.stack(rows), *snapshots)


#
# What is seen of it
#


def _watch(
    loss: Callable, params: PyTree, named: tuple[str, ...], functions: dict
) -> Watch:
    # Gradient descent is Euler's method; of the equation only its loss is asked.
    ravel = Ravel.of(params)
    none = jnp.zeros(())
    euler = solvers.resolve("euler").solver
    equation = Equation(loss, ravel, euler, none, none)
    return Watch(equation, ravel.ravel(params), named, functions)


@compiled
def _snapshot(watch: Watch, y: Float[Array, " n"]) -> Snapshot:
    return watch.snapshot(y)


def _certificate(seen: Snapshot, imbalance: float) -> Certificate:
    return Certificate(
        drift=relative_drift(seen),
        energy_imbalance=imbalance,
        energy_released=float(seen.loss[0] - seen.loss[-1]),
        quadrature_error=math.nan,
        largest_rise=float(np.diff(seen.loss).max(initial=0.0)),
    )


#
# Checks, before any work starts
#


def _saved_steps(saved: Any, steps: int) -> Int[np.ndarray, " saved"]:
    if saved is None and steps <= DEFAULT_SAVED:
        return np.arange(steps + 1)
    if saved is None:
        spaced = np.geomspace(1, steps, DEFAULT_SAVED)
        return np.unique(np.append(0, np.rint(spaced).astype(int)))
    due = checks.increasing_times("saved", saved)
    if due[0] < 0 or due[-1] > steps or np.any(due != np.rint(due)):
        raise ValueError(
            f"`saved` must be whole numbers of steps from 0 to `steps` = {steps:,}, "
            f"got {due[0]:g} to {due[-1]:g}."
        )
    return np.union1d(due.astype(int), [0, steps])


def _check_sampler(sampler: Any, problem: Any) -> None:
    if sampler is None:
        return
    if not isinstance(sampler, AbstractSampler):
        raise ValueError(
            "`sampler` must be a gradflow sampler such as SequenceSampler, got "
            f"{type(sampler).__name__}."
        )
    model: Any = getattr(problem, "model", None)
    if not hasattr(model, "sequence_logits"):
        raise ValueError(
            "`problem` must be a gradflow.Problem to train its model on sampled "
            f"sequences, got {type(problem).__name__}."
        )
    if sampler.vocabulary != model.vocabulary:
        raise ValueError(
            f"`sampler` draws from {sampler.vocabulary} tokens and the model of "
            f"`problem` has a vocabulary of {model.vocabulary}."
        )
    if sampler.length < model.least_length:
        raise ValueError(
            f"`sampler` must draw contexts of at least {model.least_length} tokens for "
            f"this {type(model).__name__}, got {sampler.length}."
        )
