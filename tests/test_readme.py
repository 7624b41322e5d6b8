"""What the README shows is what runs."""

import re
import sys
from pathlib import Path

import diffrax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow.sweeps._grid import as_grid

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"\d+\.?\d*(?:e[+-]?\d+)?")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_example_is_the_quickstart():
    example = blocks("python")[0]
    assert example == (ROOT / "experiments" / "quickstart.py").read_text()


def test_the_examples_output_is_real(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "quickstart"}
    exec(compile(blocks("python")[0], "README.md", "exec"), namespace)
    namespace["main"]()
    shown, printed = (
        blocks("text")[0].splitlines(),
        capsys.readouterr().out.splitlines(),
    )
    assert (tmp_path / "out" / "quickstart.png").stat().st_size > 20_000
    assert [line[:17] for line in shown] == [line[:17] for line in printed]
    # Digits of the solution are the same everywhere; times and rounding are not.
    assert shown[:2] == printed[:2]

    def numbers(line):
        return [float(x.replace(",", "")) for x in re.findall(r"\d[\d.,e+-]*\d", line)]

    # Another order of rounding takes other steps, and fails at others.
    steps, expected = numbers(printed[3]), numbers(shown[3])
    np.testing.assert_allclose(steps, expected, rtol=0.25)
    np.testing.assert_allclose(steps[::2], expected[::2], rtol=0.05)


def test_the_tables_of_stages_and_saddles_are_real(reference):
    flow = gradflow.integrate(reference, reference.init(), 1e4, observables=())
    stages = gradflow.find_stages(flow)
    saddles = gradflow.find_saddles(flow, stages=stages)
    printed = [*str(stages).splitlines(), *str(saddles).splitlines()]
    shown = blocks("text")[1].splitlines()
    count = len(stages) + 1
    for ours, theirs in zip(shown[:count], printed[:count], strict=True):
        assert NUMBER.sub("#", ours) == NUMBER.sub("#", theirs)
        # What is read off at a step, such as a direction, has its last digit from
        # where the steps happened to be.
        values, expected = map(NUMBER.findall, (ours, theirs))
        np.testing.assert_allclose(
            np.array(values, float), np.array(expected, float), rtol=1e-3
        )
    # From ‖∇L‖ on a saddle's digits are rounding, or follow from it.
    assert [line[:27] for line in shown[count:]] == [
        line[:27] for line in printed[count : len(shown)]
    ]


@pytest.mark.parametrize("index", range(1, len(blocks("python"))))
def test_the_tour_runs(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chain = gradflow.MarkovChain.sticky([0.75, 0.19, 0.05, 0.01], 0.5)
    population = gradflow.InfiniteContext(chain)
    problem = gradflow.Problem(gradflow.OneLayerTransformer(4, 10), population)
    bowl = lambda w: jnp.sum(w**2)  # noqa: E731
    gradflow.integrate(bowl, jnp.ones(2), 1.0).save("own.npz")
    given = {
        "__name__": "tour",
        "gradflow": gradflow,
        "jnp": jnp,
        "diffrax": diffrax,
        "chain": chain,
        "population": population,
        "problem": problem,
        "params": problem.init(),
        "flow": gradflow.integrate(problem, problem.init(), 200.0),
        "my_loss": bowl,
        "P": np.full((3, 3), 1 / 3),
        "pi": [0.6, 0.3, 0.1],
        "G": np.eye(2, 4),
        "bigrams": np.ones((3, 3)),
        "A": jnp.eye(2),
        "b": jnp.ones(2),
        "w0": jnp.zeros(2),
        "ax": None,
        "loss": bowl,
        "start": jnp.array([0.3, -0.2]),
    }
    # The same walk on a shorter horizon: to t = 10⁴ is the demo's business.
    code = blocks("python")[index].replace("1e4", "150.0").replace("- 0.6)", "- 0.72)")
    exec(compile(code, "README.md", "exec"), given)


def test_the_configuration_of_a_sweep_is_one(tmp_path, monkeypatch):
    from gradflow.cli._config import read_config

    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "tasks.py").write_text("def rate(point): pass")
    (text,) = blocks("toml")
    grid, rest = text[: text.index("# [draws]")], text[text.index("# [draws]") :]
    options, _ = grid.split("[grid]")
    for config, count in ((grid, 18), (options + rest.replace("# ", ""), 100)):
        path = tmp_path / "sweep.toml"
        path.write_text(config)
        job = read_config(path)
        assert job.task.__name__ == "rate"
        assert len(as_grid(job.grid)) == count


def test_the_commands_exist():
    from gradflow.cli._parser import parser

    commands = [
        line.split("#")[0].split()
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("gradflow ")
    ]
    assert len(commands) == 8
    for _, *arguments in commands:
        assert callable(parser().parse_args(arguments).command)
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in ("demo", "test", "lint"))
