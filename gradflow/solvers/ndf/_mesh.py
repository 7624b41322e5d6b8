"""Dense output of a multistep method from the points of its mesh alone.

The formula of order k passes a polynomial through the last k + 1 points of the mesh.
From the stored points it can be rebuilt at any later time, so that a step stores one
state instead of its backward differences, which are seven.
"""

from typing import ClassVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .._types import BoolScalar, DiffraxField, RealScalar
from ._formulas import MAX_ORDER
from ._solver import AbstractLowRankNDF, LowRankNDF, State, Stepped

POINTS = MAX_ORDER + 1
"""The number of points that the polynomial of the highest order passes through."""


class _MeshPoint(diffrax.AbstractLocalInterpolation):
    """The part of a step that is stored; `MeshInterpolation` reads several."""

    t0: DiffraxField
    t1: DiffraxField
    y1: PyTree
    order: RealScalar

    def evaluate(
        self, t0: RealScalar, t1: RealScalar | None = None, left: bool = True
    ) -> PyTree:
        raise NotImplementedError(
            "A single mesh point cannot be interpolated: use `MeshInterpolation`."
        )


class MeshNDF(AbstractLowRankNDF):
    """`LowRankNDF` with dense output for `MeshInterpolation`."""

    interpolation_cls: ClassVar = _MeshPoint

    def step(
        self,
        terms: diffrax.AbstractTerm,
        t0: RealScalar,
        t1: RealScalar,
        y0: PyTree,
        args: PyTree,
        solver_state: State,
        made_jump: BoolScalar,
    ) -> Stepped:
        y1, error, dense, state, result = self._attempt(
            terms, t0, t1, y0, args, solver_state
        )
        return y1, error, {"y1": y1, "order": dense["order"]}, state, result


def on_mesh(solver: diffrax.AbstractSolver) -> diffrax.AbstractSolver:
    """The solver with dense output on its mesh, which also pauses for new eigenpairs;
    a solver without `has_mesh` is returned unchanged."""
    if not has_mesh(solver):
        return solver
    assert isinstance(solver, LowRankNDF)
    return MeshNDF(
        rank=solver.rank,
        refresh_every=solver.refresh_every,
        counts_work=True,
        pauses=True,
        root_finder=solver.root_finder,
        root_find_max_steps=solver.root_find_max_steps,
    )


def has_mesh(solver: diffrax.AbstractSolver) -> bool:
    """Whether `on_mesh` can give the solver dense output on its mesh."""
    # Not a subclass, whose own `step` would be lost.
    return type(solver) is LowRankNDF


class RecentPoints(eqx.Module):
    """The last points of the mesh from which a solve continues, in order of time."""

    ts: Float[Array, " points"]
    ys: Float[Array, "points n"]

    @classmethod
    def first(cls, t: Float[Array, ""], y: Float[Array, " n"]) -> "RecentPoints":
        """Copies of the initial point; the first steps read no other."""
        return cls(jnp.full(POINTS, t), jnp.tile(y, (POINTS, 1)))


class MeshInterpolation(eqx.Module):
    """A flow between the points of its mesh: at a time t in (t_{i-1}, t_i], reached by
    a step of order k, the polynomial of degree k through the points i-k … i. It has the
    part of `diffrax.DenseInterpolation`'s interface that gradflow uses."""

    times: Float[Array, " before_and_steps"]
    """The times of the recent points before the first step, then the end of each step,
    then infinity."""
    points: Float[Array, "before_and_steps n"]
    orders: Float[Array, " steps"]
    ts_size: Int[Array, ""]

    @classmethod
    def empty(cls, before: RecentPoints, steps: int) -> "MeshInterpolation":
        """No steps yet, with room for `steps` of them."""
        size = before.ys.shape[1]
        return cls(
            jnp.concatenate([before.ts, jnp.full(steps, jnp.inf)]),
            jnp.concatenate([before.ys, jnp.zeros((steps, size))]),
            jnp.zeros(steps),
            jnp.ones((), jnp.int32),
        )

    @staticmethod
    def bytes_a_step(size: int) -> int:
        """The memory of one step with a state of `size` numbers: its point, time and
        order."""
        return 8 * (size + 2)

    def extended(self, dense: diffrax.DenseInterpolation) -> "MeshInterpolation":
        """This interpolation with the steps that diffrax stored of an `on_mesh` solver
        with flat states. There must be room for as many steps as `dense` has."""
        infos = dense.infos
        write = jax.lax.dynamic_update_slice_in_dim
        done = self.ts_size - 1
        return MeshInterpolation(
            write(self.times, dense.ts[1:], POINTS + done, 0),
            write(self.points, infos["y1"], POINTS + done, 0),
            write(self.orders, infos["order"], done, 0),
            self.ts_size + jnp.asarray(dense.ts_size, jnp.int32) - 1,
        )

    @property
    def ts(self) -> Float[Array, " steps_and_one"]:
        """The start of the first step and the end of each step, then infinity."""
        return self.times[POINTS - 1 :]

    @property
    def ys(self) -> Float[Array, "steps_and_one n"]:
        """The flow at these times."""
        return self.points[POINTS - 1 :]

    def evaluate(self, t: Float[Array, ""]) -> Float[Array, " n"]:
        last = jnp.minimum(jnp.searchsorted(self.ts[1:], t), self.ts_size - 2)
        ts, ys = self._up_to(last)
        # Before the first step there is only the initial point.
        order = jnp.where(last < 0, 0.0, self.orders[jnp.maximum(last, 0)])
        used = jnp.arange(POINTS)[::-1] <= order
        other = used[None, :] & ~jnp.eye(POINTS, dtype=bool)
        gaps = jnp.where(other, ts[:, None] - ts[None, :], 1.0)
        factors = jnp.where(other, (t - ts)[None, :] / gaps, 1.0)
        return jnp.where(used, jnp.prod(factors, axis=1), 0.0) @ ys

    @property
    def recent(self) -> RecentPoints:
        """The last points, from which the solve continues."""
        return RecentPoints(*self._up_to(self.ts_size - 2))

    def _up_to(
        self, last: Int[Array, ""]
    ) -> tuple[Float[Array, " points"], Float[Array, "points n"]]:
        """The point at the end of the step `last`, and those before it."""
        ts = jax.lax.dynamic_slice_in_dim(self.times, last + 1, POINTS)
        return ts, jax.lax.dynamic_slice_in_dim(self.points, last + 1, POINTS)
