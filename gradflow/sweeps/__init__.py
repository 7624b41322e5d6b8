"""Many points: grids, workers, and stores that an interrupted sweep continues."""

from ._draws import (
    integers as integers,
    log_uniform as log_uniform,
    random_points as random_points,
    uniform as uniform,
)
from ._local import LocalWorkers as LocalWorkers, SweepError as SweepError
from ._open import load_result as load_result, open_store as open_store
from ._status import Status as Status, status as status
from ._store import Failure as Failure, StoreError as StoreError
from ._sweep import Sweep as Sweep, sweep as sweep

__all__ = [
    "Failure",
    "LocalWorkers",
    "Status",
    "StoreError",
    "Sweep",
    "SweepError",
    "integers",
    "load_result",
    "log_uniform",
    "open_store",
    "random_points",
    "status",
    "sweep",
    "uniform",
]


def __dir__() -> list[str]:
    return __all__
