"""The cost of the vector field as the vocabulary grows, relative to its products alone.

The gradient of the infinite-context loss takes fifteen matrix products. Forward,

    Q = W0 WQ,  K = W0 WK,  S = Q Kᵀ,  H = A W0,  Z = H W1,

with A = softmax(S + log π) and predictions softmax(Z); backward, with D for ∂L/∂,

    DW1 = Hᵀ DZ,  DH = DZ W1ᵀ,  DA = DH W0ᵀ,  DQ = DS K,  DK = DSᵀ Q,
    DWQ = W0ᵀ DQ,  DWK = W0ᵀ DK,  DW0 = Aᵀ DH + DQ WQᵀ + DK WKᵀ:

nine with d·d·m multiplications and six with d·m·m (for k = m). `products` below
computes these and nothing else: it leaves out the softmaxes and their derivatives
(A = S, DZ = Z, DS = DA), which keeps the same chain of products of the same shapes.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _timing import duration, footer, interleaved, stopwatch, table, undisturbed
from jaxtyping import Array, Float, Int

import gradflow
from gradflow import OneLayerParameters
from gradflow._core.compiled import compiled
from gradflow._core.ravel import Ravel
from gradflow._stepping import Equation
from gradflow.solvers._internals import resolve

WIDTH = 64
FIGURE = Path("out/benchmarks/scaling.png")


def products(params: OneLayerParameters) -> OneLayerParameters:
    W0, WQ, WK, W1 = params.W0, params.WQ, params.WK, params.W1
    Q, K = W0 @ WQ, W0 @ WK
    A = Q @ K.T
    H = A @ W0
    DZ = H @ W1
    DH = DZ @ W1.T
    DS = DH @ W0.T
    DQ, DK = DS @ K, DS.T @ Q
    return OneLayerParameters(
        W0=A.T @ DH + DQ @ WQ.T + DK @ WK.T,
        WQ=W0.T @ DQ,
        WK=W0.T @ DK,
        W1=H.T @ DZ,
    )


@compiled
def repeated(
    field: Callable[[Any], Any], x: Any, step: Float[Array, ""], count: Int[Array, ""]
) -> Any:
    """x ← x + step·field(x), `count` times: each evaluation depends on the last."""

    def advance(_: Any, x: Any) -> Any:
        return jax.tree.map(lambda a, b: a + step * b, x, field(x))

    return jax.lax.fori_loop(0, count, advance, x)


def contestant(field: Callable[[Any], Any], x: Any) -> Callable[[], list[float]]:
    """The seconds of one evaluation, from a loop that takes at least a twentieth of a
    second and has enough iterations that work hoisted out of it is negligible."""
    step = jnp.zeros(())  # an argument: the compiler does not know that it is zero

    def loop(count: int) -> float:
        run = lambda: jax.block_until_ready(  # noqa: E731
            repeated(field, x, step, jnp.asarray(count))
        )
        return stopwatch(run)

    count = 4
    loop(count)
    while loop(count) < 0.05:
        count *= 2
    return lambda: [loop(count) / count]


def measure(d: int, rounds: int) -> tuple[float, float]:
    """The seconds of the vector field and of its products alone."""
    zipf = 1 / np.arange(1, d + 1)
    chain = gradflow.MarkovChain.sticky(zipf / zipf.sum(), 0.5)
    model = gradflow.OneLayerTransformer(d, WIDTH)
    problem = gradflow.Problem(model, gradflow.InfiniteContext(chain))
    params = problem.init(seed=0, scale=0.1)
    ravel = Ravel.of(params)
    solver = resolve("auto").solver
    equation = Equation(problem, ravel, solver, jnp.array(1e-8), jnp.array(1e-12))
    field = jax.tree_util.Partial(_vector_field, equation)
    seconds = interleaved(
        {
            "field": contestant(field, ravel.ravel(params)),
            "products": contestant(products, params),
        },
        rounds,
    )
    return undisturbed(seconds["field"]), undisturbed(seconds["products"])


def _vector_field(equation: Equation, y: Float[Array, " n"]) -> Float[Array, " n"]:
    return equation.vector_field(0.0, y)


def multiplications(d: int) -> int:
    return 9 * d * d * WIDTH + 6 * d * WIDTH * WIDTH


def draw(sizes: list[int], field: np.ndarray, alone: np.ndarray, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (upper, lower) = plt.subplots(
        2, 1, sharex=True, figsize=(6, 6), height_ratios=[2, 1], layout="constrained"
    )
    upper.loglog(sizes, field, "o-", label="vector field -∇L")
    upper.loglog(sizes, alone, "s--", label="its 15 matrix products alone")
    quadratic = alone[-1] * (np.array(sizes) / sizes[-1]) ** 2
    upper.loglog(sizes, quadratic, ":", color="gray", label="∝ d²")
    upper.set(
        title=f"infinite context, m = {WIDTH}",
        ylabel="seconds per evaluation",
        ylim=(alone.min() / 2, None),
    )
    upper.legend()
    lower.loglog(sizes, field / alone, "o-")
    lower.axhline(1, color="gray", linestyle=":")
    lower.set(xlabel="vocabulary d", ylabel="ratio")
    lower.set_xticks(sizes, map(str, sizes))
    lower.set_xticks([], minor=True)
    ratios = [
        r for r in (1, 1.2, 1.5, 2, 3, 5, 10, 20) if r <= 1.1 * max(field / alone)
    ]
    lower.set_yticks(ratios, map(str, ratios))
    lower.set_yticks([], minor=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="stop at d = 256")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    sizes = [2**i for i in range(2, 9 if options.quick else 12)]
    measured = np.array([measure(d, options.rounds) for d in sizes])
    field, alone = measured.T
    rows = [
        (
            f"{d}",
            duration(f),
            duration(p),
            f"{f / p:.2f}",
            f"{2e-9 * multiplications(d) / p:.1f}",
        )
        for d, f, p in zip(sizes, field, alone, strict=True)
    ]
    header = ("d", "vector field", "products alone", "ratio", "products' GFLOP/s")
    print(table(header, rows))
    draw(sizes, field, alone, FIGURE)
    print(f"\nShortest of {options.rounds} rounds. Figure: {FIGURE}")
    print(footer("gradflow", "jax", "jaxlib"))


if __name__ == "__main__":
    main()
