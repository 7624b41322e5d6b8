"""Results that come in numbers: sequences that print as a table."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple, SupportsIndex, TypeVar, overload

Result = TypeVar("Result")


class AbstractResults(Sequence[Result]):
    """An immutable sequence of results. `print` shows a table, `repr` one short line.

    A subclass is a frozen dataclass or an `equinox.Module`; it defines `__len__` and
    the four methods below.
    """

    @abstractmethod
    def _result(self, index: int) -> Result:
        """The result at an index from 0 to `len(self) - 1`."""

    @abstractmethod
    def _table(self) -> str:
        """The text that `print` shows."""

    @abstractmethod
    def _summary(self) -> str:
        """The text between the parentheses of `repr`."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Result, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Result | tuple[Result, ...]:
        if isinstance(index, slice):
            return tuple(self._result(i) for i in range(len(self))[index])
        try:
            chosen = range(len(self))[index]
        except IndexError:
            raise IndexError(
                f"index {index} is out of range for {len(self)} results"
            ) from None
        return self._result(chosen)

    def __str__(self) -> str:
        return self._table()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._summary()})"


class Column(NamedTuple):
    """One column of a printed table."""

    title: str
    meaning: str = ""
    """A sentence for the legend below the table; empty for none."""
    width: int = 0
    """The least number of characters."""
    align: Literal["<", ">"] = ">"


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """A table in plain text: a line of titles, then one line for each row."""
    widths = [
        max([column.width, len(column.title), *(len(row[i]) for row in rows)])
        for i, column in enumerate(columns)
    ]
    titles = [column.title for column in columns]
    return "\n".join(
        " ".join(
            f"{cell:{column.align}{width}}"
            for cell, column, width in zip(line, columns, widths, strict=True)
        ).rstrip()
        for line in [titles, *rows]
    )


def legend(meanings: Sequence[tuple[str, str]]) -> str:
    """A line for each name and its meaning, to stand below a table."""
    known = [(name, meaning) for name, meaning in meanings if meaning]
    width = max((len(name) for name, _ in known), default=0)
    return "\n".join(f"  {name:<{width}}  {meaning}" for name, meaning in known)


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names separated by commas; of more than `most`, the first and how many."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])}, … {len(names)} in all"
