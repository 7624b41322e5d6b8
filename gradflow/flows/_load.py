"""Reading a trajectory of either kind."""

from typing import Any

from . import _contents
from ._flow import Flow
from ._training import Training


def trajectory_of(contents: dict[str, Any], **options: Any) -> Flow | Training:
    """The flow or training run with these contents; see `Flow.from_contents`."""
    if _contents.kind_of(contents) == _contents.TRAINING:
        options.pop("solver", None)
        return Training.from_contents(contents, **options)
    return Flow.from_contents(contents, **options)
