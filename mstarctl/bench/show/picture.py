"""Charts as SVG documents, and as PNG files by Pillow. The SVG needs no library."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import UsageError
from mstarctl.bench.show.chart import Chart, ChartLine, tick_text

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 84, 84, 70, 60
TICKS: Final = 5
LINES: Final = 6
BAR_LEFT, BAR_ROOM = 300, 380
SWATCH: Final = 22
CHAR_PX: Final = 7.2
"""Estimated width of a character of the legend."""

PNG_SCALE: Final = 2
LIGHT: Final[Mapping[str, str]] = {
    "ground": "#ffffff",
    "ink": "#1f2933",
    "dim": "#52606d",
    "axis": "#7b8794",
    "grid": "#e4e7eb",
    "mark": "#7b8794",
    "band": "#f8d7da",
    "c0": "#2563a8",
    "c1": "#c2410c",
    "c2": "#3f7d20",
    "c3": "#7e3ba6",
    "c4": "#0f766e",
    "c5": "#9f1239",
}
DARK: Final[Mapping[str, str]] = {
    "ground": "#14181f",
    "ink": "#e4e9f0",
    "dim": "#9aa7b6",
    "axis": "#6b7888",
    "grid": "#2a323d",
    "mark": "#8592a3",
    "band": "#4a2229",
    "c0": "#6cb6ff",
    "c1": "#ff9b5e",
    "c2": "#8fd460",
    "c3": "#c99bf0",
    "c4": "#4fd1c5",
    "c5": "#ff8fa3",
}
"""Colours by role. Lines and groups of bars have c0 to c5."""


@dataclass(frozen=True, slots=True)
class Stroke:
    """A polyline in pixels."""

    points: list[tuple[float, float]]
    role: str
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle in pixels."""

    x: float
    y: float
    width: float
    height: float
    role: str


@dataclass(frozen=True, slots=True)
class Label:
    """A text. anchor: start, middle or end. size: in pixels. turn: degrees, -90 or 90 for the titles of y axes."""

    x: float
    y: float
    anchor: str
    text: str
    role: str = "ink"
    size: int = 13
    turn: int = 0


