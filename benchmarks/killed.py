"""Check that a large flow that is killed and restarted ends where it should.

The flow of the one-layer Transformer with width m, on a chain of d tokens whose
frequencies follow Zipf's law, is integrated once without interruption, and once in
processes that are killed (SIGKILL) at random moments and restarted from the same
checkpoint. The two trajectories should agree to within the solver's tolerance.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _timing import footer

import gradflow


def problem_of(vocabulary: int, width: int) -> gradflow.Problem:
    law = 1 / np.arange(2.0, vocabulary + 2)
    chain = gradflow.MarkovChain.random(law / law.sum(), seed=0)
    model = gradflow.OneLayerTransformer(vocabulary, width)
    return gradflow.Problem(model, gradflow.InfiniteContext(chain))


def integrate(options: Any, checkpoint: Path | None) -> gradflow.Flow:
    problem = problem_of(options.vocabulary, options.width)
    return gradflow.integrate(
        problem,
        problem.init(scale=options.scale),
        options.horizon,
        ts=np.linspace(0.0, options.horizon, 21),
        rtol=1e-6,
        observables=(),
        checkpoint=checkpoint,
        checkpoint_every=0.0,
    )


def killed_flow(options: Any, folder: Path) -> tuple[gradflow.Flow, int]:
    """The flow computed by processes that are killed, and the number of kills."""
    out, checkpoint = folder / "flow.npz", folder / "checkpoint"
    command = [sys.executable, __file__, "--child", str(folder)]
    for name in ("vocabulary", "width", "horizon", "scale"):
        command += [f"--{name}", str(getattr(options, name))]
    kills = 0
    while not out.exists():
        child = subprocess.Popen(command)
        before = checkpoint.stat().st_mtime if checkpoint.exists() else 0.0
        # Let each process make some progress first; otherwise this might never end.
        while kills < options.kills and child.poll() is None:
            if checkpoint.exists() and checkpoint.stat().st_mtime > before:
                time.sleep(random.uniform(0.0, options.patience))
                child.send_signal(signal.SIGKILL)
                break
            time.sleep(0.05)
        kills += child.wait() == -signal.SIGKILL
    return gradflow.Flow.load(out), kills


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--horizon", type=float, default=60.0)
    parser.add_argument("--scale", type=float, default=1e-2)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--patience", type=float, default=20.0, help="seconds")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        integrate(options, options.child / "checkpoint").save(
            options.child / "flow.npz"
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        flow, kills = killed_flow(options, Path(folder))
    whole = integrate(options, None)
    worst = max(
        float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
        for a, b in zip(
            jax.tree.leaves(flow.params), jax.tree.leaves(whole.params), strict=True
        )
    )
    size = sum(x.size for x in jax.tree.leaves(flow.start))
    print(
        f"n = {size:,}, t = {flow.ts[-1]:g}, {flow.stats['num_accepted_steps']} and "
        f"{whole.stats['num_accepted_steps']} steps, killed {kills} times: the "
        f"trajectories differ by {worst:.1e} of max|θ| (rtol {flow.settings.rtol:g})"
    )
    print(footer("gradflow", "jax", "jaxlib", "diffrax"))


if __name__ == "__main__":
    main()
