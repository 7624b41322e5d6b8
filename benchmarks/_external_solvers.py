"""Solvers from other libraries, each called in the fastest way we found.

They run on the host and call compiled JAX functions. Measured at n = 280, where the
vector field takes 10 µs in a compiled loop:

- With JAX's asynchronous dispatch off, a call takes 42 µs instead of 130 µs.
- A NumPy array is passed directly to the jitted function. `device_put` (75 µs more),
  DLPack (100 µs more) and the ahead-of-time executable (2 µs more) are all slower.
- `np.asarray` of the result does not copy.
"""

import dataclasses
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _contestants import ATOL, Absent, Contestant, Deadline, Factory, GaveUp, Work
from _problems import Flow, VectorField
from scipy import integrate

from gradflow._core.compiled import compiled

LARGEST_DENSE = 6000
"""The largest state for which we form n×n matrices."""
PLENTY = 10**9
RK4_ALPHAS = tuple(2.5 / 2**k for k in range(8))
EULER_ALPHAS = tuple(1.6 / 4**k for k in range(8))
"""Step sizes times λ_max. The methods are stable up to 2.785 and 2."""


def too_large(n: int) -> str:
    return f"a matrix of {n:,} × {n:,} numbers takes {8e-9 * n * n:.3g} GB"


class HostFunctions:
    """The compiled vector field, its Jacobian and its Jacobian-vector products, as
    functions of NumPy arrays that count their calls and keep to a deadline."""

    def __init__(self, flow: Flow):
        field = flow.field
        self.size = flow.size
        self.deadline = Deadline()
        self.evaluations = self.jacobians = self.products = 0
        # Wrapped in functions: jit hashes its argument, and a module holds arrays.
        self._field = jax.jit(lambda y: field(y))
        self._columns = jax.jit(lambda y: field.jacobian_columns(y))
        self._symmetric = flow.symmetric
        self._product = jax.jit(lambda y, v: field.product(y, v))
        y = np.zeros(self.size)
        self._first_calls = {
            "field": lambda: self._field(y),
            "jacobian": lambda: self._columns(y),
            "product": lambda: self._product(y, y),
        }
        self._seconds: dict[str, float] = {}

    def compile_seconds(self, *names: str) -> float:
        """The time to compile these functions, which several solvers share."""
        for name in set(names) - set(self._seconds):
            began = time.perf_counter()
            jax.block_until_ready(self._first_calls[name]())
            self._seconds[name] = time.perf_counter() - began
        return sum(self._seconds[name] for name in names)

    def field(self, t: float, y: np.ndarray) -> np.ndarray:
        self.deadline.check()
        self.evaluations += 1
        return np.asarray(self._field(y))

    def jacobian(self, t: float, y: np.ndarray) -> np.ndarray:
        columns = self.jacobian_columns(t, y)
        return columns if self._symmetric else columns.T

    def jacobian_columns(self, t: float, y: np.ndarray) -> np.ndarray:
        self.deadline.check()
        self.jacobians += 1
        return np.asarray(self._columns(y))

    def product(self, y: np.ndarray, v: np.ndarray) -> np.ndarray:
        self.deadline.check()
        self.products += 1
        return np.asarray(self._product(y, v))

    def reset(self) -> None:
        self.evaluations = self.jacobians = self.products = 0


class NumPyFunctions(HostFunctions):
    """The vector field in plain NumPy, as a SciPy user would write it."""

    def __init__(self, flow: Flow):
        super().__init__(flow)
        assert flow.in_numpy is not None
        self._plain = flow.in_numpy

    def field(self, t: float, y: np.ndarray) -> np.ndarray:
        self.deadline.check()
        self.evaluations += 1
        return self._plain(t, y)


Solve = Callable[[np.ndarray, float], tuple[np.ndarray, Work]]


@dataclasses.dataclass
class HostSolver(Contestant):
    """A solver that runs on the host and calls `functions`."""

    functions: HostFunctions = None  # pyright: ignore
    run: Solve = None  # pyright: ignore
    """(y0, rtol) → the states at the saved times, and the work as far as known."""

    def rehearse(self, y0: np.ndarray, setting: float, budget: float) -> Work:
        functions = self.functions
        functions.reset()
        functions.deadline.set(budget)
        try:
            _, work = self._attempt(y0, setting)
        finally:
            functions.deadline.lift()
        return dataclasses.replace(
            work,
            evaluations=functions.evaluations,
            products=functions.products + functions.size * functions.jacobians,
        )

    def solve(self, y0: np.ndarray, setting: float) -> np.ndarray:
        return self._attempt(y0, setting)[0]

    def _attempt(self, y0: np.ndarray, setting: float) -> tuple[np.ndarray, Work]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ys, work = self.run(y0, setting)
        if not np.all(np.isfinite(ys)):
            raise GaveUp("the solution is not finite")
        return ys, work


