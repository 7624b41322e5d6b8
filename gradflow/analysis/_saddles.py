"""find_saddles(): the saddles that a flow passed, compared with linear theory."""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core import checks
from .._core.checks import Checked
from .._core.ravel import Ravel
from .._core.result_tables import AbstractResults, Column, legend, listed, table
from ..flows import AbstractTrajectory, check_flow
from ..landscape import CriticalPoint, CriticalPointError, find_critical_point
from ..problems import AbstractLoss, KnownSaddle
from .stages import Plateau, Stages, find_stages

LARGEST_ORBIT = 2**26
"""The largest size of the matrix whose rank is the dimension of a symmetry orbit."""

MAX_STEPS = 300
ESCAPE_WIDTH = 32
SAME_LOSS = 1e-9
"""The largest difference between the loss of a critical point and that of the known
saddle it is identified with: points are polished to ‖∇L‖ < 1e-12."""


class Saddle(eqx.Module):
    """A critical point near which a flow was slow.

    Let P be the projection on the escape eigenspace: the eigenvectors at θ* with
    negative eigenvalues. Linear theory predicts that near θ* the component P(θ - θ*)
    grows at a rate between the smallest and the largest |λ| among them, and eventually
    at the largest, μ, while every other component decays or stays.
    """

    t: float
    """The time at which the flow was slowest; the search for θ* starts there."""
    plateau: Plateau
    point: CriticalPoint
    known: KnownSaddle | None
    """The saddle of theory with the same loss and index, if there is one."""
    symmetry_nullity: int | None
    """The number of null directions at θ* that a known symmetry of the loss explains;
    None if no symmetry is known."""
    predicted_rate: float
    """μ: minus the lowest eigenvalue at θ*."""
    measured_rate: float
    """d log‖P(θ - θ*)‖/dt where it is steadiest between the slowest time and the end of
    the plateau."""
    overlap: float
    """The largest ‖Pθ̇‖/‖θ̇‖ in that interval: one if the flow leaves within the escape
    eigenspace."""
    departure: PyTree
    """θ̇/‖θ̇‖ at that time: the direction in which the flow leaves."""
    predicted_residence: float
    """The time in which P(θ - θ*), growing at rate μ from the slowest time, reaches the
    speed at which the plateau ends."""
    measured_residence: float
    """The time from the slowest point to the end of the plateau."""

    @property
    def params(self) -> PyTree:
        """θ*."""
        return self.point.params

    @property
    def loss(self) -> float:
        """L(θ*)."""
        return self.point.loss

    @property
    def index(self) -> int:
        """The number of negative eigenvalues at θ*."""
        return self.point.index

    @property
    def nullity(self) -> int | None:
        """The number of null directions at θ*, if the whole spectrum is known."""
        return self.point.nullity

    @property
    def other_nullity(self) -> int | None:
        """The number of null directions that no known symmetry explains."""
        if self.nullity is None:
            return None
        return self.nullity - (self.symmetry_nullity or 0)

    @property
    def distance(self) -> float:
        """The distance of θ* from the slowest point of the flow."""
        return self.point.distance

    @property
    def escape(self) -> Float[np.ndarray, "n index"]:
        """An orthonormal basis of the escape eigenspace, one column each, in the order
        of the flat parameters."""
        return self.point.eigenvectors[:, : self.index]


_COLUMNS = (
    Column("saddle", "the saddle of theory with this loss and index, if any.", 6, "<"),
    Column("slowest", "the time at which the flow is slowest near the saddle.", 9),
    Column("loss", "L at the saddle.", 9),
    Column("‖∇L‖", "the norm of the gradient there, after polishing.", 8),
    Column("moved", "the distance of the saddle from the flow's slowest point.", 8),
    Column("index", "the number of negative Hessian eigenvalues.", 5),
    Column(
        "nullity",
        "a+b null directions: a from known symmetries of the loss, b others.",
        8,
    ),
    Column("theory", "the rate of departure that theory gives in closed form.", 8),
    Column("rate", "the rate predicted here: minus the lowest eigenvalue.", 8),
    Column("measured", "the rate at which the flow leaves.", 8),
    Column("overlap", "the part of the velocity in the escape eigenspace, up to 1.", 7),
    Column("stays", "the time near the saddle that linear theory predicts.", 8),
    Column("stayed", "the time from the slowest point to the plateau's end.", 8),
)