def svg(chart: Chart, *, is_inline: bool = False) -> str:
    """Return the chart as an SVG document on white.

    is_inline: as a part of an HTML page instead, whose style sheet has the colours (`colour_rules`).
    """
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" role="img"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} aria-label="{escape(chart.title)}">',
        *([] if is_inline else [f"<style>{colour_rules(LIGHT)}</style>"]),
        f'<rect class="f-ground" width="{WIDTH}" height="{HEIGHT}"/>',
    ]
    for area in boxes(chart):
        place = f'x="{area.x:.1f}" y="{area.y:.1f}" width="{max(0.0, area.width):.1f}" height="{area.height:.1f}"'
        parts.append(f'<rect class="f-{area.role}" {place}/>')
    for stroke in strokes(chart):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in stroke.points)
        dash = ' stroke-dasharray="6 4"' if stroke.is_dashed else ""
        parts.append(f'<polyline class="s-{stroke.role}" points="{path}" fill="none"{dash}/>')
    for label in labels(chart):
        turn = f' transform="rotate({label.turn} {label.x:.1f} {label.y:.1f})"' if label.turn else ""
        place = f'x="{label.x:.1f}" y="{label.y:.1f}" text-anchor="{label.anchor}" font-size="{label.size}"'
        parts.append(f'<text class="f-{label.role}" {place}{turn}>{escape(label.text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def colour_rules(colours: Mapping[str, str]) -> str:
    """Return the style rules of a palette."""
    fills = "".join(f".f-{role}{{fill:{colour}}}" for role, colour in colours.items())
    lines = "".join(
        f".s-{role}{{stroke:{colour};stroke-width:{1 if role in ('axis', 'grid', 'mark') else 1.8}}}"
        for role, colour in colours.items()
    )
    return fills + lines


def write_png(chart: Chart, path: Path) -> None:
    """Write the chart as a PNG file. Raises UsageError without Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise UsageError("--png needs Pillow", hint="pip install mstarctl[runtime], or use --svg") from error
    image = Image.new("RGB", (WIDTH * PNG_SCALE, HEIGHT * PNG_SCALE), LIGHT["ground"])
    pen = ImageDraw.Draw(image)
    for area in boxes(chart):
        corners = (area.x, area.y, area.x + max(0.0, area.width), area.y + area.height)
        pen.rectangle([PNG_SCALE * value for value in corners], fill=LIGHT[area.role])
    for stroke in strokes(chart):
        _draw(pen, stroke)
    for label in labels(chart):
        _write(image, pen, label)
    image.save(path, "PNG")


def _draw(pen: ImageDraw, stroke: Stroke) -> None:
    width = PNG_SCALE * (1 if stroke.role in ("axis", "grid", "mark") else 2)
    points = [(PNG_SCALE * x, PNG_SCALE * y) for x, y in stroke.points]
    for start, end in itertools.pairwise(points):
        for low, high in _dashes(start, end) if stroke.is_dashed else ((start, end),):
            pen.line((low, high), fill=LIGHT[stroke.role], width=width)


Pixel = tuple[float, float]


def _dashes(start: Pixel, end: Pixel) -> Iterator[tuple[Pixel, Pixel]]:
    """Yield the dashes of a line, 6 pixels long and 4 apart."""
    (x0, y0), (x1, y1) = start, end
    length = max(1.0, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
    at, step = 0.0, 10.0 * PNG_SCALE
    while at < length:
        low, high = at / length, min(1.0, (at + 0.6 * step) / length)
        yield (x0 + (x1 - x0) * low, y0 + (y1 - y0) * low), (x0 + (x1 - x0) * high, y0 + (y1 - y0) * high)
        at += step


def _write(image: Any, pen: ImageDraw, label: Label) -> None:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=label.size * PNG_SCALE)  # an outline font that is part of Pillow
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[label.anchor]
    x, y = PNG_SCALE * label.x, PNG_SCALE * label.y
    if not label.turn:
        pen.text((x, y), label.text, fill=LIGHT[label.role], font=font, anchor=anchor)
        return
    left, top, right, bottom = pen.textbbox((0, 0), label.text, font=font)
    text = Image.new("RGBA", (int(right - left) + 4, int(bottom - top) + 4))
    ImageDraw.Draw(text).text((2 - left, 2 - top), label.text, fill=LIGHT[label.role], font=font)
    turned = text.rotate(-label.turn, expand=True)
    image.paste(turned, (round(x - turned.width / 2), round(y - turned.height / 2)), turned)


def _x(chart: Chart, value: float) -> float:
    return LEFT + value / chart.x_max() * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def strokes(chart: Chart) -> Iterator[Stroke]:
    """Yield grid, axes, lines, marks, and the lines of the legend."""
    if chart.bars:
        return
    for number in range(1, TICKS + 1):
        yield Stroke([(LEFT, _y(number / TICKS)), (WIDTH - RIGHT, _y(number / TICKS))], "grid")
    yield Stroke([(LEFT, TOP), (LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM)], "axis")
    if chart.has_right:
        yield Stroke([(WIDTH - RIGHT, TOP), (WIDTH - RIGHT, HEIGHT - BOTTOM)], "axis")
    for at, _ in chart.marks:
        yield Stroke([(_x(chart, at), TOP), (_x(chart, at), HEIGHT - BOTTOM)], "mark", is_dashed=True)
    for number, line in enumerate(chart.lines):
        yield Stroke(_points(chart, line), f"c{number % LINES}", line.is_right)
    for number, (line, at) in enumerate(_legend(chart)):
        yield Stroke([(at, 42), (at + SWATCH, 42)], f"c{number % LINES}", line.is_right)


def _points(chart: Chart, line: ChartLine) -> list[tuple[float, float]]:
    top = chart.y_max(is_right=line.is_right)
    return [(_x(chart, x), _y(y / top)) for x, y in line.points]


def _legend(chart: Chart) -> Iterator[tuple[ChartLine, float]]:
    """Yield the lines with the places of their swatches in the legend."""
    at = float(LEFT)
    for line in chart.lines:
        yield line, at
        at += SWATCH + 6 + CHAR_PX * len(_name(line)) + 24


def _name(line: ChartLine) -> str:
    return f"{line.name} (right axis)" if line.is_right else line.name


def boxes(chart: Chart) -> Iterator[Box]:
    """Yield shaded times and bars."""
    for low, high, _ in chart.bands:
        x = _x(chart, low)
        yield Box(x, TOP, max(2.0, min(_x(chart, high), WIDTH - RIGHT) - x), HEIGHT - TOP - BOTTOM, "band")
    high = _bar_height(chart)
    groups = list(dict.fromkeys(bar.group for bar in chart.bars))
    for number, bar in enumerate(chart.bars):
        role = f"c{groups.index(bar.group) % LINES}"
        yield Box(BAR_LEFT, TOP + number * high, bar.value * (WIDTH - BAR_ROOM), high * 0.8, role)


def _bar_height(chart: Chart) -> float:
    return min(40.0, (HEIGHT - TOP - 20) / max(1, len(chart.bars)))


def labels(chart: Chart) -> Iterator[Label]:
    """Yield title, legend, axis values and names."""
    yield Label(LEFT if not chart.bars else 16, 24, "start", chart.title, size=15)
    if chart.bars:
        high = _bar_height(chart)
        for number, bar in enumerate(chart.bars):
            at = TOP + number * high + high * 0.4 + 5
            yield Label(BAR_LEFT - 8, at, "end", f"{bar.group}: {bar.name}")
            yield Label(BAR_LEFT + 6 + bar.value * (WIDTH - BAR_ROOM), at, "start", f"{100 * bar.value:.0f} %", "dim")
        return
    for line, at in _legend(chart):
        yield Label(at + SWATCH + 6, 46, "start", _name(line), "dim")
    for number in range(TICKS + 1):
        share = number / TICKS
        yield Label(LEFT - 8, _y(share) + 4, "end", tick_text(chart.y_max(is_right=False) * share), "dim", 12)
        place = _x(chart, chart.x_max() * share), HEIGHT - BOTTOM + 18
        yield Label(*place, "middle", tick_text(chart.x_max() * share), "dim", 12)
        if chart.has_right:
            text = tick_text(chart.y_max(is_right=True) * share)
            yield Label(WIDTH - RIGHT + 8, _y(share) + 4, "start", text, "dim", 12)
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    yield Label(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 16, "middle", chart.x_label)
    yield Label(22, middle, "middle", chart.y_label, turn=-90)
    if chart.has_right:
        yield Label(WIDTH - 18, middle, "middle", chart.right_label, turn=90)
    for at, text in chart.marks:
        yield Label(_x(chart, at) + 4, TOP - 6, "start", text, "dim", 12)
    for low, _, text in chart.bands:
        yield Label(_x(chart, low) + 4, TOP + 14, "start", text, "dim", 12)
