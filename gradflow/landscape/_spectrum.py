"""hessian_spectrum(): all eigenpairs of a Hessian, or those at the spectrum's ends."""

from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from .._core import checks, machine, seeds
from .._core.checks import Checked
from .._core.ravel import Ravel
from .._core.types import AnyArray, Seed
from ._flat_loss import (
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
    """The point at which the Hessian was taken."""
    eigenvalues: Float[np.ndarray, " count"]
    eigenvectors: Float[np.ndarray, "n count"]
    """Unit columns, in the order of the flat parameters; `direction` returns them as
    parameters."""
    residuals: Float[np.ndarray, " count"]
    """‖Hv - λv‖: the Hessian has an eigenvalue within this distance of λ."""
    products: int
    """The number of Hessian-vector products."""
    method: str
    """`dense` or `block Lanczos`."""

    @property
    def size(self) -> int:
        """n, the number of parameters. The spectrum may hold fewer eigenvalues."""
        return self.eigenvectors.shape[0]

    @property
    def is_complete(self) -> bool:
        """Whether the spectrum holds all n eigenvalues."""
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
    """A search for eigenvalues that did not converge. `spectrum` holds the result so
    far, with residuals that tell its accuracy."""

    def __init__(self, message: str, spectrum: Spectrum):
        super().__init__(message)
        self.spectrum = spectrum


def hessian_spectrum(
    loss: Checked[Callable[[PyTree], AnyArray]],
    params: PyTree,
    k: Checked[int | None] = None,
    *,
    which: Checked[Literal["both", "largest", "smallest"]] = "both",
    tolerance: Checked[float] = 1e-8,
    max_products: Checked[int | None] = None,
    seed: Checked[Seed] = 0,
) -> Spectrum:
    """The spectrum of the Hessian ∇²L(θ), or `k` eigenpairs at its ends.

        >>> import jax.numpy as jnp
        >>> from gradflow.landscape import hessian_spectrum
        >>> saddle = lambda x: jnp.sum(x[:2] ** 2) - jnp.sum(x[2:] ** 2)
        >>> hessian_spectrum(saddle, jnp.zeros(5)).eigenvalues
        array([-2., -2., -2.,  2.,  2.])

    Without `k` the dense Hessian is computed, with one Hessian-vector product per
    column, and diagonalised. With `k` it is never formed: a block Lanczos method
    multiplies blocks of vectors by it, which also works for n = 100,000. A block has at
    least as many vectors as there are wanted eigenpairs, so that a multiple eigenvalue
    is found with its multiplicity. Where the eigenvalues at an end cluster within
    `tolerance` of each other (as do the flat directions of a saddle, if `k` reaches
    them), their residuals are small, but it is arbitrary which of them are found.

    **Arguments:**

    - `loss`: any callable from parameters to a scalar.
    - `params`: the point; any pytree of floating arrays.
    - `k`: the number of eigenpairs at each end; by default the whole spectrum.
    - `which`: with `k`, the ends: `"smallest"`, `"largest"` (algebraically), or
        `"both"`: then `eigenvalues[:k]` and `eigenvalues[-k:]`.
    - `tolerance`: the residuals to reach, relative to max |λ|. The error of an isolated
        eigenvalue is the square of its residual over its distance to the others.
    - `max_products`: the largest number of Hessian-vector products, approximately; by
        default 300 times the number of vectors in a block.
    - `seed`: seeds the random block that the search starts from.

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
    key = seeds.jax_key("seed", seed)
    flat, y = flat_loss(loss, params)
    n = y.size
    if k is None:
        refuse_large_hessian(
            n,
            "`k` must be given: `hessian_spectrum(loss, params, k=...)` finds the ends "
            "of the spectrum without the dense Hessian",
        )
        return dense_spectrum(flat, y)
    if k > n:
        raise ValueError(f"`k` must be at most the number of parameters, {n}, got {k}.")
    low, high = (k if which in ("both", end) else 0 for end in ("smallest", "largest"))
    plan = Plan.of(low, high)
    if plan.rows > n:
        refuse_large_hessian(
            n, f"`k` must be smaller, because {k:,} eigenpairs need the dense Hessian"
        )
        return _part(dense_spectrum(flat, y), low, high)
    return at_the_ends(flat, y, plan, tolerance, max_products, key)


def refuse_large_hessian(n: int, advice: str) -> None:
    """Raise a `ValueError` if the dense Hessian of n parameters and its eigenvectors do
    not fit in memory."""
    machine.refuse_beyond(
        f"the dense Hessian of n = {n:,} parameters, with its eigenvectors,",
        dense_bytes(n),
        advice,
    )


def dense_spectrum(flat: FlatLoss, y: Vector) -> Spectrum:
    """The whole spectrum, from the dense Hessian."""
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
    """The `low` lowest and `high` highest eigenpairs."""
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
    key: PRNGKeyArray | None = None,
    settled: float = np.inf,
) -> Spectrum:
    """The spectrum's ends by block Lanczos; see `ends`."""
    most = PRODUCTS_PER_VECTOR * plan.block if max_products is None else max_products
    key = jax.random.key(0) if key is None else key
    found = ends(flat, y, plan, tolerance, most, key, settled)
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
            f"{np.max(found.residuals):.1e}, and {found.bound:.1e} was required. A "
            "larger `max_products`, a larger `tolerance` or a `k` that does not end "
            "within a cluster may help. The result so far is in this exception's "
            "`spectrum`.",
            spectrum,
        )
    return spectrum


def direction(params: PyTree, eigenvectors: np.ndarray, i: int) -> PyTree:
    """The i-th column of `eigenvectors` as parameters."""
    count = eigenvectors.shape[1]
    if not -count <= i < count:
        raise ValueError(
            f"`i` must be the number of one of {count} eigenvectors, got {i}."
        )
    ravel = Ravel.of(params)
    column = jax.numpy.asarray(eigenvectors[:, i])
    return jax.tree.map(np.asarray, ravel.unravel(column))


def runs(eigenvalues: np.ndarray, most: int = 6) -> str:
    """Increasing eigenvalues in short: equal ones are grouped, and the middle is left
    out."""
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
