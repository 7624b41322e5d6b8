"""The reference solution: errors are measured against one that two methods agree on."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from _contestants import ATOL
from _external_solvers import HostFunctions, cvode, odeint
from _problems import Flow, VectorField
from jaxtyping import Array, Float

import gradflow
from gradflow._core.compiled import compiled
from gradflow._core.power_method import power_method, random_vector
from gradflow.solvers import _internals

DENSE_LIMIT = 500
"""The largest state for which LSODA's matrices allow a tight solve."""
EXPLICIT_LIMIT = 20_000
"""The largest state for which explicit methods are affordable. Beyond it they would
take hours to reach the stiff part of the flow, and two implicit methods are compared
instead."""
SPECTRA = 20
"""The number of saved times at which the Hessian's largest eigenvalue is computed."""


@dataclass(frozen=True)
class Truth:
    ys: Float[np.ndarray, "times n"]
    stiffness: float
    """The largest eigenvalue of ∇²L at some of the saved times."""
    methods: str
    agreement: float
    """The largest difference between the two methods' solutions."""

    @property
    def scale(self) -> float:
        """The largest entry of the solution."""
        return float(np.max(np.abs(self.ys)))

    def error(self, ys: Float[np.ndarray, "times n"]) -> float:
        return float(np.max(np.abs(ys - self.ys)))

    def __str__(self) -> str:
        return (
            f"{self.methods} agree within {self.agreement:.1e} "
            f"(max |y| = {self.scale:.3g}, λ_max = {self.stiffness:.4g})"
        )


def truth(flow: Flow, y0: Float[np.ndarray, " n"], folder: Path) -> Truth:
    """The reference solution, read from `folder` if it was computed before."""
    path = folder / "truth" / f"{flow.name}-{_fingerprint(flow, y0)}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        found = _compute(flow, y0)
        np.savez(path, **vars(found))
    with np.load(path) as stored:
        return Truth(
            stored["ys"],
            float(stored["stiffness"]),
            str(stored["methods"]),
            float(stored["agreement"]),
        )


def _fingerprint(flow: Flow, y0: np.ndarray) -> str:
    """A hash of the start, the times, this file, and the vector field at two points."""
    elsewhere = np.random.default_rng(0).normal(size=y0.size)
    values = [flow.field(jnp.asarray(y)) for y in (y0, elsewhere)]
    # Rounded, because the last bits differ between machines.
    digits = "".join(f"{float(jnp.linalg.norm(value)):.9e}" for value in values)
    content = y0.tobytes() + flow.ts.tobytes() + digits.encode()
    return hashlib.sha256(content + Path(__file__).read_bytes()).hexdigest()[:16]


def _compute(flow: Flow, y0: np.ndarray) -> Truth:
    if flow.exact is None and flow.size > EXPLICIT_LIMIT:
        methods = "CVODE with GMRES and ndf"
        ys = cvode(flow, HostFunctions(flow), "gmres")(y0, 1e-11)[0]
        other = _tight(flow, gradflow.solvers.LowRankNDF(), y0, 1e-10)
        return _agreed(flow, methods, ys, other)
    explicit = _tight(flow, diffrax.Tsit5(), y0, 1e-11)
    if flow.exact is not None:
        methods, ys = "the closed form and Tsit5", flow.exact(flow.ts, y0)
    elif flow.size <= DENSE_LIMIT:
        methods, ys = "LSODA and Tsit5", odeint(flow, HostFunctions(flow))(y0, 1e-13)[0]
    else:
        methods = "Dopri8 and Tsit5"
        ys = _tight(flow, diffrax.Dopri8(), y0, 1e-12)
    return _agreed(flow, methods, ys, explicit)


def _agreed(flow: Flow, methods: str, ys: np.ndarray, other: np.ndarray) -> Truth:
    agreement = float(np.max(np.abs(ys - other)))
    some = np.linspace(0, len(ys) - 1, SPECTRA).astype(int)
    stiffness = max(
        float(_largest_eigenvalue(flow.field, jnp.asarray(ys[i]))) for i in some
    )
    return Truth(ys, stiffness, methods, agreement)


def _tight(
    flow: Flow, solver: diffrax.AbstractSolver, y0: np.ndarray, rtol: float
) -> np.ndarray:
    numbers = map(jnp.asarray, (y0, flow.ts, rtol))
    ys = np.asarray(_solve(flow.field, solver, *numbers))
    if not np.all(np.isfinite(ys)):
        raise RuntimeError(f"{type(solver).__name__} found no reference solution.")
    return ys


@compiled
def _solve(
    field: VectorField,
    solver: diffrax.AbstractSolver,
    y0: Float[Array, " n"],
    ts: Float[Array, " times"],
    rtol: Float[Array, ""],
) -> Any:
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: field(y)),
        solver,
        0.0,
        ts[-1],
        None,
        y0,
        saveat=diffrax.SaveAt(ts=ts),
        stepsize_controller=_internals.ResumableController(rtol, ATOL * rtol),
        max_steps=None,
        throw=False,
    ).ys


@compiled
def _largest_eigenvalue(field: VectorField, y: Float[Array, " n"]) -> Any:
    """The largest |eigenvalue| of ∇²L, by the power method."""
    _, product = jax.linearize(field, y)
    return power_method(product, random_vector(y), 200).size
