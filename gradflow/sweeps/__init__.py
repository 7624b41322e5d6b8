"""Many points: grids, workers, and a store that goes on where it stopped."""

from ._draws import (
    integers as integers,
    log_uniform as log_uniform,
    random_points as random_points,
    uniform as uniform,
)
from ._local import LocalWorkers as LocalWorkers, SweepError as SweepError
from ._store import (
    Failure as Failure,
    Store as Store,
    StoreError as StoreError,
    load_result as load_result,
    open_store as open_store,
)
from ._sweep import Sweep as Sweep, sweep as sweep
