"""The frame of every experiment: options, a table of claims, a figure and a file.

An experiment defines `measure(quick) -> Measurement` and `draw(measurement) -> Figure`,
and ends with `run(__doc__, measure, draw)`. Its options are `--quick`, which makes it
small enough for CI, and `--out`, the directory for `<script>.json`, `<script>.png` and
`<script>.pdf`.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

import gradflow
from gradflow.plotting import COLOURS as COLOURS

REFERENCE_LAW = (0.75, 0.19, 0.05, 0.01)
REFERENCE_STICKINESS = 0.5


class Claim(NamedTuple):
    """A number that theory predicts, and the number obtained."""

    what: str
    theory: float
    obtained: float
    within: float
    """The largest allowed difference, relative to theory; absolute if theory says 0."""

    @property
    def error(self) -> float:
        scale = abs(self.theory) if self.theory else 1.0
        return abs(self.obtained - self.theory) / scale

    @property
    def holds(self) -> bool:
        return bool(self.error <= self.within)


class Measurement(NamedTuple):
    """The results of an experiment."""

    claims: list[Claim]
    numbers: dict[str, Any]
    """Everything that was measured: numbers, lists and arrays, for the JSON file."""
    data: Any = None
    """Data for the figure only."""
    text: str = ""
    """Printed before the table."""


def reference_problem(width: int = 10) -> gradflow.Problem:
    """The reference instance of theory.md, n = 280 at width 10."""
    return sticky_problem(REFERENCE_LAW, REFERENCE_STICKINESS, width)


def sticky_problem(law: Any, stickiness: float, width: int = 10) -> gradflow.Problem:
    return chain_problem(gradflow.MarkovChain.sticky(law, stickiness), width)


def chain_problem(chain: gradflow.MarkovChain, width: int = 10) -> gradflow.Problem:
    model = gradflow.OneLayerTransformer(vocabulary=chain.size, width=width)
    return gradflow.Problem(model, gradflow.InfiniteContext(chain))


def slope(x: Any, y: Any) -> float:
    """The slope of log y over log x, by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def run(
    doc: str | None,
    measure: Callable[..., Measurement],
    draw: Callable[[Measurement], Figure],
    *,
    keeps: bool = False,
) -> None:
    """Run an experiment from the command line. With `keeps`, `measure` is also given
    the output directory, where it keeps flows that take long to compute."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small enough for CI")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    name = Path(sys.argv[0]).stem
    options.out.mkdir(parents=True, exist_ok=True)

    found = measure(options.quick, options.out) if keeps else measure(options.quick)
    if found.text:
        print(found.text)
    width = max((len(c.what) for c in found.claims), default=0)
    print(f"{'':{width}}  {'theory':>12}  {'obtained':>12}  {'error':>8}  within")
    for c in found.claims:
        verdict = "" if c.holds else "   NOT MET"
        print(
            f"{c.what:{width}}  {c.theory:>12.6g}  {c.obtained:>12.6g}  "
            f"{c.error:>8.1e}  {c.within:g}{verdict}"
        )
    # Write the numbers first, so that they survive a figure that fails.
    write(options.out / f"{name}.json", options.quick, found)
    figure = draw(found)
    for suffix in ("png", "pdf"):
        figure.savefig(options.out / f"{name}.{suffix}", dpi=150)
    print(f"figure: {options.out / name}.png, .pdf; numbers: {options.out / name}.json")


def write(path: Path, quick: bool, found: Measurement) -> None:
    """Write the JSON file, completely or not at all."""
    content = {
        "quick": quick,
        "claims": [{**c._asdict(), "holds": c.holds} for c in found.claims],
        "numbers": found.numbers,
        "gradflow": gradflow.__version__,
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, default=_plain))
    partial.replace(path)


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist()
