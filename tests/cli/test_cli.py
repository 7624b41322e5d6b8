import dataclasses
import functools
import io
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import gradflow
from gradflow import Flow, FlowError
from gradflow.cli import main
from gradflow.sweeps import _runs

# The shapes are those of test_plotting.py: one compilation serves both.
SMALL = (
    *("run", "--stationary", "0.6,0.2,0.1,0.1", "--stickiness", "0.3"),
    *("--width", "3", "--head-width", "2", "--scale", "0.01", "--seed", "3"),
    *("--horizon", "8", "--rtol", "1e-5", "--no-progress"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a small run wrote."""
    output = tmp_path_factory.mktemp("cli") / "new" / "folder"
    assert main([*SMALL, "--output", str(output)]) == 0
    return output


def assert_same_params(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


#
# gradflow run
#


def test_run_writes_what_was_asked_for(folder):
    flow = Flow.load(folder / "flow.npz")
    problem: Any = flow.problem
    chain = gradflow.MarkovChain.sticky([0.6, 0.2, 0.1, 0.1], 0.3)
    np.testing.assert_array_equal(problem.population.chain.transition, chain.transition)
    assert isinstance(problem.population, gradflow.InfiniteContext)
    assert problem.model.shapes["WQ"] == (3, 2)
    assert (flow.settings.t1, flow.settings.rtol) == (8.0, 1e-5)
    start = jax.tree.map(lambda leaf: leaf[0], flow.params)
    assert_same_params(start, problem.init(seed=3, scale=0.01))
    assert (folder / "overview.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in folder.iterdir()} == {"flow.npz", "overview.png"}


def test_run_prints_the_summary_and_where_it_wrote(tmp_path, capsys):
    assert main([*SMALL, "--output", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert str(Flow.load(tmp_path / "flow.npz")) in captured.out
    assert "conserved drift" in captured.out
    assert str(tmp_path / "flow.npz") in captured.out
    assert str(tmp_path / "overview.png") in captured.out
    assert "4 tokens, width 3, head width 2, context infinite" in captured.out
    assert captured.err == ""


def test_run_shows_its_progress(tmp_path, capsys):
    arguments = [a for a in SMALL if a != "--no-progress"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    assert "100%" in capsys.readouterr().err


def test_run_without_options_is_the_reference_instance(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run"]) == 130
    problem = asked["problem"]
    chain = gradflow.MarkovChain.sticky([0.75, 0.19, 0.05, 0.01], 0.5)
    np.testing.assert_array_equal(problem.population.chain.transition, chain.transition)
    assert isinstance(problem.population, gradflow.InfiniteContext)
    assert problem.model.shapes["WQ"] == (10, 10)
    assert_same_params(asked["params"], problem.init(seed=0, scale=1e-3))
    assert asked["t1"] == 1e4
    assert asked["rtol"] == 1e-8
    assert asked["atol"] is None
    assert asked["solver"] == "auto"
    assert asked["progress"] is True
    assert Path("out/run").is_dir()


def test_run_passes_its_other_options_on(asked, tmp_path):
    options = "--head-width 3 --context 5 --atol 1e-9 --solver dopri5 --no-progress"
    assert main(["run", *options.split(), "--output", str(tmp_path)]) == 130
    assert asked["problem"].model.shapes["WQ"] == (10, 3)
    assert asked["problem"].population.length == 5
    assert asked["atol"] == 1e-9
    assert asked["solver"] == "dopri5"
    assert asked["progress"] is False


def test_a_flow_that_breaks_off_is_kept(tmp_path, capsys, monkeypatch):
    def broken(*arguments, **options):
        flow = gradflow.integrate(*arguments, **options)
        stats = dataclasses.replace(flow.stats, reason="could not go on from t = 8")
        raise FlowError("for Python", dataclasses.replace(flow, stats=stats))

    monkeypatch.setattr(_runs, "integrate", broken)
    assert main([*SMALL, "--output", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "gradflow: the flow could not go on from t = 8. Everything computed before "
        f"that is in {tmp_path}.\n"
    )
    flow = Flow.load(tmp_path / "flow.npz")
    assert flow.stats.reason == "could not go on from t = 8"
    assert str(flow) in captured.out
    assert (tmp_path / "overview.png").exists()


def test_a_flow_too_short_for_a_figure_is_kept(tmp_path, capsys, monkeypatch):
    two_times = functools.partial(gradflow.integrate, ts=[0.0, 8.0])
    monkeypatch.setattr(_runs, "integrate", two_times)
    assert main([*SMALL, "--output", str(tmp_path)]) == 1
    assert "the figure could not be drawn: a figure over" in capsys.readouterr().err
    assert len(Flow.load(tmp_path / "flow.npz").ts) == 2
    assert not (tmp_path / "overview.png").exists()


def test_a_run_file_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    def full(flow, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Flow, "save", full)
    assert main([*SMALL, "--output", str(tmp_path)]) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_interrupt(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(_runs, "integrate", interrupted)
    assert main([*SMALL, "--output", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "gradflow: interrupted.\n"


#
# Bad input
#


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--stationary 0.5,x", "--stationary: must be numbers separated by commas"),
        ("--stationary 0.5,0.6", "`stationary` must sum to one"),
        ("--stationary 1,0", "`stationary` must be positive everywhere"),
        ("--stickiness 1", "`stickiness` must lie in"),
        ("--stickiness nan", "`stickiness` must be finite"),
        ("--stickiness much", "--stickiness: invalid float value: 'much'"),
        ("--matrix a.npy --stickiness 0.5", "--matrix .* excludes"),
        ("--matrix a.npy --stationary 0.5,0.5", "--matrix .* excludes"),
        ("--matrix a.txt", r"reads \.npy and \.csv files, got 'a\.txt'"),
        ("--width 0", "`width` must be a whole number of at least 1, got 0"),
        ("--width 1.5", "--width: invalid int value: '1.5'"),
        ("--head-width 0", "`head_width` must be"),
        ("--context 0", "`context` must be a whole number of at least 1"),
        ("--context 5000", "5000 with 4 tokens makes .* the limit is"),
        ("--scale -1", "`scale` must be a finite number, zero or more"),
        ("--scale inf", "`scale` must be a finite number, zero or more"),
        ("--seed -1", "`seed` must be a whole number of at least 0"),
        ("--seed 99999999999999999999999", "seed"),
        ("--horizon 0", "`horizon` must be a positive number"),
        ("--horizon inf", "`horizon` must be a positive number"),
        ("--rtol -1e-8", "--rtol"),
        ("--rtol 0", "`rtol` must be a positive number"),
        ("--atol=-1", "`atol` must be a finite number, zero or more"),
        ("--solver magic", "`solver` must be one of auto, .*, got 'magic'"),
        (
            "--step 0.1",
            "`step` must be left out unless `solver` is rk4 or euler, got .* ndf",
        ),
        ("--solver rk4 --step 0", "`step` must be a positive"),
        ("--frobnicate", "unrecognized arguments: --frobnicate"),
        ("--wid 3", "unrecognized arguments: --wid 3"),
    ],
)
def test_bad_options(arguments, message, asked, tmp_path, refusal):
    output = tmp_path / "out"
    sentence = refusal(["run", *arguments.split(), "--output", str(output)])
    assert re.search(message, sentence)
    assert not asked
    assert not output.exists()


def test_output_that_is_a_file(asked, tmp_path, refusal):
    path = tmp_path / "file"
    path.write_text("mine")
    assert str(path) in refusal(["run", "--output", str(path)])
    assert path.read_text() == "mine"
    assert not asked


def test_a_start_without_a_finite_loss(tmp_path, capsys):
    assert main([*SMALL, "--scale", "1e200", "--output", str(tmp_path)]) == 2
    assert "`loss` must be finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["walk"], "invalid choice: 'walk'"),
        (["show"], "FILE"),
        (["show", "nothing.npz"], "no run file at 'nothing.npz'"),
    ],
)
def test_bad_commands(arguments, message, refusal):
    assert message in refusal(arguments)


#
# gradflow show, and the rest
#


def test_show(folder, tmp_path, capsys):
    figure = tmp_path / "figure.pdf"
    path = str(folder / "flow.npz")
    assert main(["show", path]) == 0
    assert capsys.readouterr().out == f"{Flow.load(path)}\n"
    assert main(["show", path, "--figure", str(figure)]) == 0
    assert capsys.readouterr().out == (
        f"{Flow.load(path)}\nfigure           {figure}\n"
    )
    assert figure.read_bytes().startswith(b"%PDF")


def test_show_draws_a_flow_of_heads(tmp_path, capsys):
    """Which has neither attention over tokens nor a chain with a unigram entropy."""
    chain = gradflow.HighOrderChain.random(3, (1, 1))
    heads = gradflow.PositionalHeads(3, 2, 2)
    problem = gradflow.Problem(heads, gradflow.AllContexts(chain))
    flow = gradflow.integrate(problem, problem.init(), 8.0, rtol=1e-5, solver="tsit5")
    path = str(flow.save(tmp_path / "heads.npz"))
    figure = tmp_path / "heads.png"
    assert main(["show", path, "--figure", str(figure)]) == 0
    assert capsys.readouterr().out.endswith(f"figure           {figure}\n")
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_show_prints_a_training_run(tmp_path, capsys):
    training = gradflow.train(lambda w: (w**2).sum(), np.ones(2), 0.1, 5)
    path = str(training.save(tmp_path / "training.npz"))
    assert main(["show", path]) == 0
    assert capsys.readouterr().out == f"{gradflow.Training.load(path)}\n"


def test_show_refuses_a_damaged_file(folder, tmp_path, refusal):
    path = tmp_path / "flow.npz"
    path.write_bytes((folder / "flow.npz").read_bytes()[:-100])
    assert "cut short or damaged" in refusal(["show", str(path)])


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.xyz", "Format 'xyz' is not supported"), ("no/a.png", "No such file")],
)
def test_show_refuses_a_figure_that_it_cannot_draw(
    folder, tmp_path, refusal, name, message
):
    path, figure = str(folder / "flow.npz"), str(tmp_path / name)
    assert message in refusal(["show", path, "--figure", figure])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--version"], f"gradflow {gradflow.__version__}\n"),
        (["--help"], "usage: gradflow "),
        (["run", "--help"], "--head-width K"),
    ],
)
def test_version_and_help(arguments, shown, capsys):
    assert main(arguments) == 0
    assert shown in capsys.readouterr().out


def test_a_terminal_without_mathematics_gets_no_traceback(folder, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["show", str(folder / "flow.npz")]) == 0
    sys.stdout.flush()
    assert b"conserved drift" in raw.getvalue()
