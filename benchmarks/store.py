"""The cost of opening a store of 10,000 results, compared with one of 100.

Opening a store and reading its numbers should read no result file, and reading an array
at one point should read only that point's file. Each store is written as by a sweep and
then opened many times in this process, while the result files that are read are
counted.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _timing import duration, footer, stopwatch, table

import gradflow
from gradflow.sweeps import _result
from gradflow.sweeps._grid import as_grid
from gradflow.sweeps._store import Store

LENGTH = 500
"""The length of the array in each result, about that of a flow's `ts`."""


def build(path: Path, count: int) -> float:
    """Write a store of `count` results and return the seconds per result."""
    grid = as_grid({"a": range(count // 10), "b": range(10)})
    store = Store.for_sweep(path, "benchmark", 1, grid)
    store.create(grid)
    began = time.perf_counter()
    for point in grid.points():
        result = {"x": float(point["a"]), "y": np.full(LENGTH, float(point["b"]))}
        store.write(point, _result.encode(result, store.label(point)))
    return (time.perf_counter() - began) / count


def files_read(run: Callable[[], object]) -> int:
    """The number of result files that `run` reads."""
    original, count = _result.read, 0

    def counting(path: Path) -> bytes:
        nonlocal count
        count += 1
        return original(path)

    _result.read = counting
    try:
        run()
    finally:
        _result.read = original
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = {count: Path(folder) / str(count) for count in options.counts}
        writing = {count: build(path, count) for count, path in paths.items()}
        rows = []
        for name, use in USES.items():
            row: list[str] = [name]
            for path in paths.values():
                read = files_read(lambda path=path, use=use: use(path))
                rounds = options.rounds if read < 100 else 1
                seconds = min(
                    stopwatch(lambda path=path, use=use: use(path))
                    for _ in range(rounds)
                )
                row += [duration(seconds), f"{read:,}"]
            rows.append(tuple(row))
    head = [cell for n in options.counts for cell in (f"{n:,} results", "files read")]
    print(table(("", *head), rows))
    for count, seconds in writing.items():
        print(f"\nWriting, per result, of {count:,}: {duration(seconds)}", end="")
    print(footer("gradflow", "xarray", "numpy"))


def _without_index(path: Path) -> object:
    (path / "index.jsonl").unlink()
    return gradflow.open_store(path)


USES: dict[str, Callable[[Path], object]] = {
    "open": gradflow.open_store,
    "open, all numbers": lambda path: gradflow.open_store(path).x.values,
    "open, one array": lambda path: gradflow.open_store(path).y.isel(a=3, b=4).values,
    "open, all arrays": lambda path: gradflow.open_store(path).y.values,
    "open, index lost": _without_index,
}


if __name__ == "__main__":
    main()
