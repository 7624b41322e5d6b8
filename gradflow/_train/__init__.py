"""Training by discrete optimisers, on the clock of the flow."""

from ._train import train as train
