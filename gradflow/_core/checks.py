"""Checks of arguments. Each error names the argument, what was expected and what came,
and is raised before any work starts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .compiled import jit
from .ravel import path_name

if TYPE_CHECKING:
    _T = TypeVar("_T")
    Checked = Annotated[_T, "checked by hand"]
else:

    class Checked:
        """`Checked[T]` is `T` to a static type checker and anything at run time, so
        that our own checks raise their sentences before a type checker would."""

        def __class_getitem__(cls, _: Any) -> Any:
            return Any


def whole_number(
    name: str, value: Any, *, least: int = 1, most: int = 2**63 - 1
) -> int:
    """`value` as an `int`, if it is a whole number from `least` to `most`."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < least:
        raise ValueError(
            f"`{name}` must be a whole number of at least {least}, got {value!r}."
        )
    if value > most:
        raise ValueError(f"`{name}` must be at most {most:,}, got {value:,}.")
    return int(value)


def positive_number(name: str, value: Any, *, zero_allowed: bool = False) -> float:
    """`value` as a `float`, if it is a finite positive real number."""
    wanted = "a finite number, zero or more" if zero_allowed else "a positive number"
    try:
        if isinstance(value, str | bytes):  # which `float` would read
            raise TypeError
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must be {wanted}, got {value!r}.") from error
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero_allowed):
        raise ValueError(f"`{name}` must be {wanted}, got {number!r}.")
    return number


def finite_number(name: str, value: Any) -> float:
    """`value` as a `float`, if it is a finite real number."""
    is_real = isinstance(value, int | float | np.integer | np.floating)
    if not is_real or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"`{name}` must be a finite number, got {value!r}.")
    return float(value)


def named_functions(
    name: str, value: Any, reserved: Sequence[str] = ()
) -> dict[str, Callable[[PyTree], Any]]:
    """`value` as a dictionary from names to functions of the parameters."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(
            f"`{name}` must map names to functions of the parameters, got {value!r}."
        )
    for key, function in value.items():
        if not isinstance(key, str) or not callable(function):
            raise ValueError(
                f"`{name}` must map names to functions of the parameters, got "
                f"{key!r}: {function!r}."
            )
        if key in reserved:
            raise ValueError(
                f"`{name}` must not use the names {', '.join(reserved)}, which every "
                f"flow has already, got {key!r}."
            )
    return dict(value)


def real_array(name: str, value: Any) -> np.ndarray:
    """`value` as a finite float64 array."""
    try:
        array = np.asarray(value)
    except ValueError as error:  # ragged rows
        raise ValueError(f"`{name}` must be an array of numbers: {error}.") from error
    if np.iscomplexobj(array):
        raise ValueError(f"`{name}` must be real, got complex entries.")
    if array.dtype.kind not in "fiu":
        raise ValueError(
            f"`{name}` must be an array of numbers, got entries of type {array.dtype}."
        )
    array = array.astype(np.float64)
    if not np.all(np.isfinite(array)):
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        place = f" at index {where}" if where else ""
        raise ValueError(f"`{name}` must be finite, got {array[where]}{place}.")
    return array


def law(name: str, value: Any, *, size: int | None = None) -> np.ndarray:
    """`value` as a probability vector, non-negative and normalised to a sum of one."""
    array = real_array(name, value)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"`{name}` must be a one-dimensional vector of probabilities, got shape "
            f"{array.shape}."
        )
    if size is not None and array.size != size:
        raise ValueError(f"`{name}` must have {size} entries, got {array.size}.")
    if np.any(array < 0):
        raise ValueError(
            f"`{name}` must not be negative, got {array.min()} at index "
            f"{int(array.argmin())}."
        )
    total = array.sum()
    if abs(total - 1) > SUM_TOLERANCE:
        raise ValueError(f"`{name}` must sum to one, got a sum of {float(total)!r}.")
    return array / total if total != 1 else array


SUM_TOLERANCE = 1e-8
"""By how much the sum of probabilities may differ from one before it is refused."""


def token_sequences(name: str, value: Any) -> list[np.ndarray]:
    """`value` as sequences of tokens numbered from zero. It may be one sequence, a list
    of several, or an array with one in each row."""
    # A text has millions of tokens, most of them plain numbers: check those fast.
    several = isinstance(value, Sequence) and any(
        type(piece) is not int and np.ndim(piece) for piece in value
    )
    pieces = [np.asarray(piece) for piece in value] if several else [np.asarray(value)]
    if len(pieces) == 1 and pieces[0].ndim == 2:
        pieces = list(pieces[0])
    for piece in pieces:
        if piece.ndim != 1 or (piece.size and piece.dtype.kind not in "iu"):
            raise ValueError(
                f"`{name}` must be a sequence of whole numbers or a list of such "
                f"sequences, got an array of shape {piece.shape} and type "
                f"{piece.dtype}."
            )
        if piece.size and piece.min() < 0:
            raise ValueError(f"`{name}` must not be negative, got {piece.min()}.")
    if not any(piece.size for piece in pieces):
        raise ValueError(f"`{name}` must contain tokens, got none.")
    # An empty sequence does not have an integer type.
    return [piece.astype(np.int64, copy=False) for piece in pieces]


def floating_parameters(name: str, params: Any) -> None:
    """Refuse parameters that cannot flow: none, not floating-point, or not finite."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    if not sum(np.size(leaf) for _, leaf in leaves):
        raise ValueError(f"`{name}` must contain at least one number, got {params!r}.")
    for path, leaf in leaves:
        where = f"{name}{path_name(path, prefix='.')}"
        if not isinstance(leaf, jax.Array | np.ndarray | np.floating | float):
            raise ValueError(
                f"`{where}` must be a floating array, got {type(leaf).__name__}."
            )
        values = np.asarray(leaf)
        if values.dtype.kind != "f":
            raise ValueError(
                f"`{where}` must be a floating array, got dtype {values.dtype}."
            )
        if not np.all(np.isfinite(values)):
            raise ValueError(f"`{where}` must be finite, got NaN or infinity.")


