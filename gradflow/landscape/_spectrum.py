"""hessian_spectrum(): the eigenpairs of a Hessian, all or those at its ends."""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from .._core import checks, machine
from .._core.checks import Checked
from .._core.ravel import Ravel
from ._flat import (
    FlatLoss,
    Vector,
    as_params,
    dense_bytes,
    flat_loss,
    look,
    refuse_not_finite,
)
from ._krylov import Plan, ends

PRODUCTS_PER_VECTOR = 300
ENDS = ("both", "largest", "smallest")


class Spectrum(eqx.Module):
    """Eigenpairs of ∇²L at a point, in increasing order of the eigenvalues."""

    params: PyTree
    """The point."""
    eigenvalues: Float[np.ndarray, " count"]
    eigenvectors: Float[np.ndarray, "n count"]
    """Unit columns, in the order of the flat parameters; `direction` has them as
    parameters."""
    residuals: Float[np.ndarray, " count"]
    """‖Hv - λv‖: the Hessian has an eigenvalue no farther from λ than this."""
    products: int
    """How many Hessian-vector products were taken."""
    method: str
    """`dense` or `block Lanczos`."""

    @property
    def size(self) -> int:
        """n, the number of parameters, of which the spectrum may hold a part."""
        return self.eigenvectors.shape[0]

    @property
    def is_complete(self) -> bool:
        return len(self.eigenvalues) == self.size

    def direction(self, i: Checked[int]) -> PyTree:
        """The i-th eigenvector as parameters."""
        return direction(self.params, self.eigenvectors, i)

    def __str__(self) -> str:
        count = len(self.eigenvalues)
        part = "all" if self.is_complete else f"{count} of {self.size:,}"
        return "\n".join(
            [
                f"Spectrum: {part} eigenvalues, {self.method}, {self.products:,} "
                "Hessian products",
                f"eigenvalues      {runs(self.eigenvalues)}",
                f"residuals        at most {np.max(self.residuals):.1e}",
            ]
        )

    def __repr__(self) -> str:
        low, high = self.eigenvalues[0], self.eigenvalues[-1]
        return (
            f"Spectrum({len(self.eigenvalues)} of {self.size:,} eigenvalues from "
            f"{low:.6g} to {high:.6g}, residuals ≤ {np.max(self.residuals):.1e})"
        )


class SpectrumError(RuntimeError):
    """A search for eigenvalues that did not converge. `spectrum` holds what it had
    come to, with residuals that say how good it is."""

    def __init__(self, message: str, spectrum: Spectrum):
        super().__init__(message)
        self.spectrum = spectrum


def hessian_spectrum(
    loss: Checked[Callable[[PyTree], Any]],
    params: PyTree,
    k: Checked[int | None] = None,
    *,
    which: Checked[Literal["both", "largest", "smallest"]] = "both",
    tolerance: Checked[float] = 1e-8,
    max_products: Checked[int | None] = None,
    seed: Checked[int] = 0,
) -> Spectrum:
    """The spectrum of the Hessian ∇²L(θ): all of it, or `k` eigenpairs at its ends.

        >>> import jax.numpy as jnp
        >>> from gradflow.landscape import hessian_spectrum
        >>> saddle = lambda x: jnp.sum(x[:2] ** 2) - jnp.sum(x[2:] ** 2)
        >>> hessian_spectrum(saddle, jnp.zeros(5)).eigenvalues
        array([-2., -2., -2.,  2.,  2.])

    Without `k` the Hessian is written out, one product with a vector a column, and
    diagonalised. With `k` it is never written out: a block Lanczos method multiplies it
    by blocks of vectors, and n = 100,000 is no obstacle. A block holds at least as many
    vectors as there are wanted eigenpairs, so that a multiple eigenvalue comes as often
    as it should. Eigenvalues at an end that crowd within `tolerance` of each other (the
    flat directions of a saddle, if `k` reaches into them) come with small residuals,
    but which of them come is chance.

    **Arguments:**

    - `loss`: any callable from parameters to a scalar.
    - `params`: the point; any pytree of floating arrays.
    - `k`: how many eigenpairs at each wanted end; by default all there are.
    - `which`: with `k`, the ends: `"smallest"`, `"largest"` (algebraically), or
        `"both"`, k of each: then `eigenvalues[:k]` and `eigenvalues[-k:]`.
    - `tolerance`: the residuals to reach, relative to max |λ|. An isolated eigenvalue
        is then exact to the square of that, relative to its distance to the others.
    - `max_products`: give up after about so many Hessian-vector products; by default
        300 times the number of vectors in a block.
    - `seed`: of the block that the search starts from.

    **Returns:**

    A `Spectrum`. A search that does not converge raises a `SpectrumError`.
    """
    if k is not None:
        k = checks.whole_number("k", k)
    if not isinstance(which, str) or which not in ENDS:
        raise ValueError(f"`which` must be one of {', '.join(ENDS)}, got {which!r}.")
    if k is None and which != "both":
        raise ValueError(
            f"`which` = {which!r} needs `k`, the number of eigenpairs at that end."
        )
    tolerance = checks.positive_number("tolerance", tolerance)
    if max_products is not None:
        max_products = checks.whole_number("max_products", max_products)
    seed = checks.whole_number("seed", seed, least=0)
    flat, y = flat_loss(loss, params)
    n = y.size
    if k is None:
        _refuse_large(n)
        return dense_spectrum(flat, y)
    if k > n:
        raise ValueError(f"`k` must be at most the number of parameters, {n}, got {k}.")
    low, high = (k if which in ("both", end) else 0 for end in ("smallest", "largest"))
    plan = Plan.of(low, high)
    if plan.rows > n:
        _refuse_large(n, needed_for=k)
        return _part(dense_spectrum(flat, y), low, high)
    return at_the_ends(flat, y, plan, tolerance, max_products, seed)


