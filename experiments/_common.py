"""What every experiment does: options, the table of its numbers, its figure, its file.

An experiment has a `measure(quick) -> Measurement` and a `draw(measurement) -> Figure`,
and ends in `run(__doc__, measure, draw)`. Options: `--quick`, small enough for CI, and
`--out`, the directory of `<script>.json`, `<script>.png` and `<script>.pdf`.
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

REFERENCE_LAW = (0.75, 0.19, 0.05, 0.01)
REFERENCE_STICKINESS = 0.5
# Okabe and Ito's colours, which colour-blind readers can tell apart, without the yellow
# that is invisible on white.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#8C8C8C", "#000000"),
)


class Claim(NamedTuple):
    """A number that theory gives, and what was obtained."""

    what: str
    theory: float
    obtained: float
    within: float
    """How far apart they may be: relative to theory, or absolute where that is zero."""

    @property
    def error(self) -> float:
        scale = abs(self.theory) if self.theory else 1.0
        return abs(self.obtained - self.theory) / scale

    @property
    def holds(self) -> bool:
        return bool(self.error <= self.within)


class Measurement(NamedTuple):
    """What an experiment found."""

    claims: list[Claim]
    numbers: dict[str, Any]
    """All that was measured: numbers, lists and arrays, for the file."""
    data: Any = None
    """For the figure only."""
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
    """Of log y over log x, by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def run(
    doc: str | None,
    measure: Callable[..., Measurement],
    draw: Callable[[Measurement], Figure],
    *,
    keeps: bool = False,
) -> None:
    """With `keeps`, `measure` is also told the output directory: it keeps flows there
    that take long."""
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
    # The numbers first: a figure that fails must not lose them.
    write(options.out / f"{name}.json", options.quick, found)
    figure = draw(found)
    for suffix in ("png", "pdf"):
        figure.savefig(options.out / f"{name}.{suffix}", dpi=150)
    print(f"figure: {options.out / name}.png, .pdf; numbers: {options.out / name}.json")


def write(path: Path, quick: bool, found: Measurement) -> None:
    """Whole or not at all."""
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