def parameters_of(kind: type, shapes: dict[str, tuple[int, ...]], params: Any) -> None:
    """Refuse `params` that are not a `kind` whose fields have these shapes."""
    if not isinstance(params, kind):
        raise ValueError(
            f"`params` must be {kind.__name__} (the problem's `init` makes them), got "
            f"{type(params).__name__}."
        )
    for name, shape in shapes.items():
        found = np.shape(getattr(params, name))
        if found != shape:
            raise ValueError(f"`params.{name}` must have shape {shape}, got {found}.")


def traced_result(name: str, function: Callable[[PyTree], Any], params: PyTree) -> Any:
    """The shapes and types of a user's function's result, if JAX can trace it."""
    try:
        return shape_of_result(function, params)
    except TypeError as error:  # JAX's tracing errors are TypeErrors
        what = str(error).partition("\n")[0]
        raise ValueError(
            f"`{name}` must be a function of the parameters that JAX can trace and "
            "that returns arrays of numbers, but it raised "
            f"{type(error).__name__}: {what}"
        ) from error


@jit
def shape_of_result(function: Callable[[PyTree], Any], params: PyTree) -> Any:
    """The shapes and types that `function` returns. Traced once and remembered."""
    return jax.eval_shape(function, jax.tree.map(_double, params))


def _double(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), np.float64)


def is_scalar(value: Any, kinds: str) -> bool:
    """Whether a result is a scalar of one of these NumPy kinds."""
    is_array = isinstance(value, jax.ShapeDtypeStruct)
    return is_array and value.shape == () and value.dtype.kind in kinds


def increasing_times(name: str, value: Any) -> np.ndarray:
    """`value` as times that increase strictly."""
    times = real_array(name, value)
    if times.ndim != 1 or times.size == 0:
        raise ValueError(
            f"`{name}` must be a one-dimensional list of times, got shape "
            f"{times.shape}."
        )
    gaps = np.diff(times)
    if np.any(gaps <= 0):
        at = int(np.argmax(gaps <= 0))
        kind = "repeated" if gaps[at] == 0 else "not sorted"
        raise ValueError(
            f"`{name}` must increase strictly, but is {kind} at index {at + 1}: "
            f"{times[at]:g}, {times[at + 1]:g}."
        )
    return times


def refuse_tracers(*values: object) -> None:
    """Refuse to run under jit, grad or vmap."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(values)):
        raise ValueError(
            "`gradflow.integrate` runs on the host and cannot be called inside "
            "`jax.jit`, `jax.grad` or `jax.vmap`: use `gradflow.integrate_ensemble` "
            "for many flows at once, or `diffrax.diffeqsolve` with a solver from "
            "`gradflow.solvers` where a solve must be traced."
        )


def promotion_notes(params: PyTree) -> tuple[str, ...]:
    """A note if some parameters are not in double precision."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    found = {
        str(np.asarray(leaf).dtype): path_name(where, prefix=".")
        for where, leaf in leaves
        if np.asarray(leaf).dtype != np.float64
    }
    return tuple(
        f"`params{where}` was promoted from {dtype} to float64"
        for dtype, where in found.items()
    )
