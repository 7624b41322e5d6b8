"""find_critical_point(): from a point near by to a saddle, minimum or maximum."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Float, PyTree

from .._core import checks, machine
from .._core.checks import Checked
from ._flat import (
    FlatLoss,
    as_params,
    dense_bytes,
    flat_loss,
    refuse_not_finite,
)
from ._krylov import Plan
from ._newton import Newton, Stuck, View, dense_view, krylov_view
from ._spectrum import (
    Spectrum,
    SpectrumError,
    at_the_ends,
    dense_spectrum,
    direction,
    runs,
)

DENSE_SIZE = 1500
"""Parameters up to which a Hessian is written out at every step by default: that takes
a second each time at this size."""
FIRST_EIGENPAIRS = 16
EIGENPAIR_TOLERANCE = 1e-6
MATRIX_FREE_GAP = 1e-4
"""Relative to max |λ|. Eigenvalues that crowd about zero are not told apart in any
reasonable number of Hessian products."""


class CriticalPoint(eqx.Module):
    """A point where ∇L vanishes, and the Hessian's spectrum there."""

    params: PyTree
    loss: float
    gradient_norm: float
    eigenvalues: Float[np.ndarray, " count"]
    """In increasing order: all of them, or the lowest if the search was matrix-free."""
    eigenvectors: Float[np.ndarray, "n count"]
    """Unit columns, in the order of the flat parameters; `direction` has them as
    parameters."""
    index: int
    """The number of eigenvalues below -gap: of directions in which the flow leaves."""
    nullity: int | None
    """The number of eigenvalues within `gap` of zero; None if the search was
    matrix-free, which does not see them all."""
    gap: float
    """Eigenvalues up to this size cannot be told from zero, or were not to be."""
    distance: float
    """How far the point lies from where the search started."""
    steps: int

    @property
    def size(self) -> int:
        """n, the number of parameters."""
        return self.eigenvectors.shape[0]

    def direction(self, i: Checked[int]) -> PyTree:
        """The i-th eigenvector as parameters."""
        return direction(self.params, self.eigenvectors, i)

    def __str__(self) -> str:
        unstable = self.eigenvalues[: self.index]
        growing = f": λ = {runs(unstable)}" if self.index else ""
        flat = "not known" if self.nullity is None else f"{self.nullity} of {self.size}"
        return "\n".join(
            [
                f"{self.kind} after {self.steps} steps, {self.distance:.3g} from the "
                "start",
                f"loss             {self.loss:.10g}, ‖∇L‖ = {self.gradient_norm:.1e}",
                f"index            {self.index} of {self.size:,}{growing}",
                f"nullity          {flat} (|λ| ≤ {self.gap:.1e})",
                f"eigenvalues      {runs(self.eigenvalues)}",
            ]
        )

    @property
    def kind(self) -> str:
        """`Minimum`, `Maximum`, `Saddle`, or `Degenerate critical point`."""
        null = self.nullity or 0
        if null == self.size:
            return "Degenerate critical point"
        if self.index == 0:
            return "Minimum" if self.nullity == 0 else "Critical point of index 0"
        return "Maximum" if self.index == self.size else "Saddle"

    def __repr__(self) -> str:
        return (
            f"CriticalPoint(loss {self.loss:.6g}, ‖∇L‖ {self.gradient_norm:.1e}, "
            f"index {self.index}, nullity {self.nullity}, n = {self.size:,})"
        )


class CriticalPointError(RuntimeError):
    """A search that ended at no critical point. `params` is where, `gradient_norm` is
    ‖∇L‖ there and `steps` how many steps it took."""

    def __init__(self, message: str, params: PyTree, gradient_norm: float, steps: int):
        super().__init__(message)
        self.params = params
        self.gradient_norm = gradient_norm
        self.steps = steps


