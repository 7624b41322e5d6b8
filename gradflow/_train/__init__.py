"""Training by discrete optimisers, on the clock of the flow."""

from ._samplers import (
    AbstractSampler as AbstractSampler,
    SequenceSampler as SequenceSampler,
    TextSampler as TextSampler,
)
from ._train import train as train
