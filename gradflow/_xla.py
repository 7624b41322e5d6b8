"""What XLA is asked for before it starts."""

import os

SMALL_LOOP = 1_000_000
"""Bytes that one turn of a loop may touch for it to be compiled as one function."""


def compile_small_loops_whole() -> None:
    """Let XLA's CPU compiler turn a small loop into one function, where it would
    otherwise dispatch every operation of its body by itself.

    A step of a small flow is a hundred operations on a few hundred numbers: compiled
    whole, a solve of the reference instance takes 41 instead of 90 ms. A loop that
    touches less than a megabyte a turn gains nothing from the threads that it thereby
    does without. There is no option of one compilation for it, only this variable,
    which XLA reads when JAX first uses a device; after that it changes nothing. Whoever
    has `--xla_backend_extra_options` in XLA_FLAGS keeps what they have.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_backend_extra_options" not in flags:
        ours = (
            "--xla_backend_extra_options="
            f"xla_cpu_small_while_loop_byte_threshold={SMALL_LOOP}"
        )
        os.environ["XLA_FLAGS"] = f"{flags} {ours}".strip()
