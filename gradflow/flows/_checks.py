"""Checks of arguments that must be results of this room."""

from typing import Any

from ._flow import Flow


def check_flow(value: Any, name: str = "flow") -> Flow:
    """`value`, if it is a flow or a training run."""
    if not isinstance(value, Flow):
        raise ValueError(f"`{name}` must be a Flow, got {type(value).__name__}.")
    return value
