"""Many flows of one kind, in one compiled loop."""

from ._integrate_ensemble import integrate_ensemble as integrate_ensemble
from ._members import stack as stack
