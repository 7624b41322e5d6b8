"""Benchmarks run to the end and report what they promise. How long they take is not
tested."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "work_precision.py"
SOLVERS = ("auto", "LSODA", "CVODE dense", "fixed RK4")
LEAST_ERROR = 1e-6


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """The output and the file of a quick run on the flow that has a closed form."""
    out = tmp_path_factory.mktemp("work_precision")
    arguments = ["--quick", "--problem", "quadratic", "--budget", "5", "--out", out]
    run = subprocess.run(
        [sys.executable, SCRIPT, *arguments, "--solvers", *SOLVERS],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    for suffix in (".png", ".pdf"):
        assert (out / f"work_precision_quadratic{suffix}").stat().st_size > 1000
    return run.stdout, json.loads((out / "work_precision_quadratic.json").read_text())


def test_every_solver_has_rows_or_a_reason(outcome: tuple[str, dict]):
    printed, written = outcome
    named = {row["solver"] for row in written["rows"] + written["notes"]}
    assert named == set(SOLVERS)
    for row in written["rows"]:
        assert f"{row['error']:.1e}" in printed
        assert row["work"]["evaluations"] > 0
    for note in written["notes"]:
        assert f"{note['solver']}: {note['reason']}" in printed


def test_errors_fall_with_the_tolerance_and_reach_the_requested_one(
    outcome: tuple[str, dict],
):
    _, written = outcome
    gave_up = {note["solver"] for note in written["notes"]}
    for solver in set(SOLVERS) - gave_up:
        errors = [r["error"] for r in written["rows"] if r["solver"] == solver]
        assert errors[-1] <= LEAST_ERROR < errors[0]
    tolerant = [r for r in written["rows"] if r["setting"].startswith("rtol")]
    for row in tolerant:
        assert row["error"] <= 100 * float(row["setting"].removeprefix("rtol "))
    assert {"auto", "fixed RK4"}.isdisjoint(gave_up)


def test_the_reference_solution_says_how_well_two_methods_agree(
    outcome: tuple[str, dict],
):
    printed, written = outcome
    (reference,) = written["reference"]
    assert reference in printed
    agreement = float(reference.partition("agree within ")[2].split()[0])
    assert agreement < 1e-10
