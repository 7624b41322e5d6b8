"""Run files: plain arrays and JSON in one zip archive, never code.

A file is an uncompressed `.npz` archive. Its member `header` is JSON that describes the
stored object and refers to the other members, each one array, by name. Its member
`digest` is the SHA-256 of everything else. Nothing is ever unpickled, and a file that
was truncated, altered or written by another program is refused.
"""

import errno
import hashlib
import io
import json
import os
import secrets
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import equinox as eqx
import jax
import numpy as np

FORMAT = "gradflow-run"
FORMAT_VERSION = 2
"""The version that is written. A new one must go on reading all that came before."""
READABLE_VERSIONS = (1, 2)
FORMER_NAMES = {"RankOneFlow": "RankOneProblem"}
"""Classes that files of older versions know under another name."""

_Class = TypeVar("_Class", bound=type)
_T = TypeVar("_T")
_storable: dict[str, type] = {}


def storable(cls: _Class) -> _Class:
    """Mark one of the library's own classes as one that a run file may contain.

    Its objects are stored as what `stored_arguments()` returns and rebuilt by calling
    the class with these arguments, so that a file passes the same checks as a user.
    A module without that method is stored field by field.
    """
    _storable[cls.__name__] = cls
    return cls


def is_storable(value: Any) -> bool:
    """Whether `value` is an object of the library that a run file can rebuild."""
    return _storable.get(type(value).__name__) is type(value)


def can_pack(value: Any) -> bool:
    """Whether a run file can hold `value` and rebuild it."""
    try:
        pack(value, {})
    except TypeError:
        return False
    return True


class RunFileError(ValueError):
    """A run file that is missing, damaged, altered, or not one of gradflow's."""


#
# Between objects and JSON with arrays
#


def pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """`value` as JSON; arrays go into `arrays` under new names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"a run file cannot contain arrays of type {array.dtype}.")
        name = f"array{len(arrays)}"
        arrays[name] = array
        return {"array": name}
    if is_storable(value):
        fields = (
            value.stored_arguments()
            if hasattr(value, "stored_arguments")
            else {k: getattr(value, k) for k in value.__dataclass_fields__}
        )
        return {"object": type(value).__name__, "with": _pack_dict(fields, arrays)}
    if type(value) is dict:
        return {"dict": _pack_dict(value, arrays)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [pack(v, arrays) for v in value]}
    raise TypeError(f"a run file cannot contain a {type(value).__name__}.")


def _pack_dict(value: dict, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    if not all(isinstance(k, str) for k in value):
        raise TypeError("a run file can only contain dictionaries with string keys.")
    return {k: pack(v, arrays) for k, v in value.items()}


def unpack(packed: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The inverse of `pack`."""
    if not isinstance(packed, dict):
        return packed
    (kind, content), *rest = packed.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {k: unpack(v, arrays) for k, v in content.items()}
    if kind in ("list", "tuple"):
        items = [unpack(v, arrays) for v in content]
        return items if kind == "list" else tuple(items)
    cls = _storable.get(FORMER_NAMES.get(str(content), str(content)))
    if kind == "object" and cls is not None:
        fields = {k: unpack(v, arrays) for k, v in dict(rest)["with"].items()}
        if hasattr(cls, "stored_arguments"):
            return cls(**fields)
        return _bare_module(cls, fields)
    raise RunFileError(
        f"it contains a {kind} {content!r}, which this version cannot read"
    )


def _bare_module(cls: type, fields: dict[str, Any]) -> Any:
    assert issubclass(cls, eqx.Module)
    if set(fields) != set(cls.__dataclass_fields__):
        raise RunFileError(f"its {cls.__name__} has other fields than this version's")
    return cls(**fields)


#
# Between JSON with arrays and files
#


