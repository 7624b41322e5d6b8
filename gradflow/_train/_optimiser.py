"""The optimiser of a training run and its learning rates, which are its clock."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from .._core import checks


def is_optimiser(value: Any) -> bool:
    return callable(getattr(value, "init", None)) and callable(
        getattr(value, "update", None)
    )


def _is_number(value: Any) -> bool:
    is_array = isinstance(value, jax.Array | np.ndarray) and value.ndim == 0
    is_plain = isinstance(value, int | float | np.number)
    return (is_array or is_plain) and not isinstance(value, bool)


def resolved(
    optimiser: Any, learning_rate: Any, params: PyTree, steps: int
) -> tuple[str, Any, Float[np.ndarray, " steps"]]:
    """The optimiser's name, the optimiser or a function from a learning rate to it, and
    the learning rates."""
    import optax

    if _is_number(optimiser):
        if learning_rate is not None:
            raise ValueError(
                "`learning_rate` must be None where `optimiser` is the learning rate "
                f"of gradient descent, got {learning_rate!r} and {optimiser!r}."
            )
        rate = checks.positive_number("optimiser", optimiser)
        return "gradient descent", optax.sgd, np.full(steps, rate)
    if is_optimiser(optimiser):
        rates = (
            _injected_rates(optimiser, params, steps)
            if learning_rate is None
            else _rates(learning_rate, steps)
        )
        return _name_by_state(optimiser.init(params)), optimiser, rates
    if not callable(optimiser):
        raise ValueError(
            "`optimiser` must be a learning rate, an optax optimiser, or a function "
            "from a learning rate to an optax optimiser such as optax.adamw, got "
            f"{optimiser!r:.60}."
        )
    if learning_rate is None:
        raise ValueError(
            "`learning_rate` must be given if `optimiser` is a function of it, such as "
            "optax.adamw."
        )
    rates = _rates(learning_rate, steps)
    wanted = "`optimiser` must map a learning rate to an optax optimiser"
    try:
        made: Any = optimiser(float(rates[0]))
    except Exception as error:
        raise ValueError(f"{wanted}, but it failed: {error}") from error
    if not is_optimiser(made):
        raise ValueError(f"{wanted}, but it returned {made!r:.60}.")
    named = getattr(optimiser, "func", optimiser)  # of a functools.partial
    name = getattr(named, "__name__", type(named).__name__)
    return name.replace("<lambda>", _name_by_state(made.init(params))), optimiser, rates


def _rates(learning_rate: Any, steps: int) -> Float[np.ndarray, " steps"]:
    if not callable(learning_rate):
        return np.full(steps, checks.positive_number("learning_rate", learning_rate))
    try:
        rates = jax.lax.map(learning_rate, jnp.arange(steps), batch_size=1024)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`learning_rate` must be a number or a schedule (a function of the step), "
            f"but calling it with the steps failed: {error}"
        ) from error
    return _refuse_rates("learning_rate", np.asarray(rates), steps)


def _refuse_rates(name: str, rates: np.ndarray, steps: int) -> np.ndarray:
    if rates.shape != (steps,) or rates.dtype.kind not in "fiu":
        raise ValueError(
            f"`{name}` must give one number for each step, got shape "
            f"{rates.shape[1:]} and type {rates.dtype}."
        )
    wrong = np.flatnonzero(~(np.isfinite(rates) & (rates > 0)))
    if wrong.size:
        raise ValueError(
            f"`{name}` must be positive at every step, got {rates[wrong[0]]:g} at step "
            f"{wrong[0]:,} of {steps:,}."
        )
    return rates.astype(float)


def _injected_rates(
    optimiser: Any, params: PyTree, steps: int
) -> Float[np.ndarray, " steps"]:
    """The learning rates that `optax.inject_hyperparams` exposes, which depend on the
    step alone."""
    import optax

    still = jax.tree.map(jnp.zeros_like, params)
    made = optax.with_extra_args_support(optimiser)

    def rate(state: Any) -> Any:
        # A schedule has a state of the same name besides its value.
        is_value = lambda path, value: isinstance(value, jax.Array)  # noqa: E731
        return optax.tree_utils.tree_get(state, "learning_rate", filtering=is_value)

    unknown = ValueError(
        "`learning_rate` must be given: time is the sum of the learning rates, and "
        "`optimiser` does not expose its learning rate. Pass `optimiser=optax.sgd, "
        "learning_rate=0.1` rather than `optax.sgd(0.1)`, or both."
    )
    state = made.init(params)
    if rate(state) is None:
        raise unknown

    def step(state: Any, _: Any) -> tuple[Any, Any]:
        _, state = made.update(still, state, params)
        return state, jnp.asarray(rate(state), jnp.float64)

    try:
        rates = jax.jit(lambda s: jax.lax.scan(step, s, length=steps)[1])(state)
    except TypeError:  # a line search needs the loss, and has no rate before
        raise unknown from None
    return _refuse_rates("optimiser", np.asarray(rates), steps)


def _name_by_state(state: Any) -> str:
    """A name for an optimiser that has none, from its states, such as ScaleByAdam."""

    def names(node: Any) -> Iterable[str]:
        kind = type(node).__name__
        if kind.endswith("State"):
            yield kind.removesuffix("State")
        for child in node if isinstance(node, tuple) else ():
            yield from names(child)

    known = [name for name in names(state) if name != "Empty"]
    return f"optax ({', '.join(known)})" if known else "optax"
