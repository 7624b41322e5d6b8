"""Dense output of a multistep method, from the points of its mesh alone.

The formula of order k passes a polynomial through the last k + 1 points of the mesh.
Whoever keeps these points can do so again at any later time, and stores one state a
step in place of its backward differences, which are seven.
"""

from typing import Any, ClassVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._low_rank_ndf import MAX_ORDER, LowRankNDF

POINTS = MAX_ORDER + 1
"""That the polynomial of the highest order passes through."""


class _MeshPoint(diffrax.AbstractLocalInterpolation):
    """What is stored of a step; `MeshInterpolation` looks at several."""

    t0: Any
    t1: Any
    y1: Any
    order: Any

    def evaluate(self, t0: Any, t1: Any = None, left: bool = True) -> Any:
        raise NotImplementedError("a point of the mesh says nothing between steps")


class _OnMesh(LowRankNDF):
    """`LowRankNDF`, whose dense output is to be read by a `MeshInterpolation`."""

    interpolation_cls: ClassVar = _MeshPoint

    def step(self, *args: Any, **kwargs: Any) -> Any:
        y1, error, dense, state, result = super().step(*args, **kwargs)
        return y1, error, {"y1": y1, "order": dense["order"]}, state, result


def on_mesh(solver: diffrax.AbstractSolver) -> diffrax.AbstractSolver:
    """The solver with dense output on its mesh, if it has any such, which then pauses
    for new eigenpairs."""
    if not has_mesh(solver):
        return solver
    assert isinstance(solver, LowRankNDF)
    return _OnMesh(
        solver.rank,
        solver.refresh_every,
        counts_work=True,
        pauses=True,
        root_finder=solver.root_finder,
        root_find_max_steps=solver.root_find_max_steps,
    )


def has_mesh(solver: diffrax.AbstractSolver) -> bool:
    """Whether `on_mesh` has such output for it."""
    return type(solver) is LowRankNDF


class RecentPoints(eqx.Module):
    """The last points of the mesh before a solve goes on, in the order of time."""

    ts: Float[Array, " points"]
    ys: Float[Array, "points n"]

    @classmethod
    def first(cls, t: Float[Array, ""], y: Float[Array, " n"]) -> "RecentPoints":
        """One point, in as many copies: the first steps look at no more."""
        return cls(jnp.full(POINTS, t), jnp.tile(y, (POINTS, 1)))


class MeshInterpolation(eqx.Module):
    """A flow between the points of its mesh: at time t in (t_{i-1}, t_i], reached by a
    step of order k, the polynomial of degree k through the points i-k … i. With the
    interface of `diffrax.DenseInterpolation`, but for what nobody asks for."""

    times: Float[Array, " before_and_steps"]
    """Of the recent points before the first step, of where each step ended, then
    infinity."""
    points: Float[Array, "before_and_steps n"]
    orders: Float[Array, " steps"]
    ts_size: Int[Array, ""]

    @classmethod
    def empty(cls, before: RecentPoints, steps: int) -> "MeshInterpolation":
        """With room for so many steps."""
        size = before.ys.shape[1]
        return cls(
            jnp.concatenate([before.ts, jnp.full(steps, jnp.inf)]),
            jnp.concatenate([before.ys, jnp.zeros((steps, size))]),
            jnp.zeros(steps),
            jnp.ones((), jnp.int32),
        )

    @staticmethod
    def bytes_a_step(size: int) -> int:
        """That a step of so many numbers takes: its point, time and order."""
        return 8 * (size + 2)

    def extended(self, dense: diffrax.DenseInterpolation) -> "MeshInterpolation":
        """With what diffrax stored of an `on_mesh` solver, flat states: so many steps
        must fit in here as `dense` has room for."""
        infos: Any = dense.infos
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
        """Where the first step began, and where each ended, then infinity."""
        return self.times[POINTS - 1 :]

    @property
    def ys(self) -> Float[Array, "steps_and_one n"]:
        """The flow at these times."""
        return self.points[POINTS - 1 :]

    def evaluate(self, t: Float[Array, ""]) -> Float[Array, " n"]:
        last = jnp.minimum(jnp.searchsorted(self.ts[1:], t), self.ts_size - 2)
        ts, ys = self._up_to(last)
        # Before the first step there is one point, of itself.
        order = jnp.where(last < 0, 0.0, self.orders[jnp.maximum(last, 0)])
        used = jnp.arange(POINTS)[::-1] <= order
        other = used[None, :] & ~jnp.eye(POINTS, dtype=bool)
        gaps = jnp.where(other, ts[:, None] - ts[None, :], 1.0)
        factors = jnp.where(other, (t - ts)[None, :] / gaps, 1.0)
        return jnp.where(used, jnp.prod(factors, axis=1), 0.0) @ ys

    @property
    def recent(self) -> RecentPoints:
        """The last points, for the solve that goes on from here."""
        return RecentPoints(*self._up_to(self.ts_size - 2))

    def _up_to(
        self, last: Int[Array, ""]
    ) -> tuple[Float[Array, " points"], Float[Array, "points n"]]:
        """The points that the step `last` ended at, and those before it."""
        ts = jax.lax.dynamic_slice_in_dim(self.times, last + 1, POINTS)
        return ts, jax.lax.dynamic_slice_in_dim(self.points, last + 1, POINTS)
