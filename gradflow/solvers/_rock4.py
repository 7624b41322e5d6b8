"""ROCK4: a stabilised explicit method, for gradient flows too large for any linear
algebra."""

from typing import ClassVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PyTree

from .._core.power_method import power_method, random_vector
from ._flat_field import Field, flat_field
from ._rock4_coefficients import FEWEST_STAGES, Family, family
from ._side_channel import AbstractCountingSolver, CountedError, work
from ._types import BoolScalar, DiffraxField, RealScalar

STRICTNESS = 0.1
"""The error is reported as this fraction of the term h⁴y⁗/24 that a solution of order
three would neglect. The error of a whole flow is then at most about 6 times `rtol`."""
SAFETY = 1.2
"""The factor by which the estimated spectral radius is enlarged."""
POWER_TOLERANCE = 0.01
MAX_POWER_ITERATIONS = 50


class _State(eqx.Module):
    eigenvector: Float[Array, " n"]
    radius: Float[Array, ""]
    """The spectral radius of the Jacobian."""
    age: Int[Array, ""]
    """Steps since the spectral radius was estimated."""
    h: Float[Array, ""]
    """The length of the last step."""


class _QuarticInterpolation(diffrax.AbstractLocalInterpolation):
    """y₀ + Σ θᵖ q_p with p = 1, …, 4."""

    t0: DiffraxField
    t1: DiffraxField
    y0: PyTree
    q: Float[Array, "4 n"]

    def evaluate(
        self, t0: RealScalar, t1: RealScalar | None = None, left: bool = True
    ) -> PyTree:
        if t1 is not None:
            at_t1, at_t0 = self.evaluate(t1), self.evaluate(t0)
            return jax.tree.map(jnp.subtract, at_t1, at_t0)
        h = self.t1 - self.t0
        # A step of length zero occurs only where its result is discarded.
        theta = (t0 - self.t0) / jnp.where(h == 0, 1.0, h)
        y, unravel = ravel_pytree(self.y0)
        return unravel(y + theta ** jnp.arange(1, 5) @ self.q)


