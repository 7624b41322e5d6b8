"""The results of integrating and training: flows, training runs and ensembles."""

from ._along import AT_ONCE as AT_ONCE
from ._certificate import Certificate as Certificate
from ._checks import (
    check_ensemble as check_ensemble,
    check_flow as check_flow,
    check_integrated as check_integrated,
)
from ._dense import DenseOutput as DenseOutput
from ._ensemble import Ensemble as Ensemble, EnsembleError as EnsembleError
from ._ensemble_file import Origins as Origins, Records as Records
from ._file import Origin as Origin
from ._flow import Flow as Flow, FlowError as FlowError
from ._load import trajectory_of as trajectory_of
from ._summary import loss_text as loss_text
from ._training import Training as Training
from ._trajectory import AbstractTrajectory as AbstractTrajectory
