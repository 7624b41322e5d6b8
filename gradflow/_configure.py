"""All that `import gradflow` does to a process: double precision and XLA's flags."""

import os

import jax

SMALL_LOOP = 1_000_000
"""Bytes that one iteration of a loop may touch to be compiled as one function."""


def configure() -> None:
    """Enable double precision and have XLA compile small loops whole."""
    # The flow is meaningless in single precision: squares of the initial scale, splits
    # of frequencies and conserved quantities drown in its rounding.
    jax.config.update("jax_enable_x64", True)
    _compile_small_loops_whole()


def _compile_small_loops_whole() -> None:
    """Let XLA's CPU compiler turn a small loop into one function, instead of
    dispatching every operation of its body by itself.

    A step of a small flow is a hundred operations on a few hundred numbers: compiled
    whole, a solve of the reference instance takes 41 instead of 90 ms (jaxlib 0.10.2).
    A loop that touches less than a megabyte per iteration gains nothing from the
    threads it thereby forgoes. No compiler option does this, only the environment
    variable, which XLA reads when JAX first uses a device; later changes have no
    effect. A user's own `--xla_backend_extra_options` in XLA_FLAGS is kept.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_backend_extra_options" not in flags:
        ours = (
            "--xla_backend_extra_options="
            f"xla_cpu_small_while_loop_byte_threshold={SMALL_LOOP}"
        )
        os.environ["XLA_FLAGS"] = f"{flags} {ours}".strip()


configure()
