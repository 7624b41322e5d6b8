"""Checks of arguments that must be results of this room."""

from typing import Any

from ._ensemble import Ensemble
from ._flow import Flow
from ._training import Training


def check_flow(value: Any, name: str = "flow") -> Flow | Training:
    """`value`, if it is a flow or a training run."""
    if not isinstance(value, Flow | Training):
        raise ValueError(f"`{name}` must be a Flow, got {type(value).__name__}.")
    return value


def check_integrated(value: Any, name: str = "flow") -> Flow:
    """`value`, if it is a flow that was integrated."""
    flow = check_flow(value, name)
    if isinstance(flow, Training):
        raise ValueError(
            f"`{name}` must be a Flow, got a training run. A training run cannot be "
            "re-integrated: it does not solve the flow's ODE. `gradflow.compare` "
            "compares it with a flow."
        )
    return flow


def check_ensemble(value: Any, name: str = "ensemble") -> Ensemble:
    """`value`, if it is an ensemble."""
    if not isinstance(value, Ensemble):
        raise ValueError(f"`{name}` must be an Ensemble, got {type(value).__name__}.")
    return value
