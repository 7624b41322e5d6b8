"""The TOML files of `gradflow sweep`. Every error in one is a ValueError."""

import importlib
import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..sweeps import integers, log_uniform, random_points, uniform
from ..sweeps._grid import Grid, Point, as_grid
from ..sweeps._runs import SETTINGS, Run


class Job(NamedTuple):
    """The arguments of a call of `gradflow.sweep`."""

    task: Callable
    grid: Any
    options: dict[str, Any]


def sweep_of_runs(fixed: Run, varied: Any, options: dict[str, Any]) -> Job:
    """A sweep over options of `gradflow run`, each value of which is checked."""
    grid = as_grid(varied)
    for name in grid.names:
        if name not in SETTINGS:
            raise ValueError(
                f"a sweep of runs can vary {', '.join(SETTINGS)}, got {name!r}."
            )
    for point in _corners(grid):
        fixed.at(point).prepare()
    name = options.get("name") or fixed.name(grid.names)
    return Job(fixed, varied, {**options, "name": name})


def _corners(grid: Grid) -> list[Point]:
    """Points in which every value of a product occurs, or all points of a list."""
    points = grid.points()
    if grid.axes is None:
        return list(points)
    first = next(points)
    return [{**first, name: v} for name, axis in grid.axes.items() for v in axis]


_OPTIONS = ("engine", "workers", "cpus", "gpus", "runtime_env", "retries", "version")


def read_config(path: Path) -> Job:
    """The sweep that a TOML file describes."""
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"'{path}' is not a TOML file: {error}.") from error
    known = {"task", "store", "name", "grid", "points", "draws", "run", *_OPTIONS}
    for key in config:
        if key not in known:
            raise ValueError(
                f"'{path}' may have the keys {', '.join(sorted(known))}, got {key!r}."
            )
    if not isinstance(config.get("store"), str):
        raise ValueError(
            f"`store` in '{path}' must be the path of a folder, got "
            f"{config.get('store')!r}."
        )
    options = {k: config[k] for k in ("store", "name", *_OPTIONS) if k in config}
    grid = _grid(path, config)
    if "task" in config:
        if "run" in config:
            raise ValueError(f"'{path}' must have `task` or `run`, got both.")
        return Job(_task(path, config["task"]), grid, options)
    return sweep_of_runs(_fixed(path, config.get("run", {})), grid, options)


def _fixed(path: Path, run: object) -> Run:
    allowed = ["stationary", "labels", *SETTINGS]
    if not isinstance(run, dict) or not set(run) <= set(allowed):
        raise ValueError(
            f"`run` in '{path}' must be a table with keys among {', '.join(allowed)}, "
            f"got {run!r}."
        )
    return Run(**run)


def _grid(path: Path, config: dict[str, Any]) -> Any:
    given = [key for key in ("grid", "points", "draws") if key in config]
    if len(given) != 1:
        raise ValueError(
            f"'{path}' must have one of `grid`, `points` and `draws`, got "
            f"{' and '.join(given) or 'none'}."
        )
    (kind,) = given
    content = config[kind]
    if kind == "points":
        return content
    if not isinstance(content, dict):
        raise ValueError(f"`{kind}` in '{path}' must be a table, got {content!r}.")
    if kind == "grid":
        return {name: _axis(name, values) for name, values in content.items()}
    return _draws(path, content)


def _draws(path: Path, content: dict[str, Any]) -> list[Point]:
    if set(content) - {"seed"} != {"distributions", "count"}:
        raise ValueError(
            f"`draws` in '{path}' must have `distributions`, `count` and optionally "
            f"`seed`, got {', '.join(content) or 'none'}."
        )
    if not isinstance(content["distributions"], dict):
        raise ValueError(
            f"`distributions` in '{path}' must be a table, got "
            f"{content['distributions']!r}."
        )
    distributions = {
        name: _distribution(name, description)
        for name, description in content["distributions"].items()
    }
    return random_points(distributions, content["count"], seed=content.get("seed", 0))


def _logarithmic(first: float, last: float, count: int) -> list[float]:
    if not (first > 0 and last > 0):
        raise ValueError(f"both ends must be positive, got {first} and {last}")
    return np.geomspace(first, last, count).tolist()


_AXES: dict[str, Callable[..., Any]] = {
    "range": lambda *ends: list(range(*ends)),
    "linear": lambda first, last, count: np.linspace(first, last, count).tolist(),
    "logarithmic": _logarithmic,
}

_DISTRIBUTIONS: dict[str, Callable[..., Any]] = {
    "uniform": uniform,
    "log_uniform": log_uniform,
    "integers": integers,
}


def _axis(name: str, values: object) -> object:
    if not isinstance(values, dict):
        return values
    return _called(f"grid.{name}", values, _AXES)


def _distribution(name: str, description: Any) -> Any:
    if not isinstance(description, dict):
        return description
    return _called(f"draws.distributions.{name}", description, _DISTRIBUTIONS)


def _called(name: str, table: dict[str, Any], known: Mapping[str, Callable]) -> Any:
    """The result of the call that `{ function = [arguments] }` describes."""
    kinds = ", ".join(f"{{ {kind} = […] }}" for kind in known)
    if len(table) != 1 or next(iter(table)) not in known:
        raise ValueError(f"`{name}` must be a list or one of {kinds}, got {table!r}.")
    ((kind, arguments),) = table.items()
    if not isinstance(arguments, list):
        raise ValueError(
            f"`{name}` must be {{ {kind} = […] }} with a list, got {arguments!r}."
        )
    function = known[kind]
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        names = ", ".join(inspect.signature(function).parameters)
        raise ValueError(
            f"`{name}` must be {{ {kind} = [{names}] }}, got {arguments!r}."
        ) from error
    try:
        return function(*arguments)
    except (TypeError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise ValueError(
            f"`{name}` cannot be {{ {kind} = {arguments!r} }}: {reason}."
        ) from error


def _task(path: Path, text: object) -> Callable:
    """The function that `module:name` or `file.py:name` stands for. Both are first
    looked for in the folder of the configuration."""
    module, colon, name = str(text).rpartition(":")
    if not colon or not module or not name:
        raise ValueError(
            f"`task` in '{path}' must be module:function or file.py:function, got "
            f"{text!r}."
        )
    folder = path.parent
    if module.endswith(".py"):
        folder, module = folder / Path(module).parent, Path(module).stem
    sys.path.insert(0, str(folder.resolve()))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing a module runs it, which may raise anything
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"`task` in '{path}' cannot be imported: {what}.") from error
    return found
