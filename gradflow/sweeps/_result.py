"""One result: its file, and the variables that a dataset shows.

A result is a run file (`_core.file_format`) with a seal as the comment of its archive:
the SHA-256 of the file's name and of every byte before the seal. Hashing checks every
byte without parsing the file, and detects a file that was renamed to another result's
name. NumPy opens the file like any other `.npz`.
"""

import hashlib
import io
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core import file_format
from .._core.file_format import RunFileError
from .._core.ravel import path_name
from ..flows import Flow, Training, trajectory_of
from ._grid import key_of
from ._worker import Label, plain_values

SEAL = 64
"""The length of a seal in bytes: a SHA-256 in hexadecimal digits."""

FLOW, VALUES = "flow", "values"
"""The kinds of results: a flow or training run, or a mapping of numbers and arrays."""

Result = Flow | Training | dict[str, Any]
"""A result as a task returned it."""


class Encoded(NamedTuple):
    """A result in the form in which a store keeps it."""

    data: bytes
    summary: dict[str, Any]
    """The result's entry in the index of the store, as JSON: its kind, and for each
    variable its value if it is a number, otherwise its dtype and shape."""


def encode(result: object, label: Label) -> Encoded:
    """A task's result as a file, together with the `label` of its point."""
    if isinstance(result, Flow | Training):
        kind, content = FLOW, result.contents()
    else:
        kind, content = VALUES, plain_values(result, label["point"])
    data = file_format.encode({**label, "kind": kind, "content": content})
    # A zip archive without a comment ends with the comment's length, two bytes.
    body = data[:-2] + SEAL.to_bytes(2, "little")
    key = key_of(label["task"], label["version"], label["point"])
    shown = _shown(kind, content)
    return Encoded(
        body + _seal(key, body), {"kind": kind, "variables": _outline(shown)}
    )


def _seal(key: str, body: bytes) -> bytes:
    sha = hashlib.sha256(key.encode())
    sha.update(body)
    return sha.hexdigest().encode()


def read(path: Path) -> bytes:
    """The bytes of the file at `path`, whose seal is checked."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunFileError(f"'{path}' cannot be read: {error.strerror}.") from error
    if _seal(path.stem, data[:-SEAL]) != data[-SEAL:]:
        raise RunFileError(
            f"'{path}' is damaged: its contents do not match its digest."
        )
    return data


def decode(path: Path, **given: Any) -> tuple[dict[str, Any], Result]:
    """The label and the result in the file at `path`. A flow is built with `given`, the
    optional arguments of `Flow.load`."""
    packed, arrays = file_format.decode(io.BytesIO(read(path)), path)

    def build() -> tuple[dict[str, Any], Result]:
        label = file_format.unpack(packed, arrays)
        kind, content = label.pop("kind"), label.pop("content")
        if kind == FLOW:
            return label, trajectory_of(content, **given)
        return label, content

    return file_format.built(path, build)


def variables(path: Path) -> tuple[str, dict[str, Any]]:
    """The kind and the variables of the result at `path`, without building a flow."""
    packed, arrays = file_format.decode(io.BytesIO(read(path)), path)

    def build() -> tuple[str, dict[str, Any]]:
        fields = packed["dict"]
        stored = fields["content"]["dict"]
        content = {
            name: file_format.unpack(stored[name], arrays)
            for name in stored
            if fields["kind"] == VALUES or name in _SHOWN_FIELDS
        }
        return fields["kind"], _shown(fields["kind"], content)

    return file_format.built(path, build)


def summary(path: Path) -> dict[str, Any]:
    """The index entry of the result at `path`, made from the file itself."""
    kind, shown = variables(path)
    return {"kind": kind, "variables": _outline(shown)}


_SHOWN_FIELDS = (
    *("ts", "loss", "speed", "observables", "result"),
    *("certificate", "settings"),
)
"""The fields of a flow or training run from which variables are made."""


def _shown(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """The numbers and arrays that a dataset shows, by name."""
    if kind == VALUES:
        return content
    certificate = content["certificate"]
    shown: dict[str, Any] = {
        "final_loss": float(content["loss"][-1]),
        "final_time": float(content["ts"][-1]),
        "successful": content["result"] in ("successful", "event_occurred"),
        "energy_imbalance": certificate.energy_imbalance,
        "energy_released": certificate.energy_released,
        "largest_drift": max(certificate.drift.values(), default=float("nan")),
        **{name: np.asarray(content[name]) for name in ("ts", "loss", "speed")},
    }
    if "settings" in content:  # a training run has no tolerance
        shown["rtol"] = float(content["settings"]["rtol"])
    leaves, _ = jax.tree_util.tree_flatten_with_path(content["observables"])
    for where, leaf in leaves:
        name = path_name(where)
        shown[f"observables.{name}" if name in shown else name] = np.asarray(leaf)
    return shown


def _outline(shown: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [value.dtype.str, list(value.shape)]
        if isinstance(value, np.ndarray)
        else value
        for name, value in shown.items()
    }
