"""The results of integrating and training: flows, training runs and ensembles."""

from ._certificate import Certificate as Certificate
from ._checks import (
    check_ensemble as check_ensemble,
    check_flow as check_flow,
    check_integrated as check_integrated,
)
from ._contents import Origin as Origin
from ._dense_output import DenseOutput as DenseOutput
from ._ensemble import Ensemble as Ensemble, EnsembleError as EnsembleError
from ._ensemble_contents import Origins as Origins, Records as Records
from ._evaluation import AT_ONCE as AT_ONCE
from ._flow import Flow as Flow, FlowError as FlowError
from ._load import trajectory_of as trajectory_of
from ._summary import loss_text as loss_text
from ._training import Training as Training
from ._trajectory import AbstractTrajectory as AbstractTrajectory
