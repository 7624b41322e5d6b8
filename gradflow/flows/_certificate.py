"""The certificate of a flow: how exact it is, by laws that an exact flow obeys."""

import math

import equinox as eqx
import numpy as np
from jaxtyping import Float

from .._core.file_format import storable
from .._stepping import Continuation


@storable
class Certificate(eqx.Module):
    """Three laws of an exact gradient flow, and by how much this one violates them.

    For a training run they measure its distance from a flow; a violation is then no
    sign of an error.
    """

    drift: dict[str, float]
    """For each conserved quantity Q, max_t |Q(t) - Q(0)| relative to the largest term
    that Q is a sum of. Empty if no conserved quantity is known."""
    energy_imbalance: float
    """max_t |L(0) - L(t) - ∫₀ᵗ ‖∇L‖²|, over the ends of the quadrature's panels and not
    only over saved times. For a training run, with Σ η‖∇L‖² over its steps in place of
    the integral; NaN if ‖∇L‖ is known only on samples."""
    energy_released: float
    """L(0) - L(t) at the end: the scale to compare the imbalance with."""
    quadrature_error: float
    """The estimated error of the integral itself; NaN for a training run, which has a
    sum in its place."""
    largest_rise: float
    """The largest rise of the loss between two saved times; zero if it only falls."""

    @classmethod
    def of(
        cls, accounts: Continuation, loss: Float[np.ndarray, " times"]
    ) -> "Certificate":
        """The certificate from the accounts at a flow's end and its losses."""
        with np.errstate(invalid="ignore"):  # a loss that overflowed has no rise
            rises = np.diff(loss)
        account = accounts.account
        begun = np.isfinite(account.initial_loss)
        return cls(
            drift={
                name: relative_drift(drift, accounts.size[name])
                for name, drift in accounts.drift.items()
            },
            energy_imbalance=float(account.imbalance) if begun else math.nan,
            energy_released=float(account.initial_loss) - float(loss[-1]),
            quadrature_error=float(account.quadrature_error),
            largest_rise=float(rises.max(initial=0.0)),
        )

    def __str__(self) -> str:
        lines = [
            f"energy balance   {self._balance}",
            f"largest rise     {self.largest_rise:.1e} between saved times",
        ]
        if self.drift:
            drifts = ", ".join(f"{k} {v:.1e}" for k, v in self.drift.items())
            lines.append(f"conserved drift  {drifts}")
        else:
            lines.append("conserved drift  (no conserved quantity is known)")
        return "\n".join(lines)

    @property
    def _balance(self) -> str:
        if math.isnan(self.energy_imbalance):
            return "(unknown: gradients are those of samples)"
        small = f"≤ {self.energy_imbalance:.1e} of {self.energy_released:.4g}"
        if math.isnan(self.quadrature_error):
            return f"|L(0) - L(t) - Σ η‖∇L‖²| {small}"
        quadrature = f"(quadrature ±{self.quadrature_error:.0e})"
        return f"|L(0) - L(t) - ∫‖∇L‖²| {small} {quadrature}"


def relative_drift(drift: float, size: float) -> float:
    return drift / size if size > 0 else drift
