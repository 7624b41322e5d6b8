"""Checkpoints: the whole state of a solve in a file, between segments.

A file holds numbers only: the leaves of the solver's state, whose structure comes from
the solve that reads it, and what was recorded so far, but for the dense output. It also
says what flow it is of, entry by entry, so that another flow's is refused by name.
"""

import glob
import os
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._core import storage
from .._stepping._energy import EnergyAccount
from .._stepping._record import Past, Snapshot
from .._stepping._segments import State

LARGEST_SHARE = 0.05
"""Of the time of a solve, how much writing checkpoints may take."""


class Checkpoint:
    """The file at `path` of one solve, `of` which flow is a dictionary of what decides
    where it goes."""

    def __init__(self, path: Path, every: float, of: dict[str, Any]):
        self._path, self._every = path, every
        # As it is read again.
        self._of = storage.unpack(storage.pack(of, {}), {})
        self._written, self._took = time.monotonic(), 0.0

    def read(self, start: State, snapshot: PyTree) -> tuple[State, Past, float] | None:
        """Where the solve stood, what had been recorded, and the seconds that it took;
        None if there is no file. `start` is a state and `snapshot` one of the same
        structures."""
        if not self._path.exists():
            return None
        return storage.read(self._path, lambda run: self._build(run, start, snapshot))

    def _build(
        self, run: dict[str, Any], start: State, snapshot: PyTree
    ) -> tuple[State, Past, float]:
        if "checkpoint" not in run:
            raise ValueError("it is a flow, no checkpoint")
        was, now = run["checkpoint"], self._of
        differ = [
            f"`{name}` ({_brief(was.get(name))}, now {_brief(now.get(name))})"
            for name in now | was
            if was.get(name) != now.get(name)
        ]
        if differ:
            raise ValueError(
                f"it is of another flow, which differs in {', '.join(differ)}; remove "
                "it, or give another `checkpoint`"
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
        """Whole or not at all."""
        began = time.monotonic()
        rows: Snapshot | None = past.snapshots
        leaves = None if rows is None else jax.tree.leaves(rows)
        content = past._asdict() | {
            "snapshots": leaves,
            "account": jax.tree.leaves(past.account),
        }
        storage.write(
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
        """With what a write that was killed left behind. What is complete is the
        caller's to save: a checkpoint is of a solve under way."""
        name = glob.escape(self._path.name)
        for left in self._path.parent.glob(f".{name}.????????"):
            left.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)


def check_path(path: Any) -> Path:
    """`path` as that of a file which can be written."""
    if not isinstance(path, str | os.PathLike) or Path(path).is_dir():
        raise ValueError(f"`checkpoint` must be the path of a file, got {path!r}.")
    if not Path(path).parent.is_dir():
        raise ValueError(
            f"`checkpoint` must be in a folder that exists, got '{os.fspath(path)}'."
        )
    return Path(path)


def _filled(start: State, leaves: list[np.ndarray]) -> State:
    arrays, rest = eqx.partition(start, eqx.is_array)
    expected, structure = jax.tree.flatten(arrays)
    alike = [(x.shape, x.dtype) for x in expected] == [
        (x.shape, x.dtype) for x in leaves
    ]
    if not alike:
        raise ValueError("its state is not that of this solver")
    filled = jax.tree.unflatten(structure, map(jnp.asarray, leaves))
    return eqx.combine(filled, rest)


def _brief(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
