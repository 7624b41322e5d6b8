"""A stabilised explicit method, for gradient flows too large for any linear algebra."""

from collections.abc import Callable
from typing import Any, ClassVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from ._flat import Field, flat_field
from ._rock4_coefficients import FEWEST_STAGES, Family, family
from ._work import CountedError, work

STRICTNESS = 0.1
"""The error is reported as this much of the term h⁴y⁗/24 that a solution of order three
would neglect. Then the error of a whole flow stays within some 6 times `rtol`."""
SAFETY = 1.2
"""The spectral radius is taken to be this much larger than it was found to be."""
POWER_TOLERANCE = 0.01
MAX_POWER_ITERATIONS = 50


class _State(eqx.Module):
    eigenvector: Float[Array, " n"]
    radius: Float[Array, ""]
    """Of the spectrum of the Jacobian."""
    age: Int[Array, ""]
    """Steps since the spectral radius was found."""
    h: Float[Array, ""]
    """The length of the last step."""


class _QuarticInterpolation(diffrax.AbstractLocalInterpolation):
    """y₀ + Σ θᵖ q_p with p = 1, …, 4."""

    t0: Any
    t1: Any
    y0: Any
    q: Float[Array, "4 n"]

    def evaluate(self, t0: Any, t1: Any = None, left: bool = True) -> Any:
        if t1 is not None:
            at_t1, at_t0 = self.evaluate(t1), self.evaluate(t0)
            return jax.tree.map(jnp.subtract, at_t1, at_t0)
        h = self.t1 - self.t0
        # A step of no length occurs only where its outcome is thrown away.
        theta = (t0 - self.t0) / jnp.where(h == 0, 1.0, h)
        y, unravel = ravel_pytree(self.y0)
        return unravel(y + theta ** jnp.arange(1, 5) @ self.q)


class ROCK4(diffrax.AbstractAdaptiveSolver):
    """A stabilised explicit Runge-Kutta method of order four, with an embedded one of
    order three, for equations whose Jacobian has a real negative spectrum but for a few
    eigenvalues of the size of 1/h: gradient flows.

    With s stages it is stable on the interval [-0.35 s², 0], so that a step of length h
    takes s ≈ √(3hρ) evaluations, where ρ is the Jacobian's spectral radius; a classical
    explicit method would take some 2hρ. s is chosen anew for each step. No linear
    algebra, and memory of a dozen n-vectors.

    ρ is found by the power method on differences of the vector field, from the vector
    last found, every `refresh_every` accepted steps and when a step is shorter than the
    last one, as after a rejection. A step that needs more than `max_stages` is
    rejected.

    Rounding errors are magnified by the last four stages, as w(z) ≈ 0.007 z⁴ at
    z = -hρ. This noise holds hρ to some 3000 at rtol = 1e-4 and 300 at 1e-8; the
    controller finds out by rejected steps.

    Coefficients and reference: `_rock4_coefficients.py`. Not differentiable in reverse
    mode.
    """

    max_stages: int = 150
    refresh_every: int = 10
    counts_work: bool = eqx.field(default=False, static=True)
    """Whether `step` returns a `CountedError`."""

    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar = _QuarticInterpolation
    starting_evaluations: ClassVar = 0

    def __check_init__(self) -> None:
        if self.max_stages < FEWEST_STAGES:
            raise ValueError(
                f"`max_stages` must be at least {FEWEST_STAGES}, got {self.max_stages}."
            )

    def order(self, terms: diffrax.AbstractTerm) -> int:
        return 4

    def func(self, terms: diffrax.AbstractTerm, t0: Any, y0: Any, args: Any) -> Any:
        return terms.vf(t0, y0, args)

    def init(
        self, terms: diffrax.AbstractTerm, t0: Any, t1: Any, y0: Any, args: Any
    ) -> _State:
        y, _ = ravel_pytree(y0)
        return _State(
            # Not the vector field, which may have no part along the stiffest direction.
            eigenvector=jax.random.normal(jax.random.key(0), y.shape, y.dtype),
            radius=jnp.zeros((), y.dtype),
            age=jnp.asarray(self.refresh_every, jnp.int32),
            h=jnp.asarray(t1 - t0),
        )

    def step(
        self,
        terms: diffrax.AbstractTerm,
        t0: Any,
        t1: Any,
        y0: Any,
        args: Any,
        solver_state: _State,
        made_jump: Any,
    ) -> tuple[Any, Any, dict[str, Any], _State, diffrax.RESULTS]:
        _, unravel = ravel_pytree(y0)
        y, field = flat_field(terms, t0, t1, y0, args)
        h, f = jnp.asarray(t1 - t0), field(t0, y)

        # diffrax drops the state of a rejected step, but it tries a shorter one next.
        shorter = h < (1 - 1e-6) * solver_state.h
        due = (solver_state.age >= self.refresh_every) | shorter | made_jump
        eigenvector, radius, iterations = _spectral_radius(
            lambda y: field(t0, y), y, f, solver_state, due
        )
        methods = family(self.max_stages)
        index = jnp.searchsorted(jnp.asarray(methods.length), SAFETY * radius * h)
        stable = index < len(methods.length)
        index = jnp.where(stable, index, 0)
        y1, error, q = _stabilised_step(methods, index, field, t0, h, y, f)

        # An unstable or overflowing step is a rejected one, whatever the controller.
        fine = stable & jnp.all(jnp.isfinite(y1)) & jnp.all(jnp.isfinite(error))
        y1 = unravel(jnp.where(fine, y1, y))
        error: Any = unravel(jnp.where(fine, STRICTNESS * error, jnp.inf))
        if self.counts_work:
            stages = jnp.asarray(methods.stages)[index]
            error = CountedError(error, work(evaluations=stages + iterations))
        age = jnp.where(due, 0, solver_state.age) + 1
        state = _State(eigenvector, radius, age, h)
        return y1, error, {"y0": y0, "q": q}, state, diffrax.RESULTS.successful


