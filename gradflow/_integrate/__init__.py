"""The verbs `integrate`, `resume` and `integrate_ensemble`."""

from .._stepping import same_solver as same_solver
from ._ensemble import integrate_ensemble as integrate_ensemble
from ._integrate import integrate as integrate
from ._members import stack as stack
from ._resume import resume as resume
