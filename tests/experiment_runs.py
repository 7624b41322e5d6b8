"""Run the experiments as CI does."""

import json
import subprocess
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def results(name, out):
    """The numbers that a script writes with `--quick`, after checking that all of its
    own claims are met."""
    done = subprocess.run(
        [sys.executable, EXPERIMENTS / f"{name}.py", "--quick", "--out", out],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "NOT MET" not in done.stdout, done.stdout
    assert (out / f"{name}.png").stat().st_size > 10_000
    assert (out / f"{name}.pdf").stat().st_size > 1_000
    found = json.loads((out / f"{name}.json").read_text())
    assert found["quick"] is True
    assert all(claim["holds"] for claim in found["claims"])
    return found["numbers"]