def write(path: str | os.PathLike, header: dict[str, Any]) -> Path:
    """Write `header`, which `pack` must accept, whole or not at all."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"no folder '{path.parent}' to write the run file '{path.name}' into."
        )
    members = _members(header)
    write_whole(path, lambda file: np.savez(file, allow_pickle=False, **members))
    return path


def encode(header: dict[str, Any]) -> bytes:
    """The bytes that `write` writes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **_members(header))
    return buffer.getvalue()


def digest(value: Any) -> str:
    """A digest of anything that `pack` accepts: the same for the same data."""
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(pack(value, arrays)).encode()
    return _digest({"header": np.frombuffer(text, np.uint8), **arrays}).hex()


def _members(header: dict[str, Any]) -> dict[str, Any]:
    arrays: dict[str, np.ndarray] = {}
    packed = {"format": FORMAT, "version": FORMAT_VERSION, "run": pack(header, arrays)}
    text = json.dumps(packed).encode()
    members = {"header": np.frombuffer(text, dtype=np.uint8), **arrays}
    return {"digest": np.frombuffer(_digest(members), dtype=np.uint8), **members}


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> os.stat_result:
    """Write the file at `path` whole or not at all, and return its status.

    `write` fills a temporary file in the same folder, so that the rename which puts it
    in place stays on one file system. File and folder are synced: once this returns,
    the file survives a crash of the machine.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # The kernel applies the umask to 0o666: reading the umask ourselves would mean to
    # set it for a moment, for all threads of the process.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(temporary, flags, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            status = os.fstat(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return status


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, where the platform can sync a folder."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders; a folder may be writable only
        return
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems sync no folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def read(path: str | os.PathLike, build: Callable[[dict[str, Any]], _T]) -> _T:
    """Read what `write` wrote at `path`, check it, and pass it to `build`."""
    path = Path(path)
    if not path.is_file():
        raise RunFileError(f"no run file at '{path}'.")
    try:
        # Opened here because NumPy leaves a file open that it cannot read.
        file = path.open("rb")
    except OSError as error:
        raise RunFileError(f"'{path}' cannot be read: {error.strerror}.") from error
    with file:
        packed, arrays = decode(file, path)
    return built(path, lambda: build(unpack(packed, arrays)))


def decode(file: io.BufferedIOBase, path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """The arguments of `unpack`, from the contents of the file at `path`, checked."""
    try:
        members = dict(np.load(file, allow_pickle=False))
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise RunFileError(
            f"'{path}' is not a gradflow run file, or it was cut short or damaged "
            f"({error})."
        ) from error
    digest = members.pop("digest", None)
    if digest is None or "header" not in members:
        raise RunFileError(f"'{path}' is not a gradflow run file.")
    if digest.tobytes() != _digest(members):
        raise RunFileError(
            f"'{path}' was altered after it was written: its contents do not match "
            "its digest."
        )
    try:
        header = json.loads(members["header"].tobytes())
        name, version = header["format"], header["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunFileError(f"'{path}' is not a gradflow run file.") from error
    if name != FORMAT:
        raise RunFileError(f"'{path}' has the format {name!r}, not {FORMAT!r}.")
    if version not in READABLE_VERSIONS:
        raise RunFileError(
            f"'{path}' has version {version!r} of the run file format, and this "
            f"gradflow reads versions {READABLE_VERSIONS[0]} to "
            f"{READABLE_VERSIONS[-1]}: read it with the newer gradflow that wrote it."
        )
    return header.get("run"), members


def built(path: Path, build: Callable[[], _T]) -> _T:
    """The result of `build` on the contents of the file at `path`, or an error that
    names the file."""
    try:
        return build()
    except (RunFileError, KeyError, TypeError, ValueError) as error:
        raise RunFileError(f"'{path}' cannot be read: {error}.") from error


def _digest(members: dict[str, np.ndarray]) -> bytes:
    sha = hashlib.sha256()
    for name in sorted(members):
        array = np.ascontiguousarray(members[name])
        sha.update(f"{name}{array.dtype.str}{array.shape}".encode())
        sha.update(array.data if array.size else b"")
    return sha.digest()
