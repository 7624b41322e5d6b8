"""Products of small matrices, restated: the same numbers, by another way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from gradflow.problems._matrix_products import SMALL, with_plain_products


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    draws = np.random.default_rng(0)
    return [jnp.asarray(0.3 * draws.normal(size=shape)) for shape in shapes]


def network(A: jax.Array, B: jax.Array, C: jax.Array) -> jax.Array:
    """A gradient with products of all kinds, of one and of many matrices, and with
    functions inside: compiled, with derivatives of their own, loops, conditions."""

    @jax.jit
    def layer(x: jax.Array, W: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ W)

    def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(layer(x, B) @ B.T), None

    x, _ = jax.lax.scan(turn, A, length=3)
    x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ C, lambda x: 2 * (x @ C), x)
    both = jnp.einsum("ij,kj->ik", x, x) + jnp.einsum("bij,bkj->ik", C[None], C[None])
    rows = jnp.einsum("ij,ij->i", x, B)
    return jnp.sum(jax.nn.softmax(both) ** 2) + rows @ A[0] + A[1] @ B @ B[0]


SHAPES = (6, 6), (6, 6), (6, 6)


def test_values_and_derivatives_are_the_same() -> None:
    of = arrays(*SHAPES)
    gradient = jax.grad(network, argnums=(0, 1, 2))
    plain = with_plain_products(gradient)
    for found, expected in zip(plain(*of), gradient(*of), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-14)
    _, found = jax.jvp(jax.jit(plain), tuple(of), tuple(arrays(*SHAPES)))
    _, expected = jax.jvp(gradient, tuple(of), tuple(arrays(*SHAPES)))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_of_many_at_once_they_are_the_same() -> None:
    A, B, C = arrays((5, 6, 6), (6, 6), (6, 6))
    gradient = jax.grad(network)
    found = jax.vmap(with_plain_products(gradient), (0, None, None))(A, B, C)
    each = jnp.stack([gradient(a, B, C) for a in A])
    np.testing.assert_allclose(found, each, rtol=1e-13, atol=1e-14)


def test_structure_and_captured_arrays_are_kept() -> None:
    A, B = arrays((3, 4), (5, 4))

    @jax.jit
    def both(scale: jax.Array) -> dict:
        # Under jit what the function captures is not known yet either.
        captured = scale * B
        return with_plain_products(lambda x: {"product": x @ captured.T, "x": (x, 1)})(
            A
        )

    out = both(jnp.asarray(2.0))
    np.testing.assert_allclose(out["product"], 2 * A @ B.T, rtol=1e-14)
    np.testing.assert_array_equal(out["x"][0], A)
    assert out["x"][1] == 1


def slow_products(function: object, *args: object) -> int:
    """How many products of two matrices sum over the second's last axis."""

    def count(jaxpr: object) -> int:
        own = sum(
            eqn.primitive.name == "dot_general"
            and eqn.invars[1].aval.ndim == 2
            and tuple(eqn.params["dimension_numbers"][0][1]) == (1,)
            for eqn in jaxpr.eqns
        )
        inner = (jaxprs_in_params(eqn.params) for eqn in jaxpr.eqns)
        return own + sum(count(j) for some in inner for j in some)

    return count(jax.make_jaxpr(function)(*args).jaxpr)


@pytest.mark.parametrize("size", [4, 64, 65])
def test_of_small_matrices_none_sums_over_the_last_axis_of_the_second(
    size: int,
) -> None:
    def loss(W: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.tanh(W @ W) @ W))

    gradient = jax.grad(loss)
    (W,) = arrays((size, size))
    before = slow_products(gradient, W)
    assert before == 2
    left = slow_products(with_plain_products(gradient), W)
    assert left == (0 if size**2 <= SMALL else before)
