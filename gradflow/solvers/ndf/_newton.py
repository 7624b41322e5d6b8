"""The implicit equation of a step, and Newton's method for it."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._types import RealScalar
from ._curvature import Curvature, HessianProducts

Vector = Float[Array, " n"]
VectorMap = Callable[[Vector], Vector]
NewtonSolve = Callable[[Vector, Vector], tuple[Vector, Int[Array, ""] | int]]
"""From d and its residual to the change of d, and the Hessian products it took."""

MAX_NEWTON = 6
NEWTON_TOLERANCE = 0.1
"""The error that Newton's method may leave, as a fraction of the error allowed in a
step."""
GOING, DONE, FAILED = 1.0, 0.0, -1.0
MAX_CONJUGATE_GRADIENTS, LINEAR_TOLERANCE = 25, 0.02


#
# The equation
#


class Implicit(eqx.Module):
    """The equation d = c f(predicted + d) - ψ, and how accurately to solve it."""

    field: VectorMap = eqx.field(static=True)
    predicted: Vector
    psi: Vector
    c: Float[Array, ""]
    weights: Vector

    def residual(self, d: Vector) -> Vector:
        return self.c * self.field(self.predicted + d) - self.psi - d

    def size(self, d: Vector) -> Float[Array, ""]:
        """The norm of `d`, equal to one where `d` is as large as the tolerance."""
        scaled = d * self.weights
        return jnp.sqrt(scaled @ scaled / d.size)

    def matrix(self, d: Vector, residual: Vector) -> VectorMap:
        """v ↦ (I + cH)v at predicted + d, where the residual is known."""
        value = (residual + self.psi + d) / self.c
        product = _hessian_product(self.field, self.predicted + d, value)
        return lambda v: v + self.c * product(v)


def _hessian_product(field: VectorMap, y: Vector, value: Vector) -> VectorMap:
    """v ↦ Hv with H = -∂f/∂y at y, by finite differences from the `value` of f there.

    Its error is about 1e-8 of H, which is ample for an approximate inverse, and it
    costs one evaluation. Differentiating f, which is itself a gradient, costs two to
    four (at n = 4,096 and 136,192) and takes longer to compile.
    """

    def product(v: Vector) -> Vector:
        step = _displacement(y, v)
        return (value - field(y + step * v)) / step

    return product


def _displacement(y: Vector, v: Vector) -> Float[Array, ""]:
    """The multiple of v by which a finite difference displaces y."""
    scale = jnp.sqrt(jnp.finfo(y.dtype).eps) * (1 + jnp.linalg.norm(y))
    return scale / jnp.maximum(jnp.linalg.norm(v), 1e-300)


def hessian(field: VectorMap, y: Vector) -> HessianProducts:
    """The product of H at y with the first `count` of some vectors, by finite
    differences as in `_hessian_product`; the other rows of the result are zero."""

    def products(
        V: Float[Array, "rank n"], count: Int[Array, ""]
    ) -> Float[Array, "rank n"]:
        def multiply(
            i: Int[Array, ""], carry: tuple[Vector, Float[Array, "rank n"]]
        ) -> tuple[Vector, Float[Array, "rank n"]]:
            """The first iteration computes the value from which the others take their
            differences: outside of the loop, the field would be compiled a second
            time and not as part of one function."""
            value, W = carry
            row = jnp.maximum(i - 1, 0)
            step = _displacement(y, V[row])
            moved = field(y + jnp.where(i == 0, 0.0, step) * V[row])
            value = jnp.where(i == 0, moved, value)
            return value, W.at[row].set((value - moved) / step)

        # One by one: several at once are no faster on a CPU, and slower where they
        # exceed its cache.
        start = jnp.zeros_like(y), jnp.zeros_like(V)
        return jax.lax.fori_loop(0, count + 1, multiply, start)[1]

    return products


def products_to_follow(fitted: Curvature) -> Float[Array, ""]:
    """The number of Hessian products that it takes to follow the eigenpairs: one each,
    and one for the value from which the differences are taken."""
    return fitted.active.astype(jnp.float64) + 1


#
# Its solution
#


class Newton(eqx.Module):
    """The outcome of Newton's method and the work it took."""

    d: Vector
    converged: Bool[Array, ""]
    rate: Float[Array, ""]
    evaluations: Float[Array, ""]
    products: Float[Array, ""]

    def after(self, before: "Newton") -> "Newton":
        """This outcome, with the work of an earlier attempt added."""
        return Newton(
            self.d,
            self.converged,
            self.rate,
            before.evaluations + self.evaluations,
            before.products + self.products,
        )


def solve_implicit(
    equation: Implicit,
    curvature: Curvature,
    due: Bool[Array, ""],
    rate: Float[Array, ""],
) -> tuple[Newton, Curvature, Bool[Array, ""]]:
    """Newton's method with the current eigenpairs; if it fails, with new ones, then
    with conjugate gradients. Also returns the eigenpairs for the next step and whether
    they are new, which they also are if `due`."""
    inverse = curvature.inverse(equation.c)
    newton = _newton(equation, rate, lambda _, residual: (inverse(residual), 0))

    def follow(
        carry: tuple[Newton, Curvature, Bool[Array, ""]],
    ) -> tuple[Newton, Curvature, Bool[Array, ""]]:
        newton, curvature, _ = carry
        fitted = curvature.fitted(equation.c)
        followed = fitted.followed(hessian(equation.field, equation.predicted))
        before = eqx.tree_at(lambda n: n.products, newton, products_to_follow(fitted))
        recent, rate = jnp.ones((), bool), jnp.ones(())
        last = jax.lax.cond(
            newton.converged,
            lambda: before,
            lambda: solve_with_eigenpairs(equation, followed, recent, rate).after(
                before
            ),
        )
        return last, followed, jnp.zeros((), bool)

    renew = due | ~newton.converged
    newton, curvature, _ = jax.lax.while_loop(
        lambda carry: carry[2], follow, (newton, curvature, renew)
    )
    return newton, curvature, renew


