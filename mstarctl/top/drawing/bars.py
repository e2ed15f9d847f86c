"""Bars, sparklines and charts of block glyphs. Pure functions from numbers to lines of exact width."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mstarctl.output.line import Line, line
from mstarctl.top.drawing.glyphs import Glyphs


def load_role(share: float | None) -> str:
    """Return the role of a load: dim up to 10 %, normal up to 75 %, strong above."""
    if share is None or share <= 0.10:
        return "dim"
    return "bar" if share <= 0.75 else "hot"


def bar(share: float | None, width: int, glyphs: Glyphs, role: str = "") -> Line:
    """Draw a bar of exactly `width` cells. share: 0 to 1, None is empty. role: of the filled part."""
    filled = min(1.0, max(0.0, share or 0.0)) * width
    whole = int(filled)
    rest = filled - whole
    tip = ""
    if glyphs.eighths and whole < width and rest >= 1 / 16:
        level = min(7, max(1, round(rest * 8)))
        tip = glyphs.eighths[level - 1]
    elif not glyphs.eighths and whole < width and rest >= 0.5:
        tip = glyphs.full
    role = role or load_role(share)
    return line((glyphs.full * whole + tip, role), (glyphs.rest * (width - whole - len(tip)), "rest"))


def stacked(parts: Sequence[tuple[float, str, str]], width: int, rest: str) -> Line:
    """Draw a bar of parts: (share of the whole, glyph, role). `rest` fills the remaining cells."""
    row, used, place = line(), 0, 0.0
    for share, glyph, role in parts:
        place += max(0.0, share) * width
        until = min(width, round(place))
        row = row + line((glyph * (until - used), role))
        used = max(used, until)
    return row + line((rest * (width - used), "rest"))


def spark(values: Sequence[float | None], width: int, glyphs: Glyphs, peak: float | None = None) -> str:
    """Draw the newest `width` values, one cell each, scaled to `peak` (default: the largest). Exactly `width` cells."""
    shown = list(values)[-width:] if width else []
    known = [value for value in shown if value is not None]
    top = peak if peak is not None else max(known, default=0.0)
    text = "".join(_step(value, top, glyphs) for value in shown)
    return " " * (width - len(text)) + text


def _step(value: float | None, top: float, glyphs: Glyphs) -> str:
    if value is None:
        return " "
    if top <= 0 or value <= 0:
        return glyphs.steps[1]
    return glyphs.steps[max(1, min(8, math.ceil(8 * value / top)))]


def resample(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return `width` values, each the largest of its share of `values`, the newest at the right."""
    if len(values) <= width:
        return [None] * (width - len(values)) + list(values)
    columns: list[float | None] = []
    for cell in range(width):
        some = values[len(values) * cell // width : max(1, len(values) * (cell + 1) // width)]
        known = [value for value in some if value is not None]
        columns.append(max(known) if known else None)
    return columns


def area(values: Sequence[float | None], width: int, height: int, top: float, glyphs: Glyphs) -> list[Line]:
    """Draw a filled chart of `height` lines of `width` cells, newest at the right. top: value of the upper edge."""
    columns = [_levels(value, height, top) for value in resample(values, width)]
    rows = []
    for row in range(height):
        floor = (height - 1 - row) * 8
        text = "".join(glyphs.steps[max(0, min(8, level - floor))] for level in columns)
        shade = min(3, (height - 1 - row) * 4 // max(1, height))
        rows.append(line((text, f"chart.{shade}")))
    return rows


def _levels(value: float | None, height: int, top: float) -> int:
    if value is None:
        return 0
    if top <= 0 or value <= 0:
        return 1
    return max(1, min(8 * height, math.ceil(8 * height * value / top)))


def nice_top(values: Sequence[float | None], least: float = 1.0) -> float:
    """Return the least of 1, 2, 5 x 10^n that is not below any value."""
    most = max((value for value in values if value is not None), default=0.0)
    most = max(most, least)
    scale = 10.0 ** math.floor(math.log10(most))
    return next(factor * scale for factor in (1.0, 2.0, 5.0, 10.0) if factor * scale >= most * 0.999999)
