"""The landscape of any scalar loss: its critical points, the spectra of its Hessian,
and the linearised flow about a point or along a trajectory. Nothing here knows about
chains or attention."""

from ._critical_point import (
    CriticalPoint as CriticalPoint,
    CriticalPointError as CriticalPointError,
    find_critical_point as find_critical_point,
)
from ._linearised import linearised_flow as linearised_flow
from ._spectrum import (
    Spectrum as Spectrum,
    SpectrumError as SpectrumError,
    hessian_spectrum as hessian_spectrum,
)
from ._variation import (
    Trajectory as Trajectory,
    linearised_along as linearised_along,
)
