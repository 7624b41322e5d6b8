"""train(): a loss, a start and a discrete optimiser in, a training run out."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._core import checks, seeds
from .._core.checks import Checked
from .._core.compiled import RunClock, compiled, make_room_for_code
from .._core.progress import Report, progress_bar
from .._core.ravel import Ravel
from .._core.types import Seed
from .._stepping import (
    RESULTS,
    Continuation,
    Equation,
    Settings,
    Snapshot,
    Statistics,
    Watch,
    versions,
)
from ..flows import Certificate, DenseOutput, FlowError, Training
from ..problems import (
    AbstractLoss,
    Observable,
    Problem,
    checked_loss,
    chosen_observables,
)
from ._optimiser import resolved
from ._samplers import AbstractSampler
from ._step import Plan, State, advance, start

DEFAULT_SAVED = 200
LONGEST_CHUNK = 1000
"""Steps between two updates of the progress bar, however far apart the saved ones
are."""


def train(
    loss: Checked[Callable[[PyTree], Any]],
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
    seed: Checked[Seed] = 0,
    progress: bool = False,
    throw: bool = True,
) -> Training:
    """Train with a discrete optimiser, on the clock of the flow: after n steps it is

        t_n = η_0 + … + η_{n-1},

    the sum of the learning rates, so that gradient descent follows θ̇ = -∇L(θ) with an
    error of order η.

    **Arguments:**

    - `loss`: the loss, as for `integrate`. With a `sampler` it is a [`Problem`][]: its
        model is trained, and loss, speed and observables are measured on its
        population.
    - `params`: where the training starts.
    - `optimiser`: a learning rate η, for gradient descent; or a function from a
        learning rate to an optax optimiser, such as `optax.adamw` or
        `lambda eta: optax.sgd(eta, momentum=0.9)`; or an optax optimiser.
    - `steps`: the number of steps.
    - `sampler`: draws a fresh batch of token sequences for each step, such as a
        [`SequenceSampler`][]; by default gradients are those of the loss, exactly.
    - `learning_rate`: a number, or a schedule: a function of the step, counted from
        zero. It goes to the `optimiser` and to the clock. An optimiser that was made
        with its own rate does not expose it, except through
        `optax.inject_hyperparams`; then `learning_rate` sets only the clock, and is not
        checked. It may therefore count what a step is worth: η/(1-β) for a momentum β,
        which makes steps longer than those of plain descent by that factor.
    - `saved`: increasing steps at which to save, besides the first and the last; by
        default about 200 geometrically spaced ones.
    - `observables`: as for `integrate`.
    - `seed`: the seed of the sampled sequences, a whole number or a `jax.random.key`.
    - `progress`: whether to show a progress bar.
    - `throw`: whether a run that overflows raises a `FlowError`, whose `flow` holds
        what was computed, or returns that run.

    **Returns:**

    A `Training` whose `ts` are the times t_n of the saved steps. `training.at(t)` lies
    on the straight line between two saved iterates, and its certificate says how far
    the run is from a flow: the drift of what a flow conserves, and of
    L(0) - L(t) - Σ η‖∇L‖².
    """
    checks.refuse_tracers(loss, params)
    steps = checks.whole_number("steps", steps)
    seed = seeds.check("seed", seed)
    due = _saved_steps(saved, steps)
    loss = checked_loss(loss, params)
    _check_sampler(sampler, loss)
    named, functions = chosen_observables(loss, params, observables)
    notes = checks.promotion_notes(params)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
    name, make, rates = resolved(optimiser, learning_rate, params, steps)

    make_room_for_code()
    run_clock = RunClock()
    constant = bool(np.all(rates == rates[0]))
    rate = jnp.asarray(rates[0] if constant else rates)
    plan = Plan(loss, make, rate, sampler, seeds.jax_key("seed", seed))
    # Summed in extended precision, where there is one: millions of roundings add up.
    clock = np.append(0.0, np.cumsum(rates, dtype=np.longdouble)).astype(float)
    watch = _watch(loss, params, named, functions)
    state = _start(plan, params)
    with progress_bar(clock[-1], progress) as report:
        state, reached, seen = _run(plan, state, watch, due, clock, report)
    stats = Statistics(
        solver=name,
        num_accepted_steps=int(state.step),
        num_evaluations=int(state.step) + 1,
        num_hessian_products=0,
        num_newton_failures=0,
        compile_seconds=run_clock.compile_seconds,
        run_seconds=run_clock.run_seconds,
        dense_until=float(clock[reached[-1]]),
        reason=_why_it_ended(state, seen, clock),
        notes=notes,
        versions=versions(),
    )
    training = _training(plan, params, state, reached, seen, clock, rates, stats, seed)
    if throw and not training.ended_as_wanted:
        raise FlowError(
            f"The training {stats.reason}. What was computed until then is in this "
            "exception's `flow`; `throw=False` returns it instead.",
            training,
        )
    return training


def _start(plan: Plan, params: PyTree) -> State:
    state = start(plan, params)
    if not state.is_finite:
        raise ValueError(
            "`loss` and its gradient must be finite at `params`, where the training "
            f"starts; the loss is {float(state.value):g}."
        )
    return state


def _why_it_ended(
    state: State, seen: Snapshot, clock: Float[np.ndarray, " steps_and_start"]
) -> str:
    """Why a run ended early; empty if it took all of its steps."""
    if state.is_finite:
        return ""
    taken, steps = int(state.step), len(clock) - 1
    return (
        f"overflowed at step {taken + 1:,} of {steps:,}, after "
        f"t = {clock[taken]:.10g}, where the loss was {float(seen.loss[-1]):.6g}: try "
        "a smaller learning rate"
    )


def _training(
    plan: Plan,
    params: PyTree,
    state: State,
    reached: list[int],
    seen: Snapshot,
    clock: Float[np.ndarray, " steps_and_start"],
    rates: Float[np.ndarray, " steps"],
    stats: Statistics,
    seed: Seed,
) -> Training:
    """The run from `params` to `state`, of which the steps `reached` were seen."""
    ts = clock[reached]
    return Training(
        ts=ts,
        params=seen.params,
        loss=np.asarray(seen.loss),
        speed=np.asarray(seen.speed),
        observables=seen.observables,
        stats=stats,
        result=RESULTS.internal_error if stats.reason else RESULTS.successful,
        certificate=_certificate(state, seen, plan.sampler is not None),
        start=jax.tree.map(np.asarray, params),
        problem=plan.loss,
        learning_rates=(float(rates.min()), float(rates.max())),
        t1=float(clock[-1]),
        sampler="" if plan.sampler is None else repr(plan.sampler),
        seed=seed if isinstance(seed, int) else None,
        dense=DenseOutput.of_iterates(ts, seen.params),
    )


def _run(
    plan: Plan,
    state: State,
    watch: Watch,
    due: Int[np.ndarray, " due"],
    clock: Float[np.ndarray, " steps_and_start"],
    report: Report,
) -> tuple[State, list[int], Snapshot]:
    """Step to the last step that is due, or as far as numbers stay finite. Returns the
    state there, the steps that were recorded, and their snapshots."""
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


def _watch(
    loss: AbstractLoss,
    params: PyTree,
    named: tuple[str, ...],
    functions: dict[str, Observable],
) -> Watch:
    # Gradient descent is Euler's method; only the equation's loss is used.
    ravel, unused = Ravel.of(params), Settings(0.0, "euler", 0.0, 0.0)
    equation = Equation.of(loss, ravel, diffrax.Euler(), unused)
    return Watch(equation, ravel.ravel(params), named, functions)


@compiled
def _snapshot(watch: Watch, y: Float[Array, " n"]) -> Snapshot:
    return watch.snapshot(y)


def _certificate(state: State, seen: Snapshot, sampled: bool) -> Certificate:
    """The certificate of a run whose steps balance a sum, not an integral; on samples
    the balance of the whole loss is unknown."""
    account = dataclasses.replace(
        state.account,
        initial_loss=np.asarray(seen.loss[0]),
        quadrature_error=np.array(math.nan),
        imbalance=np.array(math.nan) if sampled else state.account.imbalance,
    )
    return Certificate.of(Continuation.of(account, seen), np.asarray(seen.loss))


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
            f"`saved` must list steps from 0 to `steps` = {steps:,}, "
            f"got {due[0]:g} to {due[-1]:g}."
        )
    return np.union1d(due.astype(int), [0, steps])


def _check_sampler(sampler: Any, loss: AbstractLoss) -> None:
    if sampler is None:
        return
    if not isinstance(sampler, AbstractSampler):
        raise ValueError(
            "`sampler` must be a gradflow sampler such as SequenceSampler, got "
            f"{type(sampler).__name__}."
        )
    if not isinstance(loss, Problem):
        raise ValueError(
            "`loss` must be a gradflow.Problem to train its model on sampled "
            f"sequences, got {type(loss).__name__}."
        )
    model = loss.model
    if sampler.vocabulary != model.vocabulary:
        raise ValueError(
            f"`sampler` draws from {sampler.vocabulary} tokens, but the model of "
            f"`loss` has a vocabulary of {model.vocabulary}."
        )
    if sampler.length < model.least_length:
        raise ValueError(
            f"`sampler` must draw contexts of at least {model.least_length} tokens for "
            f"this {type(model).__name__}, got {sampler.length}."
        )
