"""What happened to many: flows of one kind, and what they have in common."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float, PyTree

from .._core import checks
from ._flow import Flow

if TYPE_CHECKING:
    import xarray


class EnsembleError(RuntimeError):
    """Members could not go on. `ensemble` holds all that was computed."""

    def __init__(self, ensemble: "Ensemble"):
        failed = ensemble.failed
        some = "; ".join(f"member {i} {why}" for i, why in list(failed.items())[:3])
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        super().__init__(
            f"{len(failed)} of {len(ensemble)} flows did not reach their end: {some}"
            f"{more}. All that was computed is in this exception's `ensemble`; "
            "`throw=False` returns it instead."
        )
        self.ensemble = ensemble


class Ensemble:
    """Flows of one kind: a `Flow` with an axis of members before that of time.

    `ensemble[i]` is a member, a `Flow` like any other. What stands here of all of them
    is over the same times, and NaN where a member had ended.
    """

    ts: Float[np.ndarray, " times"]
    """The saved times."""

    def __init__(self, flows: tuple[Flow, ...], ts: Float[np.ndarray, " times"]):
        self.flows, self.ts = flows, ts
        self._cache: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.flows)

    def __getitem__(self, i: int) -> Flow:
        return self.flows[i]

    def __iter__(self) -> Iterator[Flow]:
        return iter(self.flows)

    @property
    def failed(self) -> dict[int, str]:
        """The members that did not reach the horizon nor an event, and why."""
        return {
            i: flow.stats["reason"]
            for i, flow in enumerate(self.flows)
            if not flow.ended_as_wanted
        }

    @property
    def loss(self) -> Float[np.ndarray, "members times"]:
        return self.values("loss")

    @property
    def speed(self) -> Float[np.ndarray, "members times"]:
        return self.values("speed")

    @property
    def final(self) -> PyTree:
        """The parameters at each member's end, along a leading axis."""
        return jax.tree.map(
            lambda *x: np.stack([np.asarray(y) for y in x]),
            *(flow.final for flow in self.flows),
        )

    @property
    def end(self) -> Float[np.ndarray, " members"]:
        """The time at which each member ended."""
        return np.array([flow.ts[-1] for flow in self.flows])

    def values(self, name: str) -> PyTree:
        """`loss`, `speed` or an observable, of all members at the saved times."""
        if name not in self._cache:
            self._cache[name] = self._stacked(name)
        return self._cache[name]

    def _stacked(self, name: str) -> PyTree:
        known = ("loss", "speed", *self.flows[0].observables)
        if name not in known:
            raise ValueError(f"`name` must be one of {', '.join(known)}, got {name!r}.")

        def row(flow: Flow, values: Any) -> np.ndarray:
            # Only where a member stopped early is its last time not among them.
            saved = np.isin(flow.ts, self.ts)
            out = np.full((len(self.ts), *np.shape(values)[1:]), np.nan)
            out[: saved.sum()] = np.asarray(values)[saved]
            return out

        each = [
            jax.tree.map(
                lambda x, flow=flow: row(flow, x),
                getattr(flow, name)
                if name in ("loss", "speed")
                else flow.observables[name],
            )
            for flow in self.flows
        ]
        return jax.tree.map(lambda *x: np.stack(x), *each)

    def median(self, name: str = "loss") -> PyTree:
        """The median over the members that have not ended, at each saved time."""
        return self.quantiles(0.5, name)

    def quantiles(self, q: Any, name: str = "loss") -> PyTree:
        """Quantiles over the members that have not ended, at each saved time; of
        several, along a leading axis."""
        levels = checks.real_array("q", q)
        if levels.ndim > 1 or not np.all((levels >= 0) & (levels <= 1)):
            raise ValueError(f"`q` must hold numbers from 0 to 1, got {q!r}.")

        def reduce(x: np.ndarray) -> np.ndarray:
            there = np.isfinite(x).any(axis=0)
            out = np.full((*levels.shape, *there.shape), np.nan)
            out[..., there] = np.nanquantile(x[:, there], levels, axis=0)
            return out

        return jax.tree.map(reduce, self.values(name))

    def to_xarray(self) -> "xarray.Dataset":
        """All members as an `xarray.Dataset` over the dimensions `member`, `time`."""
        import xarray

        names = ("loss", "speed", *self.flows[0].observables)
        arrays = {}
        for name in names:
            leaves, _ = jax.tree_util.tree_flatten_with_path(self.values(name))
            for path, leaf in leaves:
                inner = jax.tree_util.keystr(path, simple=True, separator=".")
                arrays[f"{name}.{inner}" if inner else name] = leaf
        return xarray.Dataset(
            {
                name: (
                    ("member", "time", *(f"{name}_{i}" for i in range(x.ndim - 2))),
                    x,
                )
                for name, x in arrays.items()
            },
            coords={"time": self.ts, "member": np.arange(len(self))},
            attrs={"failed": str(self.failed)},
        )

    def __str__(self) -> str:
        stats = [flow.stats for flow in self.flows]
        lines = [
            f"Ensemble of {len(self)} flows to t = {self.ts[-1]:g}"
            + (f" ({len(self.failed)} failed, left out below)" if self.failed else ""),
            f"time             {sum(s['run_seconds'] for s in stats):.2f} s, and "
            f"{sum(s['compile_seconds'] for s in stats):.2f} s to compile",
        ]
        ended = [flow for flow in self.flows if flow.ended_as_wanted]
        if not ended:
            return "\n".join(lines)
        steps = [
            flow.stats["num_accepted_steps"] + flow.stats["num_rejected_steps"]
            for flow in ended
        ]
        certificates = [flow.certificate for flow in ended]
        imbalance = max(c.energy_imbalance for c in certificates)
        released = min(c.energy_released for c in certificates)
        drift = {
            name: max(c.drift[name] for c in certificates)
            for name in certificates[0].drift
        }
        low, middle, high = np.quantile([f.loss[-1] for f in ended], [0.05, 0.5, 0.95])
        lines += [
            f"loss             → {middle:.6f} ({low:.6f} … {high:.6f})",
            f"work             {min(steps):,} … {max(steps):,} steps",
            f"energy balance   |L(0) - L(t) - ∫‖∇L‖²| ≤ {imbalance:.1e} in all, of "
            f"{released:.4g} or more",
        ]
        if drift:
            worst = ", ".join(f"{k} {v:.1e}" for k, v in drift.items())
            lines.append(f"conserved drift  {worst} at most")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Ensemble({len(self)} flows to t = {self.ts[-1]:g})"
