"""Strict numerics for all tests: shapes and types are checked at run time, NumPy and
JAX arrays are not promoted silently, warnings are errors (pyproject.toml)."""

import os
import sys
from pathlib import Path

# What was compiled once is not compiled again, by another worker or a subprocess
# neither. With a bound on its size JAX locks the directory, as it must, since it does
# not write its files atomically.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    Path(__file__).parent.parent / ".pytest_cache" / "compiled"
)
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2**32)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
# Most of the tests' time goes into compiling what then runs for milliseconds. Solves
# have this level in any case (`gradflow._core.compiled`).
os.environ["XLA_FLAGS"] = (
    f"--xla_backend_optimization_level=1 {os.environ.get('XLA_FLAGS', '')}".strip()
)

import jax
import jaxtyping
import matplotlib
import pytest

matplotlib.use("Agg")

with jaxtyping.install_import_hook("gradflow", "beartype.beartype"):
    import gradflow

import numpy as np
import oracles

from gradflow._core.compiled import make_room_for_code

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def room_for_code():
    """Hundreds of compilations would crash a worker: here the tests' own code is
    dropped with the library's."""
    if make_room_for_code():
        jax.clear_caches()


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="session")
def reference_chain():
    return gradflow.MarkovChain.sticky(
        oracles.REFERENCE_LAW, oracles.REFERENCE_STICKINESS
    )


@pytest.fixture(scope="session")
def reference(reference_chain):
    """The reference instance of theory.md with m = k = 10 (n = 280)."""
    model = gradflow.OneLayerTransformer(4, 10)
    return gradflow.Problem(model, gradflow.InfiniteContext(reference_chain))


@pytest.fixture(scope="session")
def reference_flow(reference):
    """Through condensation and focus, at the default tolerances."""
    return gradflow.integrate(reference, reference.init(), 400.0)


@pytest.fixture
def weights():
    """The weights of a parameter module as NumPy arrays, in the oracles' order."""
    return lambda params: [np.asarray(getattr(params, n)) for n in oracles.SHAPES]
