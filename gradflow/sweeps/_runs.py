"""The flow that `gradflow run` integrates, for one run or as the task of a sweep."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from .._core import checks
from .._core.checks import Checked
from .._integrate import integrate
from ..chains import MarkovChain
from ..flows import Flow
from ..models import OneLayerParameters, OneLayerTransformer
from ..populations import FiniteContext, InfiniteContext
from ..problems import Problem
from ..solvers._internals import FIXED_STEP, resolve
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The flow of a one-layer Transformer on a Markov chain.

    The defaults are the reference instance of Focus and Dilution. As a task of `sweep`,
    a run replaces its options by the coordinates of a point.
    """

    stationary: Checked[Sequence[float] | None] = (0.75, 0.19, 0.05, 0.01)
    """The stationary distribution of a sticky chain."""
    stickiness: Checked[float | None] = 0.5
    matrix: Checked[np.ndarray | None] = None
    """The transition matrix of another chain; `stationary` and `stickiness` are then
    None."""
    labels: Checked[Sequence[str] | None] = None
    """A name for each token."""
    context: Checked[int | None] = None
    """The length of the contexts; None for infinite ones."""
    width: Checked[int] = 10
    head_width: Checked[int | None] = None
    scale: Checked[float] = 1e-3
    seed: Checked[int] = 0
    horizon: Checked[float] = 1e4
    rtol: Checked[float] = 1e-8
    atol: Checked[float | None] = None
    solver: Checked[str] = "auto"
    step: Checked[float | None] = None

    def __call__(self, point: Mapping[str, Value]) -> Flow:
        return self.at(point).prepare().integrate()

    def at(self, point: Mapping[str, Value]) -> "Run":
        """The same run with the options that `point` names replaced."""
        return dataclasses.replace(self, **point)

    def name(self, varied: Sequence[str] = ()) -> str:
        """The command line of this run without the options in `varied`, by which a
        store recognises its task."""
        options = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in varied
        }
        for name in ("stationary", "labels"):
            if options[name] is not None:
                options[name] = ",".join(map(str, options[name]))
        if self.matrix is not None:
            digest = hashlib.sha256(np.asarray(self.chain().transition).tobytes())
            options["matrix"] = digest.hexdigest()[:16]
        words = (
            f"--{name.replace('_', '-')} {value}"
            for name, value in sorted(options.items())
            if value is not None
        )
        return " ".join(["gradflow run", *words])

    def chain(self) -> MarkovChain:
        if self.matrix is None:
            assert self.stickiness is not None  # only a matrix replaces it
            return MarkovChain.sticky(self.stationary, self.stickiness, self.labels)
        if self.stationary is not None or self.stickiness is not None:
            raise ValueError(
                "a matrix defines the whole chain: leave out `stationary` and "
                "`stickiness`."
            )
        return MarkovChain(self.matrix, self.labels)

    def prepare(self) -> "PreparedRun":
        """Check every option and build the problem and its start. An option that has no
        flow is refused here, before any work."""
        chain = self.chain()
        population = (
            InfiniteContext(chain)
            if self.context is None
            else FiniteContext(chain, checks.whole_number("context", self.context))
        )
        model = OneLayerTransformer(chain.size, self.width, self.head_width)
        problem = Problem(model, population)
        for name in ("horizon", "rtol"):
            checks.positive_number(name, getattr(self, name))
        if self.atol is not None:
            checks.positive_number("atol", self.atol, zero_allowed=True)
        solver = resolve(self.solver).name
        if self.step is not None:
            checks.positive_number("step", self.step)
            if solver not in FIXED_STEP:
                fixed = " or ".join(FIXED_STEP)
                raise ValueError(
                    f"`step` must be left out unless `solver` is {fixed}, got the "
                    f"solver {solver}."
                )
        return PreparedRun(self, problem, problem.init(self.seed, self.scale))


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedRun:
    """A run whose options have been checked: its problem and its start."""

    run: Run
    problem: Problem
    params: OneLayerParameters

    def integrate(self, *, progress: bool = False) -> Flow:
        run = self.run
        return integrate(
            self.problem,
            self.params,
            run.horizon,
            rtol=run.rtol,
            atol=run.atol,
            solver=run.solver,
            step=run.step,
            progress=progress,
        )
