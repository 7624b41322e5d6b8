"""The saddles that a flow passed, and how well linear theory says why it left them."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._core import checks
from .._core.checks import Checked
from .._core.ravel import Ravel
from ..flows._flow import Flow
from ..landscape import CriticalPoint, CriticalPointError, find_critical_point
from .stages import Plateau, Stages, find_stages

LARGEST_ORBIT = 2**26
"""Numbers in the matrix whose rank is the dimension of a symmetry's orbit."""


MAX_STEPS = 300
ESCAPE_WIDTH = 32
SAME_LOSS = 1e-9
"""How far apart the losses of two critical points may be that are the same to theory:
they are polished to ‖∇L‖ < 1e-12."""


class Saddle(eqx.Module):
    """A critical point near which a flow was slow.

    With P the projection on the eigenvectors of negative eigenvalues at θ*, the escape
    eigenspace, linear theory says of the flow near θ* that P(θ - θ*) grows at a rate
    between the least and the largest of them, and in the end at the largest, μ, while
    everything else decays or stays.
    """

    t: float
    """When the flow was slowest near it, from where θ* was searched for."""
    plateau: Plateau
    point: CriticalPoint
    known: Any
    """The `KnownSaddle` of theory that it is, by its loss and index; or None."""
    symmetry_nullity: int | None
    """How many of the null directions at θ* turn it by a symmetry of the loss that is
    known; None where none is known."""
    predicted_rate: float
    """μ, minus the lowest eigenvalue at θ*."""
    measured_rate: float
    """d log‖P(θ - θ*)‖/dt, where it is steadiest between the slowest time and the
    plateau's end."""
    overlap: float
    """‖Pθ̇‖/‖θ̇‖, at its largest in that interval: how much of the flow leaves along
    the escape eigenspace."""
    departure: PyTree
    """θ̇/‖θ̇‖ at that time: the direction in which the flow really left."""
    predicted_residence: float
    """The time that growth at rate μ takes from P(θ - θ*) at the slowest time to the
    speed at which the plateau ends."""
    measured_residence: float
    """The time that it took."""

    @property
    def params(self) -> PyTree:
        return self.point.params

    @property
    def loss(self) -> float:
        return self.point.loss

    @property
    def index(self) -> int:
        return self.point.index

    @property
    def nullity(self) -> int | None:
        return self.point.nullity

    @property
    def other_nullity(self) -> int | None:
        """Null directions that no known symmetry explains."""
        if self.nullity is None:
            return None
        return self.nullity - (self.symmetry_nullity or 0)

    @property
    def distance(self) -> float:
        """How far the search moved from the flow's slowest point."""
        return self.point.distance

    @property
    def escape(self) -> Float[np.ndarray, "n index"]:
        """The escape eigenspace: orthonormal columns, in the order of the flat
        parameters."""
        return self.point.eigenvectors[:, : self.index]


class Saddles(Sequence):
    """The saddles of a flow, in order. `print` shows them as a table."""

    def __init__(self, saddles: Sequence[Saddle], notes: Sequence[str] = ()):
        self._saddles = tuple(saddles)
        self.notes = tuple(notes)
        """What was slow and turned out to be no saddle, or was not found, and why."""

    def __len__(self) -> int:
        return len(self._saddles)

    def __getitem__(self, index: Any) -> Any:
        return self._saddles[index]

    def __iter__(self) -> Iterator[Saddle]:
        return iter(self._saddles)

    def __repr__(self) -> str:
        return f"Saddles({', '.join(f't = {s.t:.4g}' for s in self)})"

    def __str__(self) -> str:
        if not self._saddles:
            return "\n".join(["no saddle found", *self.notes])
        head = (
            f"{'saddle':<6} {'slowest':>9} {'loss':>9} {'‖∇L‖':>8} {'moved':>8} "
            f"{'index':>5} {'nullity':>8} {'theory':>8} {'rate':>8} {'measured':>8} "
            f"{'overlap':>7} {'stays':>8} {'measured':>8}"
        )
        lines = [head]
        for s in self._saddles:
            nullity = "" if s.nullity is None else str(s.nullity)
            if s.nullity is not None and s.symmetry_nullity is not None:
                nullity = f"{s.symmetry_nullity}+{s.other_nullity}"
            name = "" if s.known is None else s.known.name
            theory = "" if s.known is None else f"{s.known.rate:.5f}"
            lines.append(
                f"{name:<6} t = {s.t:>5.4g} {s.loss:>9.5f} "
                f"{s.point.gradient_norm:>8.1e} {s.distance:>8.1e} {s.index:>5} "
                f"{nullity:>8} {theory:>8} {s.predicted_rate:>8.5f} "
                f"{s.measured_rate:>8.5f} {s.overlap:>7.4f} "
                f"{s.predicted_residence:>8.4g} {s.measured_residence:>8.4g}"
            )
        return "\n".join([*lines, *self.notes])


