"""The energy balance of a flow, L(0) - L(t) = ∫₀ᵗ ‖∇L‖², kept as a running account.

The integral is computed by Gauss-Kronrod quadrature on the solver's dense output, in
panels of several steps: steps are many to a panel where stability keeps them short. A
panel that is too coarse is split. A training run has a sum over its steps in place of
the integral, kept in the same account.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._core.compiled import compiled
from .._core.types import AnyArray
from ._equation import Equation
from ._segments import Dense

STEPS_PER_PANEL, SUBPANELS = 32, 4
"""Accepted steps in one panel, and the number of panels that it is split into where it
is too coarse."""
PANEL_TOLERANCE, LEAST_PANEL_TOLERANCE = 1e-4, 1e-12
"""A panel is split where the error of its integral, relative to L(0), exceeds this
fraction of the solver's tolerance (a finer balance would say no more about the flow),
and never below what rounding allows."""

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


EVALUATIONS_PER_PANEL = len(NODES) + 1


class EnergyAccount(eqx.Module):
    """The running balance of L(0) - L(t) against the energy ∫₀ᵗ ‖∇L‖² released."""

    initial_loss: Float[AnyArray, "*members"]
    integral: Float[AnyArray, "*members"]
    quadrature_error: Float[AnyArray, "*members"]
    imbalance: Float[AnyArray, "*members"]
    """The largest |L(0) - L(t) - ∫₀ᵗ ‖∇L‖²| so far."""
    panels: Int[AnyArray, "*members"]
    """The number of panels evaluated so far."""

    @classmethod
    def open(cls, initial_loss: Float[Array, ""]) -> "EnergyAccount":
        zero = jnp.zeros((), jnp.float64)
        return cls(initial_loss, zero, zero, zero, jnp.zeros((), jnp.int64))

    def released(
        self, energy: Float[Array, ""], loss: Float[Array, ""]
    ) -> "EnergyAccount":
        """The account after `energy` more was released on the way to a loss."""
        integral = self.integral + energy
        imbalance = jnp.abs(self.initial_loss - loss - integral)
        return EnergyAccount(
            self.initial_loss,
            integral,
            self.quadrature_error,
            jnp.maximum(self.imbalance, imbalance),
            self.panels,
        )

    def add_panel(
        self,
        start: Float[Array, ""],
        end: Float[Array, ""],
        loss_and_power: Callable[
            [Float[Array, ""]], tuple[Float[Array, ""], Float[Array, ""]]
        ],
        batch_size: int | None,
    ) -> "EnergyAccount":
        """The account after [start, end], where `loss_and_power(t)` gives L and ‖∇L‖²
        at time t, for `batch_size` times at once, or one after another if it is None.
        """
        half = 0.5 * (end - start)
        times = jnp.append(start + half * (1 + NODES), end)
        losses, powers = jax.lax.map(loss_and_power, times, batch_size=batch_size)
        kronrod, error = _gauss_kronrod(powers[:-1], half)
        after = self.released(kronrod, losses[-1])
        return eqx.tree_at(
            lambda account: (account.quadrature_error, account.panels),
            after,
            (self.quadrature_error + error, self.panels + 1),
        )


def plain_balance(
    equation: Equation,
    account: EnergyAccount,
    dense: Dense,
    end: Float[Array, ""],
) -> EnergyAccount:
    """The energy balance carried over a segment that ended at time `end`."""

    # Evaluated one by one they are a loop that XLA's CPU compiler turns into one
    # function.
    batch = None if jax.default_backend() == "cpu" else equation.batch_size

    def at(t: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return equation.loss_and_power(dense.evaluate(t))

    tolerance = jnp.maximum(PANEL_TOLERANCE * equation.rtol, LEAST_PANEL_TOLERANCE)
    last = jnp.asarray(dense.ts_size - 1)
    few = STEPS_PER_PANEL // SUBPANELS

    def add(carry: tuple[Array, Array, EnergyAccount]) -> tuple:
        """Add the next panel, or decide how many short ones take its place. Both kinds
        share a loop, so that the code to evaluate them is compiled once."""
        first, short, account = carry
        ends = first + jnp.where(short > 0, few, STEPS_PER_PANEL)
        start, stop = (
            jnp.minimum(dense.ts[jnp.minimum(step, last)], end)
            for step in (first, ends)
        )
        added = account.add_panel(start, stop, at, batch)
        error = added.quadrature_error - account.quadrature_error
        coarse = error > tolerance * jnp.abs(account.initial_loss)
        split = coarse & (short == 0)
        kept = jax.tree.map(lambda a, b: jnp.where(split, a, b), account, added)
        kept = eqx.tree_at(lambda account: account.panels, kept, added.panels)
        left = jnp.where(split, SUBPANELS, jnp.maximum(short - 1, 0))
        return jnp.where(split, first, ends), left, kept

    zero = jnp.zeros((), last.dtype)
    return jax.lax.while_loop(
        lambda carry: carry[0] < last, add, (zero, zero, account)
    )[2]


balance = compiled(plain_balance)
