"""Charts as data, and their drawing in braille characters for the terminal. Pure functions.

Axes start at 0. A second axis on the right has its own scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BRAILLE: Final = 0x2800
DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character by column and row."""

LABEL_CELLS: Final = 7
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """One line of a chart. is_right: on the right axis, drawn dashed."""

    name: str
    points: Sequence[Point]
    is_right: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartBar:
    """One bar of a bar chart. value: a share from 0 to 1. group: name of its row."""

    group: str
    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of lines, or of bars. marks: (x, label) of vertical lines. bands: (from, to, label) of shaded times."""

    title: str
    x_label: str = ""
    y_label: str = ""
    right_label: str = ""
    lines: Sequence[ChartLine] = ()
    bars: Sequence[ChartBar] = ()
    marks: Sequence[tuple[float, str]] = ()
    bands: Sequence[tuple[float, float, str]] = ()

    @property
    def has_right(self) -> bool:
        """Whether a line has the right axis."""
        return any(line.is_right for line in self.lines)

    def x_max(self) -> float:
        """Return the end of the x axis."""
        return rounded_up(
            max([*(x for line in self.lines for x, _ in line.points), *(x for x, _ in self.marks)], default=1)
        )

    def y_max(self, *, is_right: bool) -> float:
        """Return the end of one of the y axes."""
        return rounded_up(
            max((y for line in self.lines if line.is_right is is_right for _, y in line.points), default=1)
        )


def rounded_up(value: float) -> float:
    """Return the next of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(float(step * power) for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def tick_text(value: float) -> str:
    """Return the text of an axis value without an exponent: `0.25`, `12.5`, `1200`, `15k`, `3M`."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 100 else f"{scaled:.3g}{unit}"
    if size >= 100 or not size:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}".rstrip("0").rstrip(".")


def drawn(chart: Chart, width: int = 100, height: int = 16) -> list[str]:
    """Draw a chart as lines of text of at most `width` cells."""
    if chart.bars:
        return [chart.title, *_bars(chart.bars, width)]
    has_right = chart.has_right
    columns = max(10, width - LABEL_CELLS - 2 - (LABEL_CELLS if has_right else 0))
    cells = [[0] * columns for _ in range(height)]
    for line in chart.lines:
        _trace(cells, line, chart.x_max(), chart.y_max(is_right=line.is_right))
    for at, _ in chart.marks:
        _mark(cells, at / chart.x_max())
    legend = "   ".join(
        f"{'⠤⠤' if line.is_right else '──'} {line.name}{' (right)' if line.is_right else ''}" for line in chart.lines
    )
    return [chart.title, legend, *_framed(chart, cells, has_right=has_right), *_feet(chart, columns)]


def _trace(cells: list[list[int]], line: ChartLine, x_max: float, y_max: float) -> None:
    wide, high = 2 * len(cells[0]) - 1, 4 * len(cells) - 1
    dots = [(x / x_max * wide, (1 - y / y_max) * high) for x, y in line.points]
    for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False):
        steps = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
        for step in range(steps + 1):
            x, y = round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)
            if not line.is_right or x % 4 < 2:
                _dot(cells, x, y)


def _mark(cells: list[list[int]], share: float) -> None:
    x = round(share * (2 * len(cells[0]) - 1))
    for y in range(0, 4 * len(cells), 2):
        _dot(cells, x, y)


def _dot(cells: list[list[int]], x: int, y: int) -> None:
    if 0 <= y < 4 * len(cells) and 0 <= x < 2 * len(cells[0]):
        cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]


def _framed(chart: Chart, cells: list[list[int]], *, has_right: bool) -> list[str]:
    left, right = chart.y_max(is_right=False), chart.y_max(is_right=True)
    rows = []
    for number, row in enumerate(cells):
        share = 1 - number / len(cells)
        is_tick = number % 4 == 0
        label = tick_text(left * share) if is_tick else ""
        text = "".join(chr(BRAILLE + cell) if cell else " " for cell in row)
        end = f"├ {tick_text(right * share)}" if has_right and is_tick else "│" if has_right else ""
        rows.append(f"{label:>{LABEL_CELLS}} {'┤' if is_tick else '│'}{text}{end}".rstrip())
    return rows


def _feet(chart: Chart, columns: int) -> list[str]:
    pad = " " * (LABEL_CELLS + 2)
    ticks = [" "] * (columns + 8)
    for number in range(6):
        text = tick_text(chart.x_max() * number / 5)
        at = min(round(number / 5 * (columns - 1)), columns + 7 - len(text))
        ticks[at : at + len(text)] = text
    lines = [f"{'0':>{LABEL_CELLS}} └{'─' * columns}", f"{pad}{''.join(ticks)}".rstrip()]
    axes = ", ".join(
        part
        for part in (
            f"x: {chart.x_label}",
            chart.y_label and f"y: {chart.y_label}",
            chart.right_label and f"right: {chart.right_label}",
        )
        if part
    )
    lines.append(f"{pad}{axes}")
    lines += [f"{pad}{'┆'} {label} at {tick_text(at)}" for at, label in chart.marks]
    lines += [f"{pad}░ {label} from {tick_text(low)} to {tick_text(high)}" for low, high, label in chart.bands]
    return lines


def _bars(bars: Sequence[ChartBar], width: int) -> list[str]:
    names = max(len(bar.name) for bar in bars)
    room = max(10, width - names - 12)
    lines, group = [], ""
    for bar in bars:
        if bar.group != group:
            group = bar.group
            lines.append(group)
        lines.append(f"  {bar.name:<{names}} {'█' * round(room * bar.value)} {100 * bar.value:.0f} %")
    return lines
