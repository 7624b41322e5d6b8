"""plot_singular_values(): the singular values, which rise one after another."""

from collections.abc import Sequence

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, PyTree
from matplotlib.axes import Axes

from .._core.checks import Checked
from ..analysis.stages import Stage
from ..flows import AbstractTrajectory
from ._common import COLOURS, axes_or_new, logarithmic_clock, shown_times
from ._stages import plot_stages

MOST_VALUES = 5
"""The largest number of singular values of a matrix that are shown."""

# The parameters, the label and the line style of each matrix.
_matrices = {
    "singular_values_W0": (("W0",), "$W_0$", "-"),
    "singular_values_W1": (("W1",), "$W_1$", "--"),
    "singular_values_QK": (("WQ", "WK"), r"$W_Q W_K^\top$", ":"),
}


def plot_singular_values(
    flow: Checked[AbstractTrajectory],
    ax: Axes | None = None,
    *,
    stages: Sequence[Stage] | None = None,
) -> Axes:
    """The largest singular values of W0, W1 and WQ WKᵀ over time on logarithmic axes,
    at most five of each. `stages` are shown as bands."""
    shown = shown_times(flow)
    spectra = {name: singular_values(flow, name) for name in _matrices}
    ax = axes_or_new(ax)
    for (name, values), colour in zip(spectra.items(), COLOURS, strict=False):
        _, label, style = _matrices[name]
        for i, value in enumerate(values[shown, :MOST_VALUES].T):
            ax.plot(
                flow.ts[shown],
                value,
                color=colour,
                linestyle=style,
                linewidth=2 if i == 0 else 1.2,
                alpha=1 if i == 0 else 0.75,
                label=label if i == 0 else None,
            )
    ax.set_yscale("log")
    logarithmic_clock(ax, flow.ts[shown])
    ax.set_ylabel("singular value")
    cut = any(values.shape[1] > MOST_VALUES for values in spectra.values())
    note = f" (at most {MOST_VALUES} of each matrix)" if cut else ""
    ax.set_title(f"Singular values{note}", loc="left")
    ax.legend(fontsize="small", handlelength=2.5)
    if stages is not None:
        plot_stages(stages, ax)
    return ax


def has_singular_values(flow: AbstractTrajectory) -> bool:
    """Whether `plot_singular_values` can draw the flow."""
    return all(
        np.ndim(flow.observables.get(name, 0.0)) == 2 or _factors(flow, name)
        for name in _matrices
    )


def singular_values(
    flow: AbstractTrajectory, name: str
) -> Float[np.ndarray, "times r"]:
    """The singular values of one matrix, as observed or, if they were not, computed
    from the parameters. Values that are zero up to rounding become gaps, so that they
    do not stretch the logarithmic axis."""
    if not has_singular_values(flow):
        raise ValueError(
            f"`plot_singular_values` needs the observables {', '.join(_matrices)} or "
            "parameters W0, W1, WQ and WK to compute them from, and this flow has "
            "neither: integrate a `gradflow.Problem`, or pass functions of these names "
            "as `integrate(..., observables=...)`."
        )
    factors = _factors(flow, name)
    if name in flow.observables:
        values = np.asarray(flow.observables[name])
    else:
        product = factors[0] if len(factors) == 1 else factors[0] @ factors[1].mT
        values = np.linalg.svd(product, compute_uv=False)
    if factors:  # WQ WKᵀ is m×m, but has rank k
        values = values[:, : min(min(factor.shape[1:]) for factor in factors)]
    rounding = values.shape[1] * np.finfo(float).eps * values[:, :1]
    return np.where(values > rounding, values, np.nan)


class _Fields(eqx.Module):
    """Some fields of the parameters."""

    names: tuple[str, ...] = eqx.field(static=True)

    def __call__(self, params: PyTree) -> list[Array]:
        return [getattr(params, name) for name in self.names]


def _factors(
    flow: AbstractTrajectory, name: str
) -> list[Float[np.ndarray, "times a b"]]:
    """The parameters whose product has these singular values; empty if the flow does
    not have them."""
    fields = _matrices[name][0]
    found = [getattr(flow.params, field, 0.0) for field in fields]
    if not all(np.ndim(f) == 3 for f in found):
        return []
    if len(flow.params_ts) == len(flow.ts) or name in flow.observables:
        return [np.asarray(f) for f in found]
    factors = flow.observe(_Fields(fields), flow.ts)
    return [np.asarray(f) for f in factors]
