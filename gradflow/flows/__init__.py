"""The results of integrating or training: flows, trainings and ensembles."""

from .._stepping._energy import Certificate as Certificate
from ._checks import check_flow as check_flow
from ._ensemble import Ensemble as Ensemble, EnsembleError as EnsembleError
from ._flow import Flow as Flow, FlowError as FlowError