@dataclass(frozen=True, eq=False, repr=False)
class Saddles(AbstractResults[Saddle]):
    """The saddles of a flow in order of time. `print` shows them as a table."""

    saddles: tuple[Saddle, ...]
    notes: tuple[str, ...] = ()
    """For each plateau without a saddle, the reason."""

    def __len__(self) -> int:
        return len(self.saddles)

    def _result(self, index: int) -> Saddle:
        return self.saddles[index]

    def _summary(self) -> str:
        return listed([f"t = {s.t:.4g}" for s in self.saddles])

    def _table(self) -> str:
        if not self.saddles:
            return "\n".join(["no saddle found", *self.notes])
        meanings = [(c.title, c.meaning) for c in _COLUMNS]
        rows = [_row(saddle) for saddle in self.saddles]
        return "\n".join([table(_COLUMNS, rows), *self.notes, legend(meanings)])


def _row(s: Saddle) -> tuple[str, ...]:
    nullity = "" if s.nullity is None else str(s.nullity)
    if s.nullity is not None and s.symmetry_nullity is not None:
        nullity = f"{s.symmetry_nullity}+{s.other_nullity}"
    return (
        "" if s.known is None else s.known.name,
        f"t = {s.t:>5.4g}",
        f"{s.loss:.5f}",
        f"{s.point.gradient_norm:.1e}",
        f"{s.distance:.1e}",
        str(s.index),
        nullity,
        "" if s.known is None else f"{s.known.rate:.5f}",
        f"{s.predicted_rate:.5f}",
        f"{s.measured_rate:.5f}",
        f"{s.overlap:.4f}",
        f"{s.predicted_residence:.4g}",
        f"{s.measured_residence:.4g}",
    )


def find_saddles(
    flow: Checked[AbstractTrajectory],
    *,
    stages: Checked[Stages | None] = None,
    gap: Checked[float | None] = None,
    tolerance: Checked[float] = 1e-12,
) -> Saddles:
    """The critical points that a flow passed: one for each plateau of its speed except
    the last, where it comes to rest.

    The search starts from the slowest point of each plateau and takes Newton steps
    along the curved directions only. The saddles of Focus and Dilution lie on critical
    manifolds, along which an unrestricted search would slide, and the rate at which the
    flow leaves differs from point to point.

    **Arguments:**

    - `flow`: a flow that knows its loss.
    - `stages`: the stages of this flow, if they are known already.
    - `gap`: directions with |λ| ≤ gap count as null; see `find_critical_point` for the
        default.
    - `tolerance`: the ‖∇L‖ to reach.

    **Returns:**

    `Saddles`, whose `notes` give the reason for each plateau without a saddle.
    """
    flow = check_flow(flow)
    if gap is not None:
        gap = checks.positive_number("gap", gap, zero_allowed=True)
    tolerance = checks.positive_number("tolerance", tolerance)
    loss = flow.require_problem("`gradflow.find_saddles`")
    stages = find_stages(flow) if stages is None else stages
    if not stages.plateaus:
        return Saddles((), (stages.reason,))
    found, notes = [], []
    for plateau in stages.plateaus:
        if plateau.end == flow.mesh[-1]:
            continue
        where = f"near t = {plateau.slowest:.4g}"
        start = flow.at(plateau.slowest)
        try:
            point = find_critical_point(
                loss, start, gap=gap, tolerance=tolerance, max_steps=MAX_STEPS
            )
        except CriticalPointError as error:
            how_far = str(error).partition(" The point is in")[0]
            notes.append(f"{where}: {how_far}")
            continue
        if point.index == 0:
            notes.append(
                f"{where}: the critical point at distance {point.distance:.2g} with "
                f"loss {point.loss:.6f} is not a saddle (index 0)"
            )
            continue
        found.append(_saddle(flow, loss, plateau, point))
    return Saddles(tuple(found), tuple(notes))


