"""The name of a task, and its way to a worker."""

import functools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from ._worker import Shipped


def name_of(task: object, name: object) -> str:
    """The name by which a store recognises `task`: the user's `name`, or the module and
    name of the function. A task whose own name does not identify it is refused."""
    if not callable(task) or isinstance(task, type):
        kind = f"the class {task.__name__}" if isinstance(task, type) else _type(task)
        raise ValueError(f"`task` must be a function of a point, got {kind}.")
    if name is not None:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"`name` must be a non-empty string, got {name!r}.")
        return name
    if not isinstance(task, FunctionType):
        why = f"is a {_type(task)}, which has no name"
    elif task.__name__ == "<lambda>":
        why = "is a lambda, which has no name"
    elif task.__closure__:
        captured = ", ".join(f"`{v}`" for v in task.__code__.co_freevars)
        why = f"captures {captured}, which its name does not show"
    else:
        return f"{_module(task)}:{task.__qualname__}"
    raise ValueError(
        "`task` must be a function that a store can recognise by its name, but it "
        f"{why}: pass `name`, or make captured values coordinates of `grid`."
    )


def _type(task: object) -> str:
    return type(task).__name__


def _module(task: FunctionType) -> str:
    """The module of a task; for a script, the name that importing it would give."""
    module = task.__module__
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return module if file is None else Path(file).stem


def ship(task: Callable) -> Shipped:
    """`task` in a form that can be sent: a reference if workers can import it, a pickle
    otherwise. Raises if it cannot be pickled either."""
    module, name = getattr(task, "__module__", None), getattr(task, "__qualname__", "")
    if module not in (None, "__main__") and _found(module, name) is task:
        return ("reference", module, name)
    import cloudpickle

    try:
        return ("value", cloudpickle.dumps(task))
    except Exception as error:
        raise ValueError(
            "`task` must be a function that can be sent to another process, but "
            f"{_culprit(task)} cannot be pickled: {error}. Create that object inside "
            "the task, or define the task in a module that workers can import."
        ) from error


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _culprit(task: Callable) -> str:
    """The part of `task` that cannot be pickled, if it has a name."""
    import cloudpickle

    parts: dict[str, Any] = {}
    if isinstance(task, functools.partial):
        parts = {f"argument {i}": a for i, a in enumerate(task.args)} | task.keywords
    elif isinstance(task, FunctionType):
        names = task.__code__.co_names
        parts = {n: task.__globals__[n] for n in names if n in task.__globals__}
        cells = zip(task.__code__.co_freevars, task.__closure__ or (), strict=True)
        parts |= {n: cell.cell_contents for n, cell in cells}
    for name, part in parts.items():
        try:
            cloudpickle.dumps(part)
        except (TypeError, ValueError, AttributeError, pickle.PicklingError):
            return f"`{name}`, which it uses,"
    return "it"
