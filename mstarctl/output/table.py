"""Text tables: pure layout by terminal cell widths, with control characters escaped."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. key: the item's field. is_wide: shown only with `-o wide`."""

    title: str
    key: str
    is_wide: bool = False
    is_right: bool = False


Colour = Callable[[str, str, bool], str]
"""(cell, key of its column, whether it is a title) -> the cell with its colours."""


def render_table(
    items: Sequence[Mapping[str, Any]],
    columns: Sequence[Column],
    *,
    is_wide: bool = False,
    colour: Colour | None = None,
) -> list[str]:
    """Return the lines of a table with a header. `cell_text` formats the values; the last column is not padded.

    colour: colours finished cells, which keep their widths.
    """
    shown = [column for column in columns if is_wide or not column.is_wide]
    rows = [[column.title for column in shown]]
    rows += [[cell_text(item.get(column.key)) for column in shown] for item in items]
    widths = [max(cell_width(row[i]) for row in rows) for i in range(len(shown))]
    return [_line(row, shown, widths, colour, is_title=not at) for at, row in enumerate(rows)]


def _line(
    row: Sequence[str], columns: Sequence[Column], widths: Sequence[int], colour: Colour | None, *, is_title: bool
) -> str:
    cells = []
    for text, column, width in zip(row, columns, widths, strict=True):
        space = " " * (width - cell_width(text))
        shown = text if colour is None or not text.strip() else colour(text, column.key, is_title)
        cells.append(space + shown if column.is_right else shown + space)
    return "  ".join(cells).rstrip()


def cell_text(value: Any) -> str:
    """Format one cell: `-` for an empty value, lists joined by commas, control characters escaped."""
    if value is None or value == "" or value == [] or value == ():
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(cell_text(item) for item in value)
    return escape(str(value))


def escape(text: str) -> str:
    """Escape control and direction characters, so that the text cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def cell_width(text: str) -> int:
    """Return the width of `text` in terminal cells: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(_char_width(char) for char in text)


def _char_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1
