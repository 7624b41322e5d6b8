"""Transition matrices in files: .npy, or .csv with or without a header row."""

import csv
import warnings
import zipfile
from pathlib import Path

import numpy as np

from ._common import BadInput

Labels = tuple[str, ...]


def read_matrix(path: Path) -> tuple[np.ndarray, Labels | None]:
    """The array in a .npy or .csv file, and the labels in the header row of a .csv."""
    kind = path.suffix.lower()
    if kind not in (".npy", ".csv"):
        raise BadInput(f"--matrix reads .npy and .csv files, got '{path}'.")
    try:
        return (_load_npy(path), None) if kind == ".npy" else _load_csv(path)
    except OSError as error:
        raise BadInput(f"'{path}' cannot be read: {error.strerror}.") from error


def parse_labels(text: str) -> Labels:
    """The labels in one line of comma-separated values; quotes protect commas."""
    (row,) = csv.reader([text], skipinitialspace=True)
    return tuple(label.strip() for label in row)


def agreed_labels(
    path: Path, header: Labels | None, given: Labels | None
) -> Labels | None:
    """The labels of a matrix from its header row or from --labels."""
    if header is not None and given is not None and header != given:
        raise BadInput(
            f"--labels and the header row of '{path}' must agree, got "
            f"{','.join(given)} and {','.join(header)}: leave out --labels or remove "
            "the header row."
        )
    return header if given is None else given


def _load_csv(path: Path) -> tuple[np.ndarray, Labels | None]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        # As NumPy does, skip empty lines and comments.
        rows = [line for line in lines if line.partition("#")[0].strip()]
        labels = parse_labels(rows[0]) if _has_header(rows) else None
        with warnings.catch_warnings():
            # NumPy warns about an empty file, which is refused as a matrix later.
            warnings.simplefilter("ignore")
            body = rows if labels is None else rows[1:]
            return np.loadtxt(body, delimiter=",", ndmin=2), labels
    except ValueError as error:
        # Without NumPy's advice about its own options.
        reason = str(error).partition("; use")[0].rstrip(".")
        raise BadInput(
            f"'{path}' is not a table of numbers separated by commas: {reason}."
        ) from error


def _has_header(rows: list[str]) -> bool:
    """Whether the first row holds labels.

    It does if none of its entries is a number, or if some are not and the rows below it
    are as many as a square matrix has. A mistyped number in the first row of a matrix
    is therefore reported as one.
    """
    if not rows:
        return False
    numbers = [_is_number(entry) for entry in parse_labels(rows[0])]
    return not all(numbers) and (not any(numbers) or len(rows) == len(numbers) + 1)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _load_npy(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        try:
            array = np.load(file, allow_pickle=False)
        # NumPy's reasons are left out: they advise to unpickle the file.
        except (ValueError, EOFError, MemoryError, zipfile.BadZipFile):
            array = None
    if not isinstance(array, np.ndarray):
        raise BadInput(
            f"'{path}' is not a .npy file of one array of numbers, or it was cut short."
        )
    return array
