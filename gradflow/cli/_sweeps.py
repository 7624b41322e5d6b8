"""What the command line says of sweeps: settings, configurations, the state of a store.

Everything that is wrong is a ValueError, in a sentence.
"""

import importlib
import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..sweeps import Store, integers, log_uniform, random_points, uniform
from ..sweeps._grid import Grid, as_grid
from ..sweeps._runs import SETTINGS, Run


class Job(NamedTuple):
    """A sweep that was asked for."""

    task: Callable
    grid: Any
    options: dict[str, Any]
    """Of `gradflow.sweep`."""


def run_job(fixed: dict[str, Any], varied: Any, options: dict[str, Any]) -> Job:
    """A sweep over the options of `gradflow run`."""
    grid, task = as_grid(varied), Run(fixed)
    for name in grid.names:
        if name not in SETTINGS:
            allowed = ", ".join(SETTINGS)
            raise ValueError(f"a sweep of runs varies one of {allowed}, got {name!r}.")
    if fixed["matrix"] is not None and "stickiness" in grid.names:
        raise ValueError("a matrix gives the whole chain and excludes stickiness.")
    for point in _corners(grid):
        task.check(point)
    name = options.pop("name", None) or task.name(dict.fromkeys(grid.names))
    return Job(task, varied, {**options, "name": name})


def _corners(grid: Grid) -> list[dict[str, Any]]:
    """Points among which every value occurs; all, of a list of points."""
    points = grid.points()
    if grid.axes is None:
        return list(points)
    first = next(points)
    return [{**first, name: v} for name, axis in grid.axes.items() for v in axis]


#
# --set name=a,b,c
#


def settings(texts: list[str]) -> dict[str, list[Any]]:
    """The grid of what was set on the command line."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in SETTINGS:
            allowed = ", ".join(SETTINGS)
            raise ValueError(
                f"--set must be name=a,b,c with a name of {allowed}, got {text!r}."
            )
        if name in grid:
            raise ValueError(f"--set must name {name} once, got it twice.")
        kind = SETTINGS[name]
        try:
            grid[name] = [kind(value.strip()) for value in values.split(",")]
        except ValueError as error:
            raise ValueError(
                f"--set {name} must be a list of {kind.__name__} separated by commas, "
                f"got {values!r}."
            ) from error
    return grid


#
# A configuration
#

_OPTIONS = ("engine", "workers", "cpus", "gpus", "runtime_env", "retries", "version")


def read_config(path: Path, defaults: dict[str, Any]) -> Job:
    """The sweep that a TOML file describes; `defaults` are the options of a run."""
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
                f"'{path}' must have no other keys than {', '.join(sorted(known))}, "
                f"got {key!r}."
            )
    if not isinstance(config.get("store"), str):
        raise ValueError(
            f"'{path}' must name its `store`, a folder, got {config.get('store')!r}."
        )
    options = {k: config[k] for k in ("store", "name", *_OPTIONS) if k in config}
    grid = _grid(path, config)
    if "task" in config:
        if "run" in config:
            raise ValueError(f"'{path}' must have `task` or `run`, got both.")
        return Job(_task(path, config["task"]), grid, options)
    return run_job(_fixed(path, config.get("run", {}), defaults), grid, options)


def _fixed(path: Path, run: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    allowed = ["stationary", *SETTINGS]
    if not isinstance(run, dict) or not set(run) <= set(allowed):
        raise ValueError(
            f"`run` in '{path}' must be a table with keys of {', '.join(allowed)}, got "
            f"{run!r}."
        )
    return {**defaults, **run}


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
    if set(content) - {"seed"} != {"laws", "count"}:
        raise ValueError(
            f"`draws` in '{path}' must have `laws`, `count` and perhaps `seed`, got "
            f"{', '.join(content)}."
        )
    if not isinstance(content["laws"], dict):
        raise ValueError(f"`laws` in '{path}' must be a table.")
    laws = {name: _law(name, law) for name, law in content["laws"].items()}
    return random_points(laws, content["count"], seed=content.get("seed", 0))


def _logarithmic(first: float, last: float, count: int) -> list[float]:
    if not (first > 0 and last > 0):
        raise ValueError(f"its ends must be positive, got {first} and {last}")
    return np.geomspace(first, last, count).tolist()


_AXES: dict[str, Callable[..., Any]] = {
    "range": lambda *ends: list(range(*ends)),
    "linear": lambda first, last, count: np.linspace(first, last, count).tolist(),
    "logarithmic": _logarithmic,
}

_LAWS: dict[str, Callable[..., Any]] = {
    "uniform": uniform,
    "log_uniform": log_uniform,
    "integers": integers,
}


def _axis(name: str, values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return _called(f"grid.{name}", values, _AXES)


def _law(name: str, law: Any) -> Any:
    if not isinstance(law, dict):
        return law
    return _called(f"draws.laws.{name}", law, _LAWS)


def _called(name: str, table: dict[str, Any], known: Mapping[str, Callable]) -> Any:
    """`{ kind = [arguments] }`, called."""
    kinds = ", ".join(f"{{ {kind} = […] }}" for kind in known)
    if len(table) != 1 or next(iter(table)) not in known:
        raise ValueError(f"`{name}` must be a list or one of {kinds}, got {table!r}.")
    ((kind, arguments),) = table.items()
    function = known[kind]
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        names = ", ".join(map(str, inspect.signature(function).parameters.values()))
        raise ValueError(
            f"`{name}` must be {{ {kind} = [{names}] }}, got {arguments!r}."
        ) from error
    try:
        return function(*arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`{name}` must have other arguments than {arguments!r}: {error}."
        ) from error


def _task(path: Path, text: Any) -> Callable:
    """The function that `module:name` or `file.py:name` stands for; both are looked for
    beside the configuration first."""
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
    except Exception as error:  # whatever it does when it is imported
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"`task` in '{path}' cannot be imported: {what}.") from error
    return found


#
# The state of a store
#


def status(path: Path, *, check: bool, traceback: bool) -> tuple[str, bool]:
    """What is in a store, in words, and whether all of it is sound and there."""
    store = Store.at(path)
    grid = store.grid()
    # Not all of `grid`: a product of several grids has corners that nobody asked for.
    wanted = {store.key(point) for asked in store.grids() for point in asked.points()}
    there = store.present().keys()
    failures = store.failures()
    done = len(wanted & there)
    lines = [
        f"store            {path}",
        f"task             {store.task}, version {store.version}",
        f"grid             {grid}",
        f"results          {done:,} of {len(wanted):,} ({done / len(wanted):.0%})",
        f"failed           {len(failures):,}",
    ]
    for failure in failures:
        lines.append(f"  {failure}")
        if traceback:
            lines += [f"    {line}" for line in failure.traceback.splitlines()]
    if others := len(there - wanted):
        lines.append(f"older versions   {others:,} results")
    damaged = []
    if check:
        damaged = [what for key in sorted(there & wanted) if (what := store.check(key))]
        lines.append(f"damaged          {len(damaged):,}")
        lines += [f"  {what}" for what in damaged]
    return "\n".join(lines), done == len(wanted) and not damaged
