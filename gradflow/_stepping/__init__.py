"""The flow's equation, integrated by diffrax in segments. Knows no `Flow`."""

from ._ending import (
    RESULTS as RESULTS,
    ended_as_wanted as ended_as_wanted,
    ended_by as ended_by,
    how_it_ended as how_it_ended,
    result_name as result_name,
    result_of_name as result_of_name,
)
from ._energy import (
    EVALUATIONS_PER_PANEL as EVALUATIONS_PER_PANEL,
    EnergyAccount as EnergyAccount,
    plain_balance as plain_balance,
)
from ._equation import (
    Equation as Equation,
    Settings as Settings,
    states_at_once as states_at_once,
)
from ._events import Condition as Condition
from ._lapack_calls import factorised as factorised
from ._outcome import (
    Continuation as Continuation,
    Outcome as Outcome,
    Piece as Piece,
)
from ._record import Past as Past, Recorder as Recorder
from ._reintegrate import integrate_again as integrate_again, same_solver as same_solver
from ._segments import (
    SEGMENT_MEMORY as SEGMENT_MEMORY,
    SMALLEST_SEGMENT as SMALLEST_SEGMENT,
    Dense as Dense,
    State as State,
    advance as advance,
    plain_advance as plain_advance,
    plain_start as plain_start,
    start as start,
    strongly_typed as strongly_typed,
)
from ._snapshots import Snapshot as Snapshot, Watch as Watch, fill_rows as fill_rows
from ._statistics import (
    Statistics as Statistics,
    counted_work as counted_work,
    versions as versions,
)
from ._whole_flow import (
    Common as Common,
    Members as Members,
    WholeFlow as WholeFlow,
    some_flows_large as some_flows_large,
    some_flows_small as some_flows_small,
)
