"""Lines of styled text, the output of layout functions. Widths are terminal cells; roles are names of styles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from mstarctl.output.table import cell_width, escape

ELLIPSIS: Final = "…"


class Span(NamedTuple):
    """Text of one role, without control characters (see `safe`)."""

    text: str
    role: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of cells."""

    spans: tuple[Span, ...] = ()

    @property
    def width(self) -> int:
        """Width in cells."""
        return sum(cells(span.text) for span in self.spans)

    @property
    def plain(self) -> str:
        """The text without roles."""
        return "".join(span.text for span in self.spans)

    def __add__(self, other: Line) -> Line:
        return Line(self.spans + other.spans)


Part: TypeAlias = str | tuple[str, str] | Span | Line
"""Argument of `line`: text, text with a role, or a finished line."""

EMPTY: Final = Line()


def line(*parts: Part) -> Line:
    """Join parts to a line; empty parts are dropped."""
    spans: list[Span] = []
    for part in parts:
        if isinstance(part, Line):
            spans += part.spans
        elif isinstance(part, str):
            spans.append(Span(part))
        else:
            spans.append(Span(*part))
    return Line(tuple(span for span in spans if span.text))


def pair(label: str, value: str, role: str = "value", unit: str = "") -> Line:
    """Return a label, a value and its unit."""
    return line((f"{label} ", "dim"), (value, role), (f" {unit}" if unit else "", "dim"))


@lru_cache(maxsize=8192)
def cells(text: str) -> int:
    """Return the width of `text` in cells."""
    return cell_width(text)


def safe(text: str) -> str:
    """Escape control characters of external text (ids, log lines)."""
    return escape(text)


def clip(text: str, width: int, mark: str = ELLIPSIS) -> str:
    """Shorten `text` to at most `width` cells, with `mark` at the end."""
    if cells(text) <= width:
        return text
    if width <= cells(mark):
        return mark[:width] if width > 0 else ""
    taken, room = [], width - cells(mark)
    for char in text:
        room -= cells(char)
        if room < 0:
            break
        taken.append(char)
    return "".join(taken) + mark


def clip_inside(text: str, width: int) -> str:
    """Shorten `text` to at most `width` cells in the middle, because generated ids differ in their last characters."""
    if cells(text) <= width or width < 5:
        return clip(text, width)
    end = text[-1]
    for char in reversed(text[:-1]):
        if cells(end) + cells(char) > width // 2:
            break
        end = char + end
    return clip(text[: -len(end)], width - cells(end)) + end


def left(text: str, width: int) -> str:
    """Return exactly `width` cells, text at the left."""
    text = clip(text, width)
    return text + " " * (width - cells(text))


def right(text: str, width: int) -> str:
    """Return exactly `width` cells, text at the right."""
    text = clip(text, width)
    return " " * (width - cells(text)) + text


def fit(row: Line, width: int, role: str = "") -> Line:
    """Return exactly `width` cells: clipped with a mark, or padded with blanks of `role`."""
    have = row.width
    if have == width:
        return row
    if have < width:
        return Line((*row.spans, Span(" " * (width - have), role)))
    spans: list[Span] = []
    room = width
    for index, span in enumerate(row.spans):
        size = cells(span.text)
        is_last = index == len(row.spans) - 1
        if size < room or size == room and is_last:
            spans.append(span)
            room -= size
            continue
        cut = clip(span.text + ("" if is_last else " "), room)
        spans.append(Span(cut + " " * (room - cells(cut)), span.role))
        break
    return Line(tuple(spans))


def spread(start: Line, end: Line, width: int) -> Line:
    """Return exactly `width` cells with `start` at the left and `end` at the right; `start` is clipped."""
    room = width - end.width
    if room < 1:
        return fit(start, width)
    return fit(start, room) + end


def join(parts: Iterable[Line], gap: str = "  ") -> Line:
    """Join the parts that are not empty, with `gap` between them."""
    spans: list[Span] = []
    for part in parts:
        if not part.spans:
            continue
        if spans:
            spans.append(Span(gap))
        spans += part.spans
    return Line(tuple(spans))


def take(parts: Iterable[Line], width: int, gap: str = "  ") -> Line:
    """Join the whole parts that fit into `width`, in order; others are left out."""
    row, room = EMPTY, width
    for part in parts:
        need = part.width + (cells(gap) if row.spans else 0)
        if part.spans and need <= room:
            row = row + line(gap, part) if row.spans else part
            room -= need
    return row


def with_role(row: Line, role: str) -> Line:
    """Replace every role of a line, for dimmed rows."""
    return Line(tuple(Span(span.text, role) for span in row.spans))


def over(row: Line, mark: str) -> Line:
    """Add `+MARK` to each role: the theme combines the mark's style with the role's (`+selected`)."""
    return Line(tuple(Span(span.text, f"{span.role.partition('+')[0]}+{mark}") for span in row.spans))


def wrap(text: str, width: int) -> list[str]:
    """Wrap text to lines of at most `width` cells, at blanks if possible."""
    rows: list[str] = []
    for paragraph in text.splitlines() or [""]:
        row = ""
        for word in paragraph.split(" "):
            while cells(word) > width:
                if row:
                    rows.append(row)
                    row = ""
                piece = clip(word, width, "")
                rows.append(piece)
                word = word[len(piece) :]
            if row and cells(row) + 1 + cells(word) > width:
                rows.append(row)
                row = word
            else:
                row = f"{row} {word}" if row else word
        rows.append(row)
    return rows


def window(rows: list[Line], height: int, width: int) -> list[Line]:
    """Return exactly `height` lines of exactly `width` cells."""
    shown = [fit(row, width) for row in rows[:height]]
    return shown + [fit(EMPTY, width)] * (height - len(shown))
