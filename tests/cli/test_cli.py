import dataclasses
import functools
import io
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import gradflow
from gradflow import Flow, FlowError
from gradflow.cli import _main as cli

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
    assert cli.main([*SMALL, "--output", str(output)]) == 0
    return output


class Stopped(Exception):
    pass


@pytest.fixture
def asked(monkeypatch):
    """What `integrate` was asked for, without doing it."""
    calls = {}

    def record(problem, params, t1, **options):
        calls.update(problem=problem, params=params, t1=t1, **options)
        raise Stopped

    monkeypatch.setattr(cli, "integrate", record)
    return calls


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
    assert cli.main([*SMALL, "--output", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert str(Flow.load(tmp_path / "flow.npz")) in captured.out
    assert "conserved drift" in captured.out
    assert str(tmp_path / "flow.npz") in captured.out
    assert str(tmp_path / "overview.png") in captured.out
    assert "4 tokens, width 3, head width 2, context infinite" in captured.out
    assert captured.err == ""


def test_run_shows_its_progress(tmp_path, capsys):
    arguments = [a for a in SMALL if a != "--no-progress"]
    assert cli.main([*arguments, "--output", str(tmp_path)]) == 0
    assert "100%" in capsys.readouterr().err


def test_run_without_options_is_the_reference_instance(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Stopped):
        cli.main(["run"])
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
    with pytest.raises(Stopped):
        cli.main(["run", *options.split(), "--output", str(tmp_path)])
    assert asked["problem"].model.shapes["WQ"] == (10, 3)
    assert asked["problem"].population.length == 5
    assert asked["atol"] == 1e-9
    assert asked["solver"] == "dopri5"
    assert asked["progress"] is False


@pytest.mark.parametrize("kind", ["npy", "csv", "CSV with a byte order mark"])
def test_run_reads_a_matrix(asked, tmp_path, kind):
    P = np.array([[0.5, 0.5, 0.0], [0.125, 0.625, 0.25], [0.75, 0.0, 0.25]])
    path = tmp_path / f"matrix.{kind[:3]}"
    if kind == "npy":
        np.save(path, P)
    else:
        mark = "" if kind == "csv" else "\ufeff"
        rows = (",".join(map(str, row)) for row in P)
        path.write_text(mark + "\n".join(rows), encoding="utf-8")
    with pytest.raises(Stopped):
        cli.main(["run", "--matrix", str(path), "--output", str(tmp_path)])
    np.testing.assert_array_equal(asked["problem"].population.chain.transition, P)


def test_a_flow_that_breaks_off_is_kept(tmp_path, capsys, monkeypatch):
    def broken(*arguments, **options):
        flow = gradflow.integrate(*arguments, **options)
        stats = {**flow.stats, "reason": "could not go on from t = 8"}
        raise FlowError("for Python", dataclasses.replace(flow, stats=stats))

    monkeypatch.setattr(cli, "integrate", broken)
    assert cli.main([*SMALL, "--output", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "gradflow: the flow could not go on from t = 8. What was computed until then "
        f"is in {tmp_path}.\n"
    )
    flow = Flow.load(tmp_path / "flow.npz")
    assert flow.stats["reason"] == "could not go on from t = 8"
    assert str(flow) in captured.out
    assert (tmp_path / "overview.png").exists()


def test_a_flow_too_short_for_a_figure_is_kept(tmp_path, capsys, monkeypatch):
    two_times = functools.partial(gradflow.integrate, ts=[0.0, 8.0])
    monkeypatch.setattr(cli, "integrate", two_times)
    assert cli.main([*SMALL, "--output", str(tmp_path)]) == 1
    assert "the figure could not be drawn: a figure over" in capsys.readouterr().err
    assert len(Flow.load(tmp_path / "flow.npz").ts) == 2
    assert not (tmp_path / "overview.png").exists()


def test_a_run_file_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    def full(flow, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Flow, "save", full)
    assert cli.main([*SMALL, "--output", str(tmp_path)]) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_interrupt(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "integrate", interrupted)
    assert cli.main([*SMALL, "--output", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "gradflow: interrupted.\n"


#
# Bad input
#


def refusal(arguments, capsys):
    """The one sentence with which `arguments` are refused."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gradflow: ")
    assert captured.err.endswith(".\n")
    assert captured.err.count("\n") == 1
    return captured.err


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
        ("--context 0", "`--context` must be a whole number of at least 1"),
        ("--context 5000", "5000 with 4 tokens makes .* the limit is"),
        ("--scale -1", "`scale` must be a finite number, zero or more"),
        ("--scale inf", "`scale` must be a finite number, zero or more"),
        ("--seed -1", "`seed` must be a whole number of at least 0"),
        ("--seed 99999999999999999999999", "seed"),
        ("--horizon 0", "`--horizon` must be a positive number"),
        ("--horizon inf", "`--horizon` must be a positive number"),
        ("--rtol -1e-8", "--rtol"),
        ("--rtol 0", "`--rtol` must be a positive number"),
        ("--atol=-1", "`--atol` must be a finite number, zero or more"),
        ("--solver magic", "`solver` must be one of auto, .*, got 'magic'"),
        ("--step 0.1", "`--step` must go with rk4 and euler, got ndf"),
        ("--solver rk4 --step 0", "`--step` must be a positive"),
        ("--frobnicate", "unrecognized arguments: --frobnicate"),
        ("--wid 3", "unrecognized arguments: --wid 3"),
    ],
)
def test_bad_options(arguments, message, asked, tmp_path, capsys):
    output = tmp_path / "out"
    sentence = refusal(["run", *arguments.split(), "--output", str(output)], capsys)
    assert re.search(message, sentence)
    assert not asked
    assert not output.exists()


def _object_array(path):
    np.save(path, np.array([[{}]], dtype=object), allow_pickle=True)


def _archive(path):
    with path.open("wb") as file:
        np.savez(file, P=np.full((2, 2), 0.5))


def _cut_short(path):
    np.save(path, np.full((2, 2), 0.5))
    path.write_bytes(path.read_bytes()[:-8])


NOT_ONE_ARRAY = "is not a .npy file of one array of numbers"
NO_TABLE = "is not a table of numbers separated by commas"


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("missing.npy", None, "cannot be read: No such file"),
        ("folder.csv", Path.mkdir, "cannot be read: Is a directory"),
        ("objects.npy", _object_array, NOT_ONE_ARRAY),
        ("archive.npy", _archive, NOT_ONE_ARRAY),
        ("short.npy", _cut_short, NOT_ONE_ARRAY),
        ("empty.npy", lambda path: path.write_bytes(b""), NOT_ONE_ARRAY),
        ("zip.npy", lambda path: path.write_bytes(b"PK\x03\x04 no zip"), NOT_ONE_ARRAY),
        ("text.npy", lambda path: path.write_text("0.5,0.5\n"), NOT_ONE_ARRAY),
        ("empty.csv", lambda path: path.write_text(""), "must be a square matrix"),
        ("words.csv", lambda path: path.write_text("a,b\n1,0\n"), f"{NO_TABLE}: .*'a'"),
        (
            "ragged.csv",
            lambda path: path.write_text("1,0\n1\n"),
            f"{NO_TABLE}: .* 1 at",
        ),
        ("bytes.csv", lambda path: path.write_bytes(b"\xff\xfe\xff"), NO_TABLE),
        ("row.csv", lambda path: path.write_text("0.5,0.5\n"), "got shape .1, 2."),
        ("sums.csv", lambda path: path.write_text("0.5,0.4\n0,1\n"), "row 0 sums"),
        ("minus.csv", lambda path: path.write_text("2,-1\n0.5,0.5\n"), "negative"),
        ("nan.csv", lambda path: path.write_text("nan,1\n0.5,0.5\n"), "finite"),
        ("eye.npy", lambda path: np.save(path, np.eye(2)), "irreducible"),
        ("i.npy", lambda path: np.save(path, np.full((2, 2), 0.5j)), "must be real"),
    ],
)
def test_bad_matrix_files(name, write, message, asked, tmp_path, capsys):
    path = tmp_path / name
    if write is not None:
        write(path)
    sentence = refusal(["run", "--matrix", str(path)], capsys)
    assert str(path) in sentence
    assert re.search(message, sentence)
    assert not asked


class _Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def test_a_matrix_file_is_never_unpickled(asked, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bomb.npy").write_bytes(pickle.dumps(_Bomb()))
    assert NOT_ONE_ARRAY in refusal(["run", "--matrix", "bomb.npy"], capsys)
    assert not Path("exploded").exists()
    pickle.loads(Path("bomb.npy").read_bytes())
    assert Path("exploded").exists()  # it would have


def test_output_that_is_a_file(asked, tmp_path, capsys):
    path = tmp_path / "file"
    path.write_text("mine")
    assert str(path) in refusal(["run", "--output", str(path)], capsys)
    assert path.read_text() == "mine"
    assert not asked


def test_a_start_without_a_finite_loss(tmp_path, capsys):
    assert cli.main([*SMALL, "--scale", "1e200", "--output", str(tmp_path)]) == 2
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
def test_bad_commands(arguments, message, capsys):
    assert message in refusal(arguments, capsys)


#
# gradflow show, and the rest
#


def test_show(folder, tmp_path, capsys):
    figure = tmp_path / "figure.pdf"
    path = str(folder / "flow.npz")
    assert cli.main(["show", path]) == 0
    assert capsys.readouterr().out == f"{Flow.load(path)}\n"
    assert cli.main(["show", path, "--figure", str(figure)]) == 0
    assert capsys.readouterr().out == (
        f"{Flow.load(path)}\nfigure           {figure}\n"
    )
    assert figure.read_bytes().startswith(b"%PDF")


def test_show_refuses_a_damaged_file(folder, tmp_path, capsys):
    path = tmp_path / "flow.npz"
    path.write_bytes((folder / "flow.npz").read_bytes()[:-100])
    assert "cut short or damaged" in refusal(["show", str(path)], capsys)


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.xyz", "Format 'xyz' is not supported"), ("no/a.png", "No such file")],
)
def test_show_refuses_a_figure_that_it_cannot_draw(
    folder, tmp_path, capsys, name, message
):
    path, figure = str(folder / "flow.npz"), str(tmp_path / name)
    assert message in refusal(["show", path, "--figure", figure], capsys)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--version"], f"gradflow {gradflow.__version__}\n"),
        (["--help"], "usage: gradflow "),
        (["run", "--help"], "--head-width K"),
    ],
)
def test_version_and_help(arguments, shown, capsys):
    assert cli.main(arguments) == 0
    assert shown in capsys.readouterr().out


def test_a_terminal_without_mathematics_gets_no_traceback(folder, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert cli.main(["show", str(folder / "flow.npz")]) == 0
    sys.stdout.flush()
    assert b"conserved drift" in raw.getvalue()