class _Escape(eqx.Module):
    """The motion of a flow away from θ* within the escape eigenspace."""

    loss: AbstractLoss
    centre: Float[Array, " n"]
    basis: Float[Array, "n index"]

    def __call__(self, t: Float[Array, ""], params: PyTree) -> dict[str, Array]:
        ravel = Ravel.of(params)
        velocity = -ravel.ravel(jax.grad(self.loss.in_double)(params))
        away = self.basis.T @ (ravel.ravel(params) - self.centre)
        along = self.basis.T @ velocity
        speed, size = jnp.linalg.norm(velocity), jnp.linalg.norm(away)
        return {
            "size": size,
            "speed": speed,
            "rate": away @ along / jnp.where(size > 0, size**2, 1.0),
            "overlap": jnp.linalg.norm(along) / jnp.where(speed > 0, speed, 1.0),
        }


def _saddle(
    flow: AbstractTrajectory, loss: AbstractLoss, plateau: Plateau, point: CriticalPoint
) -> Saddle:
    """The measurements of the flow's departure from `point`."""
    ravel = Ravel.of(flow.start)
    basis = point.eigenvectors[:, : point.index]
    # Columns of zeros pad the basis, so that one compilation serves several indices.
    wider = -point.index % ESCAPE_WIDTH
    basis = jnp.asarray(np.pad(basis, ((0, 0), (0, wider))))
    escape = _Escape(loss, ravel.ravel(point.params), basis)
    mesh = flow.mesh
    inside = mesh[(mesh > plateau.slowest) & (mesh < plateau.end)]
    times = np.concatenate([[plateau.slowest], inside, [plateau.end]])
    seen = flow.along(escape, times)
    best = int(np.argmax(seen["overlap"]))
    rate = float(-point.eigenvalues[0])
    growth = seen["speed"][-1] / (rate * seen["size"][0])
    velocity = jax.tree.map(
        lambda g: -np.asarray(g) / seen["speed"][best],
        jax.grad(loss)(flow.at(times[best])),
    )
    return Saddle(
        t=plateau.slowest,
        plateau=plateau,
        point=point,
        known=_known(loss, point),
        symmetry_nullity=_orbit_dimension(flow, loss, point.params),
        predicted_rate=rate,
        measured_rate=_steadiest(times, seen["rate"]),
        overlap=float(seen["overlap"][best]),
        departure=velocity,
        predicted_residence=float(np.log(growth)) / rate,
        measured_residence=plateau.end - plateau.slowest,
    )


def _known(loss: AbstractLoss, point: CriticalPoint) -> KnownSaddle | None:
    """The saddle of theory that `point` is."""
    for known in loss.known_saddles:
        if known.index == point.index and abs(known.loss - point.loss) < SAME_LOSS:
            return known
    return None


def _steadiest(
    times: Float[np.ndarray, " times"], rates: Float[np.ndarray, " times"]
) -> float:
    """The rate r where |dr/dt|/r² is smallest: where it changes least within the time
    1/r in which it acts."""
    if len(times) < 3:
        return float(rates[-1])
    slope = np.abs(np.gradient(rates, times))
    change = np.where(rates > 0, slope / np.maximum(rates, 1e-300) ** 2, np.inf)
    return float(rates[np.argmin(change)])


def _orbit_dimension(
    flow: AbstractTrajectory, loss: AbstractLoss, params: PyTree
) -> int | None:
    """The dimension of the orbit of `params` under the known symmetries of the loss:
    the rank of their generators. Singular values count if they exceed the geometric
    mean of the largest weight at the start and the largest along the flow. At θ¹ this
    excludes rotations of weights that are still at their initial scale."""
    generators = loss.symmetry_generators
    shapes = jax.tree.leaves(jax.eval_shape(generators, params))
    if not shapes or sum(x.size for x in shapes) > LARGEST_ORBIT:
        return None
    vectors = generators(params)
    count = len(jax.tree.leaves(vectors)[0])
    if count == 0:
        return 0
    matrix = np.concatenate(
        [np.reshape(x, (count, -1)) for x in jax.tree.leaves(vectors)], axis=1
    )
    least = math.sqrt(_largest(flow.start) * _largest(flow.params))
    return int(np.sum(np.linalg.svd(matrix, compute_uv=False) > least))


def _largest(params: PyTree) -> float:
    return max(float(np.max(np.abs(x))) for x in jax.tree.leaves(params))