class ROCK4(AbstractCountingSolver):
    """A stabilised explicit Runge-Kutta method of order four with an embedded method of
    order three, for equations whose Jacobian has a real negative spectrum except for a
    few eigenvalues of the order of 1/h: gradient flows.

    With s stages it is stable on the interval [-0.35 s², 0], so a step of length h
    takes s ≈ √(3hρ) evaluations, where ρ is the Jacobian's spectral radius; a classical
    explicit method would take about 2hρ. s is chosen for each step. The method needs no
    linear algebra, and the memory of a dozen n-vectors.

    ρ is estimated by the power method on finite differences of the vector field,
    starting from the last eigenvector, every `refresh_every` accepted steps and when a
    step is shorter than the last one, as after a rejection. A step that needs more than
    `max_stages` is rejected.

    Rounding errors are magnified by the last four stages, as w(z) ≈ 0.007 z⁴ at
    z = -hρ. This noise limits hρ to about 3000 at rtol = 1e-4 and 300 at 1e-8; the
    controller finds this limit by rejected steps.

    Coefficients and reference: `_rock4_coefficients.py`. Not differentiable in reverse
    mode.
    """

    max_stages: int = 150
    """The largest number of stages in a step."""
    refresh_every: int = 10
    """The number of accepted steps between two estimates of the spectral radius."""
    counts_work: bool = eqx.field(default=False, static=True)
    """Whether `step` returns a `CountedError`, for `ResumableController`."""

    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar = _QuarticInterpolation
    starting_evaluations: ClassVar[int] = 0

    def __check_init__(self) -> None:
        if self.max_stages < FEWEST_STAGES:
            raise ValueError(
                f"`max_stages` must be at least {FEWEST_STAGES}, got {self.max_stages}."
            )

    def memory(self, size: int) -> int:
        """The approximate memory in bytes of a solve with a state of `size` numbers,
        without its dense output."""
        return 8 * size * 30

    def order(self, terms: PyTree) -> int:
        return 4

    def func(
        self, terms: diffrax.AbstractTerm, t0: RealScalar, y0: PyTree, args: PyTree
    ) -> PyTree:
        return terms.vf(t0, y0, args)

    def init(
        self,
        terms: diffrax.AbstractTerm,
        t0: RealScalar,
        t1: RealScalar,
        y0: PyTree,
        args: PyTree,
    ) -> _State:
        y, _ = ravel_pytree(y0)
        return _State(
            # Not the vector field, which may have no part along the stiffest direction.
            eigenvector=random_vector(y),
            radius=jnp.zeros((), y.dtype),
            age=jnp.asarray(self.refresh_every, jnp.int32),
            h=jnp.asarray(t1 - t0),
        )

    def step(
        self,
        terms: diffrax.AbstractTerm,
        t0: RealScalar,
        t1: RealScalar,
        y0: PyTree,
        args: PyTree,
        solver_state: _State,
        made_jump: BoolScalar,
    ) -> tuple[PyTree, PyTree, dict[str, PyTree], _State, diffrax.RESULTS]:
        _, unravel = ravel_pytree(y0)
        y, field = flat_field(terms, t0, t1, y0, args)
        h, f = jnp.asarray(t1 - t0), field(t0, y)

        # diffrax discards the state of a rejected step, but tries a shorter one next.
        shorter = h < (1 - 1e-6) * solver_state.h
        due = (solver_state.age >= self.refresh_every) | shorter | made_jump
        size = jnp.linalg.norm(y)
        small = jnp.sqrt(jnp.finfo(y.dtype).eps) * jnp.where(size == 0, 1.0, size)
        # A finite difference costs one evaluation, and a product with the Jacobian two
        # or more.
        radius, eigenvector, iterations = power_method(
            lambda v: field(t0, y + v) - f,
            solver_state.eigenvector,
            MAX_POWER_ITERATIONS,
            length=small,
            tolerance=POWER_TOLERANCE,
            known_size=solver_state.radius,
            wanted=due,
        )
        methods = family(self.max_stages)
        index = jnp.searchsorted(jnp.asarray(methods.length), SAFETY * radius * h)
        stable = index < len(methods.length)
        index = jnp.where(stable, index, 0)
        y1, error, q = _stabilised_step(methods, index, field, t0, h, y, f)

        # An unstable or overflowing step is rejected, whatever the controller.
        fine = stable & jnp.all(jnp.isfinite(y1)) & jnp.all(jnp.isfinite(error))
        y1 = unravel(jnp.where(fine, y1, y))
        estimate: PyTree = unravel(jnp.where(fine, STRICTNESS * error, jnp.inf))
        if self.counts_work:
            stages = jnp.asarray(methods.stages)[index]
            estimate = CountedError(estimate, work(evaluations=stages + iterations))
        age = jnp.where(due, 0, solver_state.age) + 1
        state = _State(eigenvector, radius, age, h)
        return y1, estimate, {"y0": y0, "q": q}, state, diffrax.RESULTS.successful


def _stabilised_step(
    methods: Family,
    index: Int[Array, ""],
    field: Field,
    t0: RealScalar,
    h: Float[Array, ""],
    y: Float[Array, " n"],
    f: Float[Array, " n"],
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, "4 n"]]:
    """A step by the method with this index, where f = f(y): the new state, the error
    and the coefficients of the dense output. Including f, it takes as many evaluations
    as the method has stages."""
    stages, _, mu, kappa, c, a, c_last, e, b = (
        jnp.asarray(table)[index] for table in methods
    )

    def stage(
        j: Int[Array, ""], carry: tuple[Float[Array, " n"], Float[Array, " n"]]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        g, before = carry
        k = h * field(t0 + c[j] * h, g)
        # Increments of g rather than 1 + κ times g: less rounding.
        return g + (mu[j] * k + kappa[j] * (g - before)), g

    g, _ = jax.lax.fori_loop(1, stages - 4, stage, (y + mu[0] * h * f, y))

    def last_stage(i: Int[Array, ""], v: Float[Array, "5 n"]) -> Float[Array, "5 n"]:
        k = h * field(t0 + c_last[i] * h, g + a[i, :4] @ v[1:])
        return v.at[i + 1].set(k)

    v = jnp.zeros((5, y.size), y.dtype).at[0].set(g - y)
    v = jax.lax.fori_loop(0, 4, last_stage, v)  # a loop compiles the field once
    return g + a[4, :4] @ v[1:], e @ v, b @ v