def _spectral_radius(
    field: Callable[[Float[Array, " n"]], Float[Array, " n"]],
    y: Float[Array, " n"],
    f: Float[Array, " n"],
    known: _State,
    due: Bool[Array, ""],
) -> tuple[Float[Array, " n"], Float[Array, ""], Int[Array, ""]]:
    """The power method on v ↦ (f(y + v) - f(y)) with ‖v‖ small: an evaluation each,
    where a product with the Jacobian costs two and more. What is known, if not due.

    Also returns the number of iterations."""
    size = jnp.linalg.norm(y)
    small = jnp.sqrt(jnp.finfo(y.dtype).eps) * jnp.where(size == 0, 1.0, size)

    def proceed(carry: tuple) -> Bool[Array, ""]:
        iteration, _, radius, previous = carry
        settled = jnp.abs(radius - previous) <= POWER_TOLERANCE * radius
        fresh = iteration < 2
        return due & (fresh | ~settled) & (iteration < MAX_POWER_ITERATIONS)

    def iterate(carry: tuple) -> tuple:
        iteration, v, previous, _ = carry
        change = field(y + (small / jnp.linalg.norm(v)) * v) - f
        radius = jnp.linalg.norm(change) / small
        usable = (radius > 0) & jnp.isfinite(radius)
        return iteration + 1, jnp.where(usable, change, v), radius, previous

    start = (jnp.zeros((), jnp.int32), known.eigenvector, known.radius, known.radius)
    iterations, v, radius, _ = jax.lax.while_loop(proceed, iterate, start)
    return v, radius, iterations


def _stabilised_step(
    methods: Family,
    index: Int[Array, ""],
    field: Field,
    t0: Any,
    h: Float[Array, ""],
    y: Float[Array, " n"],
    f: Float[Array, " n"],
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, "4 n"]]:
    """A step by the method of this index, where f = f(y): the new state, the error and
    the powers of the dense output. Counting f, it takes as many evaluations as the
    method has stages."""
    stages, _, mu, kappa, c, a, c_last, e, b = (
        jnp.asarray(table)[index] for table in methods
    )

    def stage(j: Int[Array, ""], carry: tuple) -> tuple:
        g, before = carry
        k = h * field(t0 + c[j] * h, g)
        # Increments on g, and not 1 + κ times g: less rounding.
        return g + (mu[j] * k + kappa[j] * (g - before)), g

    g, _ = jax.lax.fori_loop(1, stages - 4, stage, (y + mu[0] * h * f, y))

    def last_stage(i: Int[Array, ""], v: Float[Array, "5 n"]) -> Float[Array, "5 n"]:
        k = h * field(t0 + c_last[i] * h, g + a[i, :4] @ v[1:])
        return v.at[i + 1].set(k)

    v = jnp.zeros((5, y.size), y.dtype).at[0].set(g - y)
    v = jax.lax.fori_loop(0, 4, last_stage, v)  # a loop, as the field compiles once
    return g + a[4, :4] @ v[1:], e @ v, b @ v