def solve_with_eigenpairs(
    equation: Implicit,
    curvature: Curvature,
    recent: Bool[Array, ""],
    rate: Float[Array, ""],
) -> Newton:
    """Newton's method with these eigenpairs; if it fails although they are `recent`,
    with conjugate gradients.

    Both attempts share one loop, because every place where the field is evaluated is
    compiled separately, and that is half of the compilation of a step."""
    inverse = curvature.inverse(equation.c)

    def attempt(
        carry: tuple[Newton, Int[Array, ""]],
    ) -> tuple[Newton, Int[Array, ""]]:
        before, attempts = carry
        exactly = attempts > 0

        def solve(d: Vector, residual: Vector) -> tuple[Vector, Int[Array, ""]]:
            change = inverse(residual)
            return jax.lax.cond(
                exactly,
                lambda: _conjugate_gradients(
                    equation.matrix(d, residual), inverse, residual, change
                ),
                lambda: (change, jnp.zeros((), jnp.int32)),
            )

        newton = _newton(equation, before.rate, solve).after(before)
        # The rate with conjugate gradients does not tell how fast the eigenpairs alone
        # would converge, and neither does the rate of a failed attempt.
        kept = newton.converged & ~exactly
        rate = jnp.where(kept, newton.rate, jnp.ones(()))
        return eqx.tree_at(lambda n: n.rate, newton, rate), attempts + 1

    def is_open(carry: tuple[Newton, Int[Array, ""]]) -> Bool[Array, ""]:
        newton, attempts = carry
        return (attempts == 0) | (recent & ~newton.converged & (attempts == 1))

    nothing = jnp.zeros(())
    start = Newton(
        jnp.zeros_like(equation.psi), jnp.zeros((), bool), rate, nothing, nothing
    )
    return jax.lax.while_loop(is_open, attempt, (start, jnp.zeros((), jnp.int32)))[0]


def _packed(*numbers: RealScalar) -> Float[Array, " numbers"]:
    """All numbers in one array: each further array costs a compiled loop one more
    operation."""
    return jnp.stack([jnp.asarray(x, jnp.float64) for x in numbers])


def _newton(
    equation: Implicit, expected_rate: Float[Array, ""], solve: NewtonSolve
) -> Newton:
    """Newton's method for d, with changes from `solve(d, residual)`."""

    def proceed(carry: tuple[Vector, Float[Array, "5"]]) -> Bool[Array, ""]:
        _, status = carry
        return status[0] == GOING

    def iterate(
        carry: tuple[Vector, Float[Array, "5"]],
    ) -> tuple[Vector, Float[Array, "5"]]:
        d, (_, previous, rate, iteration, products) = carry
        change, used = solve(d, equation.residual(d))
        size = equation.size(change)
        rate = jnp.where(iteration == 0, rate, size / previous)
        left = jnp.where(rate < 1, rate / (1 - rate), jnp.inf) * size
        close = (left < NEWTON_TOLERANCE) | (size < 1e-2 * NEWTON_TOLERANCE)
        # The error that would be left after the last iteration.
        far = rate ** (MAX_NEWTON - 1 - iteration) * left > NEWTON_TOLERANCE
        hopeless = (iteration > 0) & far | ~jnp.isfinite(size)
        state = jnp.where(close, DONE, jnp.where(hopeless, FAILED, GOING))
        return d + change, _packed(state, size, rate, iteration + 1, products + used)

    d, (state, _, rate, evaluations, products) = jax.lax.while_loop(
        proceed,
        iterate,
        (jnp.zeros_like(equation.psi), _packed(GOING, 1.0, expected_rate, 0, 0)),
    )
    return Newton(d, state == DONE, rate, evaluations, products)


Iterate = tuple[Vector, Vector, Vector, Float[Array, ""], Int[Array, ""]]


def _conjugate_gradients(
    product: VectorMap, inverse: VectorMap, right: Vector, z: Vector
) -> tuple[Vector, Int[Array, ""]]:
    """(I + cH)⁻¹ right by preconditioned conjugate gradients, and the number of
    products it took. The preconditioner's z = `inverse(right)` is known.

    I + cH is positive definite at every step length that follows an unstable direction
    accurately. Where it is not, the iteration stops with its current solution, which is
    at least as good as the preconditioner's."""

    def proceed(carry: Iterate) -> Bool[Array, ""]:
        _, _, _, rz, iteration = carry
        return (rz > LINEAR_TOLERANCE**2 * start) & (
            iteration < MAX_CONJUGATE_GRADIENTS
        )

    def iterate(carry: Iterate) -> Iterate:
        x, r, p, rz, iteration = carry
        q = product(p)
        curvature = p @ q
        least = jnp.where(iteration == 0, 1.0, 0.0)
        alpha = jnp.where(curvature > 0, rz / curvature, least)
        x, r = x + alpha * p, r - alpha * q
        z = inverse(r)
        new = jnp.where(curvature > 0, r @ z, 0.0)
        return x, r, z + new / rz * p, new, iteration + 1

    start = right @ z
    x, _, _, _, iterations = jax.lax.while_loop(
        proceed,
        iterate,
        (jnp.zeros_like(right), right, z, start, jnp.zeros((), jnp.int32)),
    )
    # From NaN, or where the preconditioner is not positive, the loop makes no
    # iteration; its result must not be taken for a solution.
    sound = jnp.isfinite(start) & ((start > 0) | ~jnp.any(right))
    return jnp.where(sound, x, jnp.nan), iterations