def find_saddles(
    flow: Checked[Flow],
    *,
    stages: Stages | None = None,
    gap: Checked[float | None] = None,
    tolerance: Checked[float] = 1e-12,
) -> Saddles:
    """The critical points that a flow passed: one for each plateau of its speed but the
    last, where it rests.

    Each is searched for from the flow's slowest point by Newton steps along the curved
    directions only. The saddles of Focus and Dilution are points of critical manifolds,
    along which a free search would slide, and the rate at which the flow leaves differs
    from point to point.

    **Arguments:**

    - `flow`: a flow that knows its loss.
    - `stages`: of this flow, if they are at hand.
    - `gap`: directions with |λ| ≤ gap count as null; see `find_critical_point` for the
        default.
    - `tolerance`: ‖∇L‖ to reach.

    **Returns:**

    `Saddles`, whose `notes` say of which plateaus no saddle came, and why.
    """
    if not isinstance(flow, Flow):
        raise ValueError(f"`flow` must be a Flow, got {type(flow).__name__}.")
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
            came_to = str(error).partition(" The point is in")[0]
            notes.append(f"{where}: {came_to}")
            continue
        if point.index == 0:
            notes.append(
                f"{where}: a critical point at distance {point.distance:.2g}, of loss "
                f"{point.loss:.6f}, which no direction leaves (index 0)"
            )
            continue
        found.append(_saddle(flow, loss, plateau, point))
    return Saddles(found, notes)


class _Escape(eqx.Module):
    """How a flow moves away from θ* in the escape eigenspace."""

    loss: Callable
    centre: Float[Array, " n"]
    basis: Float[Array, "n index"]

    def __call__(self, t: Any, params: PyTree) -> dict[str, Array]:
        ravel = Ravel.of(params)
        gradient = jax.grad(lambda p: jnp.asarray(self.loss(p), jnp.float64))(params)
        velocity = -ravel.ravel(gradient)
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
    flow: Flow, loss: Callable, plateau: Plateau, point: CriticalPoint
) -> Saddle:
    ravel = Ravel.of(flow.start)
    basis = point.eigenvectors[:, : point.index]
    # Wider by columns of zeros, so that saddles of other indices need no compilation.
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


def _known(loss: Any, point: CriticalPoint) -> Any:
    for known in loss.known_saddles:
        if known.index == point.index and abs(known.loss - point.loss) < SAME_LOSS:
            return known
    return None


def _steadiest(
    times: Float[np.ndarray, " times"], rates: Float[np.ndarray, " times"]
) -> float:
    """The rate where it changes least, relative to itself and to the time in which it
    makes a difference."""
    if len(times) < 3:
        return float(rates[-1])
    slope = np.abs(np.gradient(rates, times))
    change = np.where(rates > 0, slope / np.maximum(rates, 1e-300) ** 2, np.inf)
    return float(rates[np.argmin(change)])


def _orbit_dimension(flow: Flow, loss: Any, params: PyTree) -> int | None:
    """The dimension of the orbit of `params` under the symmetries that the loss knows
    of, from the rank of their generators. What moves less than half way, on a
    logarithmic scale, from the flow's initial weights to its largest is not counted:
    at θ¹, that weights which are still at their initial scale turn."""
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
