"""Pad lists of contexts to one size, so that they share one compilation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

import gradflow
from gradflow.populations import AbstractDenseUnorderedPopulation


class PaddedContexts(AbstractDenseUnorderedPopulation):
    """A population, padded with contexts of weight zero up to a given size."""

    chain: gradflow.MarkovChain
    weights: Float[np.ndarray, " contexts"]
    queries: Int[np.ndarray, " contexts"]
    log_multiplicities: Float[np.ndarray, "contexts d"]
    targets: Float[np.ndarray, "contexts d"]

    def __init__(self, population: AbstractDenseUnorderedPopulation, size: int):
        more = size - population.size
        self.chain = population.chain
        self.weights = np.pad(population.weights, (0, more))
        self.queries = np.pad(population.queries, (0, more))
        # Each token once, and arbitrary targets: contexts of weight zero do not count.
        self.log_multiplicities = np.pad(
            population.log_multiplicities, ((0, more), (0, 0))
        )
        self.targets = np.pad(population.targets, ((0, more), (0, 0)))

    def query_rows(self, table: Any) -> Any:
        one_hot = jax.nn.one_hot(self.queries, self.vocabulary, dtype=table.dtype)
        return one_hot @ jnp.asarray(table)
