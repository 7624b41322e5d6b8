"""How exact a flow is, by what an exact gradient flow cannot violate."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._core.storage import storable


@storable
class Certificate(eqx.Module):
    """Three laws of an exact gradient flow, and by how much this flow breaks them.

    Of a training they say how far it is from a flow: not that anything is wrong.
    """

    drift: dict[str, float]
    """For each conserved quantity Q, max_t |Q(t) - Q(0)| relative to the largest term
    that Q is a sum of. Empty where no conserved quantity is known."""
    energy_imbalance: float
    """max_t |L(0) - L(t) - ∫₀ᵗ ‖∇L‖²|, over the ends of the panels of the
    quadrature, not only over saved times. Of a training, with Σ η‖∇L‖² over its steps
    in place of the integral; NaN where ‖∇L‖ is known of samples only."""
    energy_released: float
    """L(0) - L(t) at the end: the scale to hold the imbalance against."""
    quadrature_error: float
    """The estimated error of the integral itself; NaN of a training, which has a sum in
    its place."""
    largest_rise: float
    """The largest rise of the loss between two saved times; zero if it only falls."""

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
            return "(not known: gradients are those of samples)"
        small = f"≤ {self.energy_imbalance:.1e} of {self.energy_released:.4g}"
        if math.isnan(self.quadrature_error):
            return f"|L(0) - L(t) - Σ η‖∇L‖²| {small}"
        quadrature = f"(quadrature ±{self.quadrature_error:.0e})"
        return f"|L(0) - L(t) - ∫‖∇L‖²| {small} {quadrature}"


# Gauss-Kronrod nodes on [-1, 1] and weights (Piessens et al., QUADPACK, 1983): the
# fifteen-point rule contains the seven-point Gauss rule.
_NODES = np.array(
    [
        0.991455371120812639206854697526329,
        0.949107912342758524526189684047851,
        0.864864423359769072789712788640926,
        0.741531185599394439863864773280788,
        0.586087235467691130294144691258840,
        0.405845151377397166906606412076961,
        0.207784955007898467600689403773245,
        0.0,
    ]
)
_KRONROD = np.array(
    [
        0.022935322010529224963732008058970,
        0.063092092629978553290700663189204,
        0.104790010322250183839876322541518,
        0.140653259715525918745189590510238,
        0.169004726639267902826583426598550,
        0.190350578064785409913256402421014,
        0.204432940075298892414161999234649,
        0.209482141084727828012999174891714,
    ]
)
_GAUSS = np.array(
    [
        0.129484966168869693270611432679082,
        0.279705391489276667901467771423780,
        0.381830050505118944950369775488975,
        0.417959183673469387755102040816327,
    ]
)


def _mirrored(half: np.ndarray, sign: int = 1) -> np.ndarray:
    return np.concatenate([sign * half, half[-2::-1]])


NODES = _mirrored(_NODES, -1)
KRONROD = _mirrored(_KRONROD)
GAUSS = np.zeros(15)
GAUSS[1::2] = _mirrored(_GAUSS)


def _gauss_kronrod(
    values: Float[Array, " 15"], half: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The integral over a panel of half-width `half` from the values at its nodes, and
    QUADPACK's estimate of its error: the two rules' difference is the error of the
    weaker one, and its 3/2th power, suitably scaled, that of the stronger."""
    kronrod, gauss = half * (KRONROD @ values), half * (GAUSS @ values)
    difference = jnp.abs(kronrod - gauss)
    spread = half * (KRONROD @ jnp.abs(values - 0.5 * (KRONROD @ values)))
    ratio = 200 * difference / jnp.where(spread > 0, spread, 1.0)
    return kronrod, jnp.where(spread > 0, spread * jnp.minimum(1, ratio**1.5), 0.0)


class EnergyAccount(eqx.Module):
    """The running balance of L(0) - L(t) against ∫₀ᵗ ‖∇L‖²."""

    initial_loss: Float[Array, ""]
    integral: Float[Array, ""]
    quadrature_error: Float[Array, ""]
    imbalance: Float[Array, ""]
    panels: Int[Array, ""]
    """How many panels have been evaluated."""

    @classmethod
    def open(cls, initial_loss: Float[Array, ""]) -> "EnergyAccount":
        zero = jnp.zeros((), jnp.float64)
        return cls(initial_loss, zero, zero, zero, jnp.zeros((), jnp.int64))

    def add_panel(
        self,
        start: Float[Array, ""],
        end: Float[Array, ""],
        loss_and_power: Callable[
            [Float[Array, ""]], tuple[Float[Array, ""], Float[Array, ""]]
        ],
        batch_size: int | None,
    ) -> "EnergyAccount":
        """The account after [start, end], where `loss_and_power(t)` gives L and
        ‖∇L‖² at time t; of so many times at once, or of None one after another."""
        half = 0.5 * (end - start)
        times = jnp.append(start + half * (1 + NODES), end)
        losses, powers = jax.lax.map(loss_and_power, times, batch_size=batch_size)
        kronrod, error = _gauss_kronrod(powers[:-1], half)
        integral = self.integral + kronrod
        imbalance = jnp.abs(self.initial_loss - losses[-1] - integral)
        return EnergyAccount(
            self.initial_loss,
            integral,
            self.quadrature_error + error,
            jnp.maximum(self.imbalance, imbalance),
            self.panels + 1,
        )