def scipy_ivp(method: Any, flow: Flow, functions: HostFunctions, dense: bool) -> Solve:
    """`solve_ivp` with one of its methods, or a class with the same interface."""
    ts = flow.ts
    solve_ivp: Any = integrate.solve_ivp
    jacobian = {"jac": functions.jacobian} if dense else {}

    class Counting(method):
        steps = 0

        def step(self) -> Any:
            Counting.steps += 1
            return super().step()

    def run(y0: np.ndarray, rtol: float) -> tuple[np.ndarray, Work]:
        Counting.steps = 0
        solution = solve_ivp(
            functions.field,
            (0.0, ts[-1]),
            y0,
            method=Counting,
            t_eval=ts,
            rtol=rtol,
            atol=ATOL * rtol,
            **jacobian,
        )
        if not solution.success:
            raise GaveUp(solution.message)
        return solution.y.T, Work(Counting.steps, factorisations=int(solution.nlu))

    return run


def odeint(flow: Flow, functions: HostFunctions) -> Solve:
    """LSODA through `odeint`, which loops over steps in compiled code and is therefore
    faster than `solve_ivp`."""
    ts = np.concatenate([[0.0], flow.ts])

    def run(y0: np.ndarray, rtol: float) -> tuple[np.ndarray, Work]:
        ys, info = integrate.odeint(
            functions.field,
            y0,
            ts,
            Dfun=functions.jacobian_columns,
            col_deriv=True,
            rtol=rtol,
            atol=ATOL * rtol,
            mxstep=PLENTY,
            tfirst=True,
            full_output=True,
        )
        if info["message"] != "Integration successful.":
            raise GaveUp(info["message"])
        jacobians = int(info["nje"][-1])
        return ys[1:], Work(int(info["nst"][-1]), factorisations=jacobians)

    return run


def cvode(flow: Flow, functions: HostFunctions, linsolver: str) -> Solve:
    """SUNDIALS' CVODE (BDF of order up to 5). It does not report its number of steps;
    we count one factorisation for every Jacobian."""
    from sksundae.cvode import CVODE, CVODEJacTimes  # pyright: ignore[reportMissingImports]

    ts = np.concatenate([[0.0], flow.ts])

    def field(t: float, y: np.ndarray, out: np.ndarray) -> None:
        out[:] = functions.field(t, y)

    def jacobian(t: float, y: np.ndarray, f: np.ndarray, out: np.ndarray) -> None:
        out[:] = functions.jacobian(t, y)

    def times(
        t: float, y: np.ndarray, f: np.ndarray, v: np.ndarray, out: np.ndarray
    ) -> None:
        out[:] = functions.product(y, v)

    if linsolver == "gmres":
        options: dict[str, Any] = {"jactimes": CVODEJacTimes(None, times)}
    else:
        options = {"jacfn": jacobian}

    def run(y0: np.ndarray, rtol: float) -> tuple[np.ndarray, Work]:
        solver = CVODE(
            field,
            rtol=rtol,
            atol=ATOL * rtol,
            linsolver=linsolver,
            max_num_steps=PLENTY,
            **options,
        )
        solution: Any = solver.solve(ts, y0)
        if not solution.success:
            raise GaveUp(solution.message)
        factorisations = None if linsolver == "gmres" else int(solution.njev)
        return solution.y[1:], Work(factorisations=factorisations)

    return run


