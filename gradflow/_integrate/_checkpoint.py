"""Checkpoints: the whole state of a solve in a file, between segments.

A file holds numbers only: the leaves of the solver's state, whose structure comes from
the solve that reads it, and everything recorded so far except the dense output. It also
records which flow it belongs to, entry by entry, so that the checkpoint of another flow
is refused with the entries that differ.
"""

import glob
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from .._core import file_format
from .._stepping import EnergyAccount, Past, Snapshot, State, versions
from ._request import Request

LARGEST_SHARE = 0.05
"""The share of a solve's time that writing checkpoints may take."""


class Checkpoint:
    """The checkpoint file of one solve; `of` is the flow's `identity`."""

    def __init__(self, path: Path, every: float, of: dict[str, Any]):
        self._path, self._every = path, every
        # In the form in which it is read back.
        self._of = file_format.unpack(file_format.pack(of, {}), {})
        self._written, self._took = time.monotonic(), 0.0

    def read(self, start: State, snapshot: PyTree) -> tuple[State, Past, float] | None:
        """The state of the solve, what had been recorded, and the seconds it took; None
        if there is no file. `start` and `snapshot` have the structures to restore."""
        if not self._path.exists():
            return None
        return file_format.read(
            self._path, lambda run: self._build(run, start, snapshot)
        )

    def _build(
        self, run: dict[str, Any], start: State, snapshot: PyTree
    ) -> tuple[State, Past, float]:
        if "checkpoint" not in run:
            raise ValueError("this is a saved flow, not a checkpoint")
        was, now = run["checkpoint"], self._of
        differ = [
            f"`{name}` ({_brief(was.get(name))}, now {_brief(now.get(name))})"
            for name in now | was
            if was.get(name) != now.get(name)
        ]
        if differ:
            raise ValueError(
                f"it belongs to another flow, which differs in {', '.join(differ)}; "
                "remove it, or pass another `checkpoint`"
            )
        past = run["past"]
        snapshots = past.pop("snapshots")
        account = EnergyAccount(*map(jnp.asarray, past.pop("account")))
        structure = jax.tree.structure(snapshot)
        whole = None if snapshots is None else jax.tree.unflatten(structure, snapshots)
        return (
            _filled(start, run["state"]),
            Past(snapshots=whole, account=account, **past),
            run["seconds"],
        )

    @property
    def is_due(self) -> bool:
        pause = max(self._every, self._took / LARGEST_SHARE)
        return time.monotonic() - self._written >= pause

    def write(self, state: State, past: Past, seconds: float) -> None:
        """Write the file, whole or not at all."""
        began = time.monotonic()
        rows: Snapshot | None = past.snapshots
        leaves = None if rows is None else jax.tree.leaves(rows)
        content = past._asdict() | {
            "snapshots": leaves,
            "account": jax.tree.leaves(past.account),
        }
        file_format.write(
            self._path,
            {
                "checkpoint": self._of,
                "state": jax.tree.leaves(eqx.filter(state, eqx.is_array)),
                "past": content,
                "seconds": seconds,
            },
        )
        self._written = time.monotonic()
        self._took = self._written - began

    def remove(self) -> None:
        """Remove the file, and what a write that was killed left behind. A checkpoint
        belongs to a solve under way; the complete flow is the caller's to save."""
        name = glob.escape(self._path.name)
        for left in self._path.parent.glob(f".{name}.????????"):
            left.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)


def identity(
    request: Request, state: State, stored: Float[np.ndarray, " stored"]
) -> dict[str, Any]:
    """What a checkpoint belongs to. A loss of the user's own is identified by its value
    and the length of the first step, which follows from its gradient."""
    loss, earlier = request.loss, request.earlier
    known = file_format.can_pack(loss)
    event = request.event
    return {
        "loss": (
            file_format.digest(loss) if known else [float(state.loss), float(state.dt)]
        ),
        "params": file_format.digest(jax.tree.leaves(request.origin.start)),
        **request.settings._asdict(),
        "ts": file_format.digest(request.times),
        "save_params": file_format.digest(stored),
        "observables": sorted({*request.named, *request.functions}),
        # Not how it prints, which may contain an address.
        "event": getattr(event, "__name__", type(event).__name__),
        "max_steps": request.max_steps,
        "flow": (
            None
            if earlier is None
            else file_format.digest(jax.tree.leaves(earlier.final))
        ),
        "versions": versions(),
    }


def _filled(start: State, leaves: list[np.ndarray]) -> State:
    arrays, rest = eqx.partition(start, eqx.is_array)
    expected, structure = jax.tree.flatten(arrays)
    alike = [(x.shape, x.dtype) for x in expected] == [
        (x.shape, x.dtype) for x in leaves
    ]
    if not alike:
        raise ValueError("its state does not fit this solver")
    filled = jax.tree.unflatten(structure, map(jnp.asarray, leaves))
    return eqx.combine(filled, rest)


def _brief(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
