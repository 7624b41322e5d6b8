"""Integrating a stretch of a flow again, for its dense output."""

from collections.abc import Iterator

import diffrax
import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from .._core.ravel import Ravel
from ..problems import AbstractLoss
from ..solvers import _internals as solvers
from ._ending import RESULTS, ended_by, how_it_ended
from ._equation import Equation, Settings
from ._outcome import Piece
from ._segments import advance, start


def same_solver(
    settings: Settings, solver: diffrax.AbstractSolver | None
) -> str | diffrax.AbstractSolver:
    """The `solver` argument that selects a flow's solver again: its name where that
    says everything, otherwise the object itself."""
    named = settings.solver in solvers.names()
    if solver is None and not named:  # a loaded flow knows only its solver's name
        raise ValueError(
            f"The flow was integrated by {settings.solver!r}, which is not one of "
            "gradflow's named solvers: pass it as `Flow.load(path, solver=...)`."
        )
    if solver is None or (
        named and eqx.tree_equal(solver, solvers.resolve(settings.solver).solver)
    ):
        return settings.solver
    return solver


def integrate_again(
    loss: AbstractLoss,
    settings: Settings,
    solver: diffrax.AbstractSolver | None,
    params: PyTree,
    t0: float,
    t1: float,
) -> Iterator[Piece]:
    """The dense output from t0 to t1, piece by piece, of the flow that is at `params`
    at time t0."""
    ravel = Ravel.of(params)
    again = solvers.resolve(same_solver(settings, solver)).solver
    equation = Equation.of(loss, ravel, again, settings)
    end, unlimited = jnp.asarray(t1), jnp.asarray(solvers.NO_LIMIT)
    state, steps = start(equation, ravel.ravel(params), end, unlimited, jnp.asarray(t0))
    ended = None
    while ended is None:
        begun = float(state.t)
        segment = advance(equation, state, end, steps, None)
        state = segment.state
        ended = how_it_ended(segment.state, segment.result, t1, 0, None)
        if ended is None or ended_by(ended[0], RESULTS.successful):
            yield Piece(begun, float(state.t), segment.dense)
    result, reason = ended
    if not ended_by(result, RESULTS.successful):
        raise RuntimeError(f"Integrated again from t = {t0:.10g}, the flow {reason}.")