@dataclasses.dataclass
class FixedStep(Contestant):
    """The classical Runge-Kutta method or Euler's method with the constant step
    α/λ_max, compiled, as in the literature. Each interval between two saved times is
    divided into equal steps of at most that length."""

    flow: Flow = None  # pyright: ignore
    stages: int = 4
    stiffness: float = 1.0

    def __post_init__(self) -> None:
        self.field = self.flow.field
        self.ts = np.concatenate([[0.0], self.flow.ts])
        began = time.perf_counter()
        arguments = self._arguments(self.flow.start(0), self.settings[0])
        lowered: Any = _fixed_steps
        self.executable = lowered.lower(self.field, *arguments, self.stages).compile()
        self.compile_seconds = time.perf_counter() - began

    def _arguments(self, y0: np.ndarray, setting: float) -> tuple[Any, ...]:
        lengths = np.diff(self.ts)
        counts = np.ceil(lengths * self.stiffness / setting).astype(int)
        return tuple(map(jnp.asarray, (y0, lengths / counts, counts)))

    def solve(self, y0: np.ndarray, setting: float) -> np.ndarray:
        arguments = self._arguments(y0, setting)
        ys = np.asarray(self.executable(self.field, *arguments, self.stages))
        if not np.all(np.isfinite(ys)):
            raise GaveUp("the solution is not finite")
        return ys

    def rehearse(self, y0: np.ndarray, setting: float, budget: float) -> Work:
        arguments = self._arguments(y0, setting)
        steps = int(arguments[2].sum())
        # A running loop cannot be stopped, but its run time can be predicted.
        expected = steps * self._seconds_of_a_step(*arguments)
        if expected > budget:
            raise GaveUp(
                f"over the budget of {budget:g} s: it would take {expected:.0f} s"
            )
        return Work(steps, self.stages * steps, 0, 0)

    def _seconds_of_a_step(self, y0: Any, hs: Any, counts: Any) -> float:
        few = jnp.minimum(counts, 5)

        def run() -> float:
            began = time.perf_counter()
            ys = self.executable(self.field, y0, hs, few, self.stages)
            jax.block_until_ready(ys)
            return time.perf_counter() - began

        return min(run() for _ in range(3)) / int(few.sum())


@compiled
def _fixed_steps(field: VectorField, y0: Any, hs: Any, counts: Any, stages: int) -> Any:
    def step(y: Any, h: Any) -> Any:
        k1 = field(y)
        if stages == 1:
            return y + h * k1
        k2 = field(y + 0.5 * h * k1)
        k3 = field(y + 0.5 * h * k2)
        k4 = field(y + h * k3)
        return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def interval(y: Any, size: tuple[Any, Any]) -> tuple[Any, Any]:
        h, count = size
        y = jax.lax.fori_loop(0, count, lambda _, y: step(y, h), y)
        return y, y

    return jax.lax.scan(interval, y0, (hs, counts))[1]


def contestants(flow: Flow, stiffness: float) -> dict[str, Factory]:
    """The solvers from other libraries, by name."""
    functions = HostFunctions(flow)

    def host(name: str, solve: Solve, *compiled: str) -> Contestant:
        seconds = functions.compile_seconds("field", *compiled)
        return HostSolver(name, compile_seconds=seconds, functions=functions, run=solve)

    def dense(name: str, make: Callable[[], Solve]) -> Factory:
        if flow.size > LARGEST_DENSE:
            return lambda: Absent(name, too_large(flow.size))
        return lambda: host(name, make(), "jacobian")

    def ivp(method: Any, dense: bool) -> Solve:
        return scipy_ivp(method, flow, functions, dense)

    def in_numpy() -> Contestant | Absent:
        if flow.in_numpy is None:
            return Absent("RK45 NumPy", "no right-hand side written in NumPy")
        plain = NumPyFunctions(flow)
        solve = scipy_ivp(integrate.RK45, flow, plain, False)
        return HostSolver("RK45 NumPy", compile_seconds=0.0, functions=plain, run=solve)

    def stabilised() -> Contestant:
        from extensisq import SSV2stab  # pyright: ignore[reportMissingImports]

        return host("SSV2stab", ivp(SSV2stab, False))

    def fixed(name: str, stages: int, alphas: tuple[float, ...]) -> Factory:
        return lambda: FixedStep(
            name,
            knob="α",
            settings=alphas,
            flow=flow,
            stages=stages,
            stiffness=stiffness,
        )

    return {
        "LSODA": dense("LSODA", lambda: odeint(flow, functions)),
        "BDF": dense("BDF", lambda: ivp(integrate.BDF, True)),
        "Radau": dense("Radau", lambda: ivp(integrate.Radau, True)),
        "RK45 NumPy": in_numpy,
        "DOP853": lambda: host("DOP853", ivp(integrate.DOP853, False)),
        "CVODE dense": dense(
            "CVODE dense", lambda: cvode(flow, functions, "lapackdense")
        ),
        "CVODE GMRES": lambda: host(
            "CVODE GMRES", cvode(flow, functions, "gmres"), "product"
        ),
        "SSV2stab": stabilised,
        "fixed RK4": fixed("fixed RK4", 4, RK4_ALPHAS),
        "fixed Euler": fixed("fixed Euler", 1, EULER_ALPHAS),
    }
