"""`gradflow run` as a task: the flow of its options, of which a point replaces some."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import solvers
from .._core import checks
from .._integrate._integrate import integrate
from ..chains import MarkovChain
from ..flows._flow import Flow
from ..models import OneLayerTransformer
from ..populations import FiniteContext, InfiniteContext
from ..problems._problem import Problem
from ._grid import Value

SETTINGS: dict[str, type] = {
    "stickiness": float,
    "context": int,
    "width": int,
    "head_width": int,
    "scale": float,
    "seed": int,
    "horizon": float,
    "rtol": float,
    "atol": float,
    "solver": str,
    "step": float,
}
"""The options that may vary from point to point, and their types."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The flow of a one-layer Transformer on a Markov chain, some options fixed."""

    options: dict[str, Any]
    """`stationary`, `matrix` and those of SETTINGS; None for what has no value."""

    def name(self, varied: Mapping[str, Any]) -> str:
        """The name of the task: all that is fixed."""
        words = ["gradflow run"]
        for name, value in sorted(self.options.items()):
            if value is None or name in varied:
                continue
            if name == "matrix":
                value = hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:16]
            elif name == "stationary":
                value = ",".join(map(str, value))
            words.append(f"--{name.replace('_', '-')} {value}")
        return " ".join(words)

    def check(self, point: Mapping[str, Value]) -> None:
        """Refuse a point that has no flow, before any is computed."""
        options = {**self.options, **point}
        _problem(options).init(options["seed"], options["scale"])
        for name in ("horizon", "rtol"):
            checks.positive_number(name, options[name])
        if options["atol"] is not None:
            checks.positive_number("atol", options["atol"], zero_allowed=True)
        solver = solvers.resolve(options["solver"]).name
        if options["step"] is not None:
            checks.positive_number("step", options["step"])
            if solver not in solvers.FIXED_STEP:
                fixed = " and ".join(solvers.FIXED_STEP)
                raise ValueError(f"`step` must go with {fixed}, got {solver}.")

    def __call__(self, point: Mapping[str, Value]) -> Flow:
        options = {**self.options, **point}
        problem = _problem(options)
        return integrate(
            problem,
            problem.init(options["seed"], options["scale"]),
            options["horizon"],
            rtol=options["rtol"],
            atol=options["atol"],
            solver=options["solver"],
            step=options["step"],
        )


def _problem(options: Mapping[str, Any]) -> Problem:
    if options["matrix"] is not None:
        chain = MarkovChain(options["matrix"])
    else:
        chain = MarkovChain.sticky(options["stationary"], options["stickiness"])
    population = (
        InfiniteContext(chain)
        if options["context"] is None
        else FiniteContext(chain, options["context"])
    )
    model = OneLayerTransformer(chain.size, options["width"], options["head_width"])
    return Problem(model, population)
