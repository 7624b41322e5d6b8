"""Lists of contexts of one size, so that one compilation serves all of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

import gradflow
from gradflow.populations import AbstractDenseUnorderedPopulation


class PaddedContexts(AbstractDenseUnorderedPopulation):
    """A population as it is, with contexts of weight zero up to a given number."""

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
        # Each token once, and any law: at weight zero they count for nothing.
        self.log_multiplicities = np.pad(
            population.log_multiplicities, ((0, more), (0, 0))
        )
        self.targets = np.pad(population.targets, ((0, more), (0, 0)))

    def query_rows(self, table: Any) -> Any:
        one_hot = jax.nn.one_hot(self.queries, self.vocabulary, dtype=table.dtype)
        return one_hot @ jnp.asarray(table)