def find_critical_point(
    loss: Checked[Callable[[PyTree], Any]],
    params: PyTree,
    *,
    gap: Checked[float | None] = None,
    tolerance: Checked[float] = 1e-12,
    max_steps: Checked[int] = 100,
    dense: Checked[bool | None] = None,
) -> CriticalPoint:
    """A critical point ∇L(θ*) = 0 near `params`, be it a saddle, a minimum or a
    maximum.

        >>> import jax.numpy as jnp
        >>> from gradflow.landscape import find_critical_point
        >>> saddle = lambda p: p["x"] ** 2 - p["y"] ** 2 + p["x"] * p["y"] ** 2
        >>> start = {"x": jnp.asarray(0.1), "y": jnp.asarray(-0.2)}
        >>> point = find_critical_point(saddle, start)
        >>> point.kind, point.index, point.nullity
        ('Saddle', 1, 0)

    Newton's method in the Hessian's eigen-directions, with steps shortened until ‖∇L‖
    falls. Where critical points come in manifolds, most of the eigenvalues are zero, or
    would be on the manifold, and a step along these directions slides along it. So a
    step is taken only along directions that are certain to be curved. With θ* a
    manifold's point the result is a point near `params`, not a particular one.

    **Arguments:**

    - `loss`: any callable from parameters to a scalar.
    - `params`: where to start; any pytree of floating arrays.
    - `gap`: take steps only along eigenvectors with |λ| > gap, and count the others as
        null. By default directions are certain if the Hessian turns by less than a
        quarter of |λ| along the Newton step in these directions (Kantorovich's
        condition for a critical point near by, with a margin of two), and the others
        are moved along only if all of the gradient that is left lies there: by the
        shortest steps that make it smaller. Then a saddle of a generic function and a
        point of a critical manifold are both found without a choice to make.
    - `tolerance`: ‖∇L‖ to reach. The gradient is known to about 1e-16 times the size of
        its terms, so scale this with the loss.
    - `max_steps`: give up after so many steps.
    - `dense`: whether to write the Hessian out at every step. Otherwise steps are taken
        in a Krylov space of Hessian-vector products, and of the spectrum only the
        lowest part is computed, until it shows all eigenvalues below -gap (by default
        at least 1e-4 max |λ| then). By default up to 1,500 parameters.

    **Returns:**

    A `CriticalPoint`. A search that fails raises a `CriticalPointError`, which says how
    far it came and keeps the point.
    """
    if gap is not None:
        gap = checks.positive_number("gap", gap, zero_allowed=True)
    tolerance = checks.positive_number("tolerance", tolerance)
    max_steps = checks.whole_number("max_steps", max_steps)
    if dense is not None and not isinstance(dense, bool):
        raise ValueError(f"`dense` must be True, False or None, got {dense!r}.")
    flat, y = flat_loss(loss, params)
    if dense is None:
        dense = y.size <= DENSE_SIZE
    elif dense and dense_bytes(y.size) > machine.available_memory():
        raise ValueError(
            f"`dense` must not be True for n = {y.size:,} parameters: the Hessian and "
            f"its eigenvectors take {machine.readable(dense_bytes(y.size))}, and "
            f"{machine.readable(machine.available_memory())} are free."
        )
    search = Newton(
        flat, dense_view if dense else krylov_view, tolerance, gap, max_steps
    )
    start = search.view(y)
    refuse_not_finite(start.loss, start.gradient, start.eigenvalues)
    try:
        view = search.run(start)
        if dense:
            return _whole(flat, start, view, search)
        return _lower_part(flat, start, view, search)
    except Stuck as stuck:
        raise _error(flat, start, stuck) from None


def _error(flat: FlatLoss, start: View, stuck: Stuck) -> CriticalPointError:
    view = stuck.view
    norm, first, distance = view.norm, start.norm, view.distance_to(start)
    return CriticalPointError(
        f"No critical point was reached: {stuck.reason}. After {stuck.steps} steps, "
        f"{distance:.3g} from the start, ‖∇L‖ is {norm:.2e} (it was {first:.2e}), with "
        f"{view.count} of {len(view.eigenvalues)} directions certainly curved. The "
        "point is in this exception's `params`.",
        as_params(flat, view.y),
        norm,
        stuck.steps,
    )


def _whole(flat: FlatLoss, start: View, view: View, search: Newton) -> CriticalPoint:
    """The result where the Hessian was written out."""
    assert view.local is not None
    eigenvalues = np.asarray(view.local.eigenvalues)
    gap = search.gap
    if gap is None:
        # By the certain directions themselves; the resolution is but a bound.
        sizes = np.append(np.abs(np.asarray(view.eigenvalues)), 0.0)
        within = np.nextafter(sizes[view.count - 1], 0.0) if view.count else np.inf
        gap = max(sizes[view.count], min(view.resolution(search.tolerance), within))
        gap = float(gap)
    return CriticalPoint(
        params=as_params(flat, view.y),
        loss=float(view.loss),
        gradient_norm=view.norm,
        eigenvalues=eigenvalues,
        eigenvectors=np.asarray(view.local.eigenvectors),
        index=int(np.sum(eigenvalues < -gap)),
        nullity=int(np.sum(np.abs(eigenvalues) <= gap)),
        gap=gap,
        distance=view.distance_to(start),
        steps=search.steps,
    )


def _lower_part(
    flat: FlatLoss, start: View, view: View, search: Newton
) -> CriticalPoint:
    """The result where it was not: with the lowest eigenpairs, as many as it takes to
    see one that is not negative."""
    scale = abs(float(view.eigenvalues[0]))
    gap = search.gap
    if gap is None:
        gap = max(view.resolution(search.tolerance), MATRIX_FREE_GAP * scale)
    spectrum = _lowest(flat, view, gap, search.steps)
    return CriticalPoint(
        params=as_params(flat, view.y),
        loss=float(view.loss),
        gradient_norm=view.norm,
        eigenvalues=spectrum.eigenvalues,
        eigenvectors=spectrum.eigenvectors,
        index=int(np.sum(spectrum.eigenvalues < -gap)),
        nullity=None,
        gap=gap,
        distance=view.distance_to(start),
        steps=search.steps,
    )


def _lowest(flat: FlatLoss, view: View, gap: float, steps: int) -> Spectrum:
    n, k = view.y.size, FIRST_EIGENPAIRS
    while True:
        plan = Plan.of(k, 0)
        if plan.rows > n and dense_bytes(n) <= machine.available_memory():
            return dense_spectrum(flat, view.y)
        if plan.rows > n or 16 * plan.basis * n > machine.available_memory():
            raise Stuck(
                f"the point is found, but with at least {k // 2} eigenvalues below "
                f"{-gap:.1e} its index is too large to be counted",
                view,
                steps,
            )
        try:
            spectrum = at_the_ends(
                flat, view.y, plan, EIGENPAIR_TOLERANCE, settled=-gap
            )
        except SpectrumError as error:
            reason = f"the point is found, but not its index: {error}"
            raise Stuck(reason, view, steps) from error
        if spectrum.eigenvalues[-1] >= -gap:
            return spectrum
        k *= 2
