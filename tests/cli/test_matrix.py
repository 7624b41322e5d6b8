"""`--matrix FILE` and `--labels`: transition matrices from files."""

import dataclasses
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

import gradflow
from gradflow.cli import main
from gradflow.sweeps import _runs


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
    assert main(["run", "--matrix", str(path), "--output", str(tmp_path)]) == 130
    np.testing.assert_array_equal(asked["problem"].population.chain.transition, P)


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
        ("words.csv", lambda path: path.write_text("1,0\na,b\n"), f"{NO_TABLE}: .*'a'"),
        (
            "typing_error.csv",
            lambda path: path.write_text("0.5,0.5x\n0.5,0.5\n"),
            f"{NO_TABLE}: .*'0.5x'",
        ),
        ("header.csv", lambda path: path.write_text("a,b\n1,0\n"), "got shape .1, 2."),
        ("only_header.csv", lambda path: path.write_text("a,b\n"), "square matrix"),
        (
            "labels.csv",
            lambda path: path.write_text("a,b,c\n0.5,0.5\n0.5,0.5\n"),
            "`labels` must have one name for each of the 2 tokens, got 3",
        ),
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
def test_bad_matrix_files(name, write, message, asked, tmp_path, refusal):
    path = tmp_path / name
    if write is not None:
        write(path)
    sentence = refusal(["run", "--matrix", str(path)])
    assert str(path) in sentence
    assert re.search(message, sentence)
    assert not asked


class _Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def test_a_matrix_file_is_never_unpickled(asked, tmp_path, refusal, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bomb.npy").write_bytes(pickle.dumps(_Bomb()))
    assert NOT_ONE_ARRAY in refusal(["run", "--matrix", "bomb.npy"])
    assert not Path("exploded").exists()
    pickle.loads(Path("bomb.npy").read_bytes())
    assert Path("exploded").exists()  # it would have


#
# Labels
#

P = np.array([[0.5, 0.5], [0.25, 0.75]])
TABLE = "0.5,0.5\n0.25,0.75\n"


def labels_of(asked):
    chain = asked["problem"].population.chain
    np.testing.assert_array_equal(chain.transition, P)
    return chain.labels


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        (TABLE, ("0", "1")),
        ("a,b\n" + TABLE, ("a", "b")),
        ("\ufeffa, b \r\n\r\n" + TABLE, ("a", "b")),
        ('# a comment\n\n"the, cat","#"\n' + TABLE, ("the, cat", "#")),
        ("a,1\n" + TABLE, ("a", "1")),  # one label is a number
    ],
)
def test_a_header_row_gives_labels(text, labels, asked, tmp_path):
    path = tmp_path / "P.csv"
    path.write_text(text, encoding="utf-8")
    assert main(["run", "--matrix", str(path), "--output", str(tmp_path)]) == 130
    assert labels_of(asked) == labels


@pytest.mark.parametrize("header", ["", "a,b\n"])
def test_labels_on_the_command_line(header, asked, tmp_path):
    path = tmp_path / "P.csv"
    path.write_text(header + TABLE)
    options = ["--matrix", str(path), "--output", str(tmp_path)]
    assert main(["run", *options, "--labels", "a,b"]) == 130
    assert labels_of(asked) == ("a", "b")


def test_labels_of_a_npy_file(asked, tmp_path):
    np.save(tmp_path / "P.npy", P)
    options = ["--matrix", str(tmp_path / "P.npy"), "--output", str(tmp_path)]
    assert main(["run", *options, "--labels", "a, b"]) == 130
    assert labels_of(asked) == ("a", "b")


def test_labels_of_a_sticky_chain(asked, tmp_path):
    options = ["--stationary", "0.6,0.4", "--output", str(tmp_path)]
    assert main(["run", *options, "--labels", "yes,no"]) == 130
    assert asked["problem"].population.chain.labels == ("yes", "no")


def test_labels_that_contradict_the_header_row(asked, tmp_path, refusal):
    path = tmp_path / "P.csv"
    path.write_text("a,b\n" + TABLE)
    sentence = refusal(["run", "--matrix", str(path), "--labels", "b,a"])
    assert f"the header row of '{path}' must agree, got b,a and a,b" in sentence
    assert not asked


@pytest.mark.parametrize(
    "options", [["--stationary", "0.5,0.5"], ["--matrix", "P.csv"]]
)
def test_labels_of_another_number(options, asked, tmp_path, refusal, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "P.csv").write_text(TABLE)
    sentence = refusal(["run", *options, "--labels", "a,b,c"])
    assert "`labels` must have one name for each of the 2 tokens, got 3" in sentence
    assert not asked


def test_labels_are_part_of_a_sweeps_task(tmp_path):
    """The flows in a store have one set of labels."""
    plain = _runs.Run(matrix=P, stationary=None, stickiness=None)
    named = dataclasses.replace(plain, labels=("a", "b"))
    assert "--labels" not in plain.name()
    assert plain.name(["seed"]).replace("--matrix", "--labels a,b --matrix") == (
        named.name(["seed"])
    )


@pytest.mark.parametrize("defect", [1e-3, 1e-6])
def test_rows_that_almost_sum_to_one_are_explained(defect, asked, tmp_path, refusal):
    """In the words of MarkovChain, in one line and without a traceback."""
    path = tmp_path / "P.csv"
    path.write_text(f"a,b\n0.5,{0.5 - defect / 2}\n0.25,0.75\n")
    with pytest.raises(ValueError, match="row 0") as raised:
        gradflow.MarkovChain([[0.5, 0.5 - defect / 2], [0.25, 0.75]], ["a", "b"])
    sentence = refusal(["run", "--matrix", str(path)])
    assert sentence == f"gradflow: '{path}' does not define a chain: {raised.value}\n"
    assert not asked
