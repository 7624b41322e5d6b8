"""Workers on a Ray cluster."""

import importlib.util
import os
import subprocess
import sys

import pytest
import sweep_tasks
from sweep_tasks import GRID, contents

from gradflow import sweep

RAY = """
import sys
import gradflow, sweep_tasks
if __name__ == "__main__":
    def by_value(point):
        return {"y": point["a"] + 0.5}
    grid = {"a": [1, 2, 3], "b": [1, 2]}
    options = {"engine": "ray", "workers": 2}
    import ray
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    report = gradflow.sweep(sweep_tasks.product, grid, store=sys.argv[1], **options)
    assert report.computed == 6, report
    report = gradflow.sweep(by_value, {"a": [1]}, store=sys.argv[2], **options)
    assert report.open().y.values.tolist() == [1.5]
    report = gradflow.sweep(
        sweep_tasks.cursed, {"a": [4, 5]}, store=sys.argv[3], **options
    )
    assert report.computed == 1, report
    for failure in report.failures:
        print(failure)
    try:
        gradflow.sweep(by_value, {"a": [2]}, store=sys.argv[2], engine="ray", gpus=1)
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is an extra")
def test_ray_gives_the_same_store(tmp_path, log, workers):
    script = tmp_path / "with_ray.py"
    script.write_text(RAY)
    run = subprocess.run(
        [sys.executable, script, *(tmp_path / name for name in "rvf")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HOME": str(tmp_path),  # where Ray puts the token of its cluster
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    )
    assert run.returncode == 0, run.stderr
    sweep(sweep_tasks.product, GRID, store=tmp_path / "l", engine=workers)
    assert contents(tmp_path / "r") == contents(tmp_path / "l")
    assert "a = 4: RuntimeError: four is too many" in run.stdout
    assert "`gpus` must be at most the 0 of the Ray cluster, got 1" in run.stdout
