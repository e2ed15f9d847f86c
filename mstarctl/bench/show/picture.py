"""Charts as SVG documents, and as PNG files by Pillow. The SVG needs no library."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final

from mstar_core.errors import UsageError
from mstarctl.bench.show.chart import Chart, ChartLine, tick_text

WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 70, 60, 60
COLOURS: Final = ("#2563a8", "#c2410c", "#3f7d20", "#7e3ba6", "#0f766e", "#9f1239")
TICKS: Final = 5
Shape = tuple[str, list[tuple[float, float]], str, bool]
"""A polyline: kind, points in pixels, colour, and whether it is dashed."""
Label = tuple[float, float, str, str]
"""A text: position, anchor (start, middle, end) and content."""


def svg(chart: Chart) -> str:
    """Return the chart as an SVG document."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"',
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for _, points, colour, is_dashed in shapes(chart):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if is_dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
    for x, y, width, height, colour in boxes(chart):
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')
    for x, y, anchor, text in labels(chart):
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def write_png(chart: Chart, path: Path) -> None:
    """Write the chart as a PNG file. Raises UsageError without Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise UsageError("--png needs Pillow", hint="pip install mstarctl[runtime], or use --svg") from error
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    for _, points, colour, is_dashed in shapes(chart):
        pairs = list(itertools.pairwise(points))
        for number, (start, end) in enumerate(pairs):
            if not is_dashed or number % 2 == 0 or len(pairs) == 1:
                pen.line((start, end), fill=colour, width=2)
    for x, y, width, height, colour in boxes(chart):
        pen.rectangle((x, y, x + width, y + height), fill=colour)
    for x, y, anchor, text in labels(chart):
        pen.text((x, y), text, fill="black", anchor={"start": "ls", "middle": "ms", "end": "rs"}[anchor])
    image.save(path, "PNG")


def _x(chart: Chart, value: float) -> float:
    return LEFT + value / chart.x_max() * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def shapes(chart: Chart) -> Iterator[Shape]:
    """Yield axes, lines and marks."""
    if chart.bars:
        return
    yield "axis", [(LEFT, TOP), (LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM)], "#555555", False
    for number in range(1, TICKS + 1):
        yield "grid", [(LEFT, _y(number / TICKS)), (WIDTH - RIGHT, _y(number / TICKS))], "#e5e5e5", False
    for number, line in enumerate(chart.lines):
        yield "line", _points(chart, line), COLOURS[number % len(COLOURS)], line.is_right
    for at, _ in chart.marks:
        yield "mark", [(_x(chart, at), TOP), (_x(chart, at), HEIGHT - BOTTOM)], "#888888", True


def _points(chart: Chart, line: ChartLine) -> list[tuple[float, float]]:
    top = chart.y_max(is_right=line.is_right)
    return [(_x(chart, x), _y(y / top)) for x, y in line.points]


def boxes(chart: Chart) -> Iterator[tuple[float, float, float, float, str]]:
    """Yield the bars as (x, y, width, height, colour)."""
    high = (HEIGHT - TOP - 20) / max(1, len(chart.bars))
    groups = list(dict.fromkeys(bar.group for bar in chart.bars))
    for number, bar in enumerate(chart.bars):
        colour = COLOURS[groups.index(bar.group) % len(COLOURS)]
        yield 260, TOP + number * high, bar.value * (WIDTH - 340), high * 0.8, colour


def labels(chart: Chart) -> Iterator[Label]:
    """Yield title, legend, axis values and names."""
    yield LEFT, 24, "start", chart.title
    if chart.bars:
        high = (HEIGHT - TOP - 20) / max(1, len(chart.bars))
        for number, bar in enumerate(chart.bars):
            at = TOP + number * high + high * 0.6
            yield 252, at, "end", f"{bar.group}: {bar.name}"
            yield 266 + bar.value * (WIDTH - 340), at, "start", f"{100 * bar.value:.0f} %"
        return
    legend = "     ".join(f"{line.name}{' (right, dashed)' if line.is_right else ''}" for line in chart.lines)
    yield LEFT, 46, "start", legend
    has_right = any(line.is_right for line in chart.lines)
    for number in range(TICKS + 1):
        share = number / TICKS
        yield LEFT - 8, _y(share) + 4, "end", tick_text(chart.y_max(is_right=False) * share)
        yield _x(chart, chart.x_max() * share), HEIGHT - BOTTOM + 20, "middle", tick_text(chart.x_max() * share)
        if has_right:
            yield WIDTH - RIGHT + 8, _y(share) + 4, "start", tick_text(chart.y_max(is_right=True) * share)
    axes = ", ".join(filter(None, (chart.x_label, chart.y_label and f"left: {chart.y_label}",
                                   chart.right_label and f"right: {chart.right_label}")))  # fmt: skip
    yield WIDTH / 2, HEIGHT - 16, "middle", axes
    for at, label in chart.marks:
        yield _x(chart, at) + 4, TOP - 2, "start", label
