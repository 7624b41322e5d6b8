"""find_critical_point(): from a nearby point to a saddle, minimum or maximum."""

from collections.abc import Callable

import equinox as eqx
import numpy as np
from jaxtyping import Float, PyTree

from .._core import checks, machine
from .._core.checks import Checked
from .._core.types import AnyArray
from ._flat_loss import (
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
    refuse_large_hessian,
    runs,
)

DENSE_SIZE = 1500
"""The number of parameters up to which the dense Hessian is computed at every step by
default: at this size that takes a second per step."""
FIRST_EIGENPAIRS = 16
EIGENPAIR_TOLERANCE = 1e-6
MATRIX_FREE_GAP = 1e-4
"""The default `gap` of a matrix-free search, relative to max |λ|. No reasonable number
of Hessian products separates eigenvalues that cluster at zero."""


class CriticalPoint(eqx.Module):
    """A point where ∇L vanishes, with the spectrum of the Hessian there."""

    params: PyTree
    loss: float
    gradient_norm: float
    eigenvalues: Float[np.ndarray, " count"]
    """All eigenvalues, or the lowest if the search was matrix-free, in increasing
    order."""
    eigenvectors: Float[np.ndarray, "n count"]
    """Unit columns, in the order of the flat parameters; `direction` returns them as
    parameters."""
    index: int
    """The number of eigenvalues below -gap, which is the number of unstable
    directions."""
    nullity: int | None
    """The number of eigenvalues within `gap` of zero; None if the search was
    matrix-free, which does not find all of them."""
    gap: float
    """The size up to which an eigenvalue counts as zero: as given, or as small as the
    search could resolve."""
    distance: float
    """The distance from the point where the search started."""
    steps: int
    """The number of steps that the search took."""

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
        flat = "unknown" if self.nullity is None else f"{self.nullity} of {self.size}"
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
        """`Minimum`, `Maximum`, `Saddle`, `Critical point of index 0` or `Degenerate
        critical point`."""
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
    """A search that did not reach a critical point. `params` is the point where it
    ended, `gradient_norm` is ‖∇L‖ there and `steps` is the number of steps it took."""

    def __init__(self, message: str, params: PyTree, gradient_norm: float, steps: int):
        super().__init__(message)
        self.params = params
        self.gradient_norm = gradient_norm
        self.steps = steps


def find_critical_point(
    loss: Checked[Callable[[PyTree], AnyArray]],
    params: PyTree,
    *,
    gap: Checked[float | None] = None,
    tolerance: Checked[float] = 1e-12,
    max_steps: Checked[int] = 100,
    dense: Checked[bool | None] = None,
) -> CriticalPoint:
    """A critical point ∇L(θ*) = 0 near `params`: a saddle, a minimum or a maximum.

        >>> import jax.numpy as jnp
        >>> from gradflow.landscape import find_critical_point
        >>> saddle = lambda p: p["x"] ** 2 - p["y"] ** 2 + p["x"] * p["y"] ** 2
        >>> start = {"x": jnp.asarray(0.1), "y": jnp.asarray(-0.2)}
        >>> point = find_critical_point(saddle, start)
        >>> point.kind, point.index, point.nullity
        ('Saddle', 1, 0)

    The search is Newton's method in the eigenvectors of the Hessian, with steps
    shortened until ‖∇L‖ falls. Where critical points form manifolds, most eigenvalues
    are zero on the manifold and small near it, and a Newton step along their
    eigenvectors would slide along the manifold. So a step is taken only along
    directions that are certain to be curved. On a manifold the result is some critical
    point near `params`, not a particular one.

    **Arguments:**

    - `loss`: any callable from parameters to a scalar.
    - `params`: where to start; any pytree of floating arrays.
    - `gap`: take steps only along eigenvectors with |λ| > gap, and count the others as
        null. By default directions are certain if the Hessian turns by less than a
        quarter of |λ| along the Newton step in these directions (Kantorovich's
        condition for a nearby critical point, with a margin of two). Steps along other
        directions are taken only once the rest of the gradient lies there, and are the
        shortest that make it smaller. This finds the saddles of a generic function and
        the points of a critical manifold without a parameter to choose.
    - `tolerance`: the ‖∇L‖ to reach. The gradient is known to about 1e-16 times the
        size of its terms, so scale this with the loss.
    - `max_steps`: the largest number of steps.
    - `dense`: whether to compute the dense Hessian at every step. Otherwise steps are
        taken in a Krylov space of Hessian-vector products, and only the lower end of
        the spectrum is computed, until it contains all eigenvalues below -gap (which is
        then at least 1e-4 max |λ| by default). By default dense up to 1,500 parameters.

    **Returns:**

    A `CriticalPoint`. A search that fails raises a `CriticalPointError`, which says how
    far it came and contains the point that it reached.
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
    elif dense:
        refuse_large_hessian(
            y.size, "`dense` must be False for a search without the dense Hessian"
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
        f"{distance:.3g} from the start, ‖∇L‖ is {norm:.2e} (it was {first:.2e}), and "
        f"{view.count} of {len(view.eigenvalues)} directions are certain to be curved. "
        "The point is in this exception's `params`.",
        as_params(flat, view.y),
        norm,
        stuck.steps,
    )


def _whole(flat: FlatLoss, start: View, view: View, search: Newton) -> CriticalPoint:
    """The result of a search with the dense Hessian."""
    assert view.local is not None
    eigenvalues = np.asarray(view.local.eigenvalues)
    gap = search.gap
    if gap is None:
        # From the certain directions themselves; the resolution is only a bound.
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
    """The result of a matrix-free search, with as many of the lowest eigenpairs as it
    takes to reach one that is not negative."""
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
    """The lowest eigenpairs, up to one above -gap."""
    n, k = view.y.size, FIRST_EIGENPAIRS
    while True:
        plan = Plan.of(k, 0)
        if plan.rows > n and dense_bytes(n) <= machine.available_memory():
            return dense_spectrum(flat, view.y)
        if plan.rows > n or 16 * plan.basis * n > machine.available_memory():
            raise Stuck(
                f"the point was found, but with at least {k // 2} eigenvalues below "
                f"{-gap:.1e} its index is too large to be counted",
                view,
                steps,
            )
        try:
            spectrum = at_the_ends(
                flat, view.y, plan, EIGENPAIR_TOLERANCE, settled=-gap
            )
        except SpectrumError as error:
            reason = f"the point was found, but not its index: {error}"
            raise Stuck(reason, view, steps) from error
        if spectrum.eigenvalues[-1] >= -gap:
            return spectrum
        k *= 2