def _refuse_large(n: int, needed_for: int | None = None) -> None:
    needed, free = dense_bytes(n), machine.available_memory()
    if needed <= free:
        return
    what = (
        f"the dense Hessian of n = {n:,} parameters and its eigenvectors take "
        f"{machine.readable(needed)}, and {machine.readable(free)} are free"
    )
    if needed_for is None:
        raise ValueError(
            f"`k` must be given: {what}. `hessian_spectrum(loss, params, k=...)` finds "
            "the ends of the spectrum without writing the Hessian out."
        )
    raise ValueError(
        f"`k` must be smaller: for {needed_for:,} eigenpairs the Hessian would be "
        f"written out, but {what}."
    )


def dense_spectrum(flat: FlatLoss, y: Vector) -> Spectrum:
    """All of the spectrum, from the Hessian written out."""
    local = look(flat, y)
    refuse_not_finite(local.loss, local.gradient, local.eigenvalues)
    return Spectrum(
        params=as_params(flat, y),
        eigenvalues=np.asarray(local.eigenvalues),
        eigenvectors=np.asarray(local.eigenvectors),
        residuals=np.asarray(local.residuals),
        products=y.size,
        method="dense",
    )


def _part(whole: Spectrum, low: int, high: int) -> Spectrum:
    n = whole.size
    chosen = np.unique(np.r_[:low, n - high : n])
    return Spectrum(
        whole.params,
        whole.eigenvalues[chosen],
        whole.eigenvectors[:, chosen],
        whole.residuals[chosen],
        whole.products,
        whole.method,
    )


def at_the_ends(
    flat: FlatLoss,
    y: Vector,
    plan: Plan,
    tolerance: float,
    max_products: int | None = None,
    seed: int = 0,
    settled: float = np.inf,
) -> Spectrum:
    """The spectrum's ends by block Lanczos; see `ends`."""
    most = PRODUCTS_PER_VECTOR * plan.block if max_products is None else max_products
    found = ends(flat, y, plan, tolerance, most, seed, settled)
    spectrum = Spectrum(
        params=as_params(flat, y),
        eigenvalues=found.eigenvalues,
        eigenvectors=found.eigenvectors.T,
        residuals=found.residuals,
        products=found.products,
        method="block Lanczos",
    )
    if not found.converged:
        late = int(np.sum(found.residuals > found.bound))
        raise SpectrumError(
            f"{late} of {len(found.residuals)} eigenpairs did not converge within "
            f"{found.products:,} Hessian products: the largest residual is "
            f"{np.max(found.residuals):.1e}, and {found.bound:.1e} was asked for. More "
            "`max_products`, a larger `tolerance`, or a `k` that does not end within a "
            "cluster may help; what was found is in this exception's `spectrum`.",
            spectrum,
        )
    return spectrum


def direction(params: PyTree, eigenvectors: np.ndarray, i: int) -> PyTree:
    """A column as parameters."""
    count = eigenvectors.shape[1]
    if not -count <= i < count:
        raise ValueError(f"`i` must name one of {count} eigenvectors, got {i}.")
    ravel = Ravel.of(params)
    column = jax.numpy.asarray(eigenvectors[:, i])
    return jax.tree.map(np.asarray, ravel.unravel(column))


def runs(eigenvalues: np.ndarray, most: int = 6) -> str:
    """Increasing eigenvalues for people: equal ones together, the middle left out."""
    groups: list[list[float]] = []
    scale = float(np.max(np.abs(eigenvalues), initial=0.0))
    for value in map(float, eigenvalues):
        if groups and value - groups[-1][-1] <= 1e-6 * scale:
            groups[-1].append(value)
        else:
            groups.append([value])
    words = [
        f"{np.mean(group):.5g}" + (f" (×{len(group)})" if len(group) > 1 else "")
        for group in groups
    ]
    if len(words) > most:
        words = [*words[: most // 2], "…", *words[-(most // 2) :]]
    return ", ".join(words)
