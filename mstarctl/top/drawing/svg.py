"""SVG pictures of screens: cells of fixed width, with block and line characters drawn as shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final
from xml.sax.saxutils import escape

from mstarctl.output.line import Line, cells
from mstarctl.output.theme import GROUND, style_of
from mstarctl.top.drawing.glyphs import UNICODE

CELL_W: Final = 8.43
CELL_H: Final = 16.5
STROKE: Final = {"light": 1.1, "heavy": 2.2, "double": 1.0}
GAP: Final = 2.6
"""Distance between the two strokes of a double line."""

UP, RIGHT, DOWN, LEFT = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class CellShape:
    """The part of a cell that a block element fills, as shares. opacity: of a shade character."""

    y: float = 0.0
    width: float = 1.0
    height: float = 1.0
    opacity: float = 1.0


CELL_SHAPES: Final = {
    "█": CellShape(),
    **{char: CellShape(y=1 - n / 8, height=n / 8) for n, char in enumerate("▁▂▃▄▅▆▇", 1)},
    **{char: CellShape(width=n / 8) for n, char in enumerate("▏▎▍▌▋▊▉", 1)},
    **{char: CellShape(opacity=share) for char, share in (("░", 0.35), ("▒", 0.6), ("▓", 0.8))},
}
LINES: Final = {
    **{char: (arms, "light") for arms, char in enumerate(UNICODE.lines) if arms},
    **{char: (arms, "heavy") for arms, char in enumerate(UNICODE.heavy) if arms},
    **{char: (arms, "double") for char, arms in (("═", 10), ("║", 5), ("╔", 6), ("╗", 12), ("╚", 3), ("╝", 9))},
}
"""Character -> the directions in which it leaves its cell, and its kind."""


def runs(text: str) -> Iterator[tuple[str, str]]:
    """Split text into runs of one kind: (`block` of one character, a kind of line, or `text`; the run)."""
    for kind, chars in groupby(text, lambda char: char if char in CELL_SHAPES else LINES.get(char, (0, "text"))[1]):
        yield ("block" if kind in CELL_SHAPES else kind), "".join(chars)


def rectangle(run: str, x: float, y: float, colour: str, inset: float = 0.0) -> str:
    """Draw a run of one block element. x, y: of its first cell, in pixels. inset: vertical margin of full blocks."""
    block = CELL_SHAPES[run[0]]
    is_joined = block.width == 1.0
    starts, count = (range(1), len(run)) if is_joined else (range(len(run)), 1)
    low, high = (inset, CELL_H - inset) if block.height == 1.0 else (block.y * CELL_H, CELL_H)
    top, bottom = round(y + low, 2), round(y + high, 2)  # adjacent edges must round to the same value
    sides = [(round(x + at * CELL_W, 1), round(x + (at + count * block.width) * CELL_W, 1)) for at in starts]
    return "".join(
        f'<rect x="{left:g}" y="{top:g}" width="{right - left:.1f}" height="{bottom - top:.2f}" '
        f'fill="{colour}"{_shade(block)}/>'
        for left, right in sides
    )


def _shade(block: CellShape) -> str:
    return "" if block.opacity == 1.0 else f' fill-opacity="{block.opacity}"'


def stroke(kind: str, run: str, x: float, y: float, colour: str) -> str:
    """Draw a run of one kind of line as one path."""
    steps: list[str] = []
    at = 0
    for char, same in groupby(run):
        count = len(list(same))
        arms = LINES[char][0]
        if arms == LEFT | RIGHT:
            steps += _level(kind, x + at * CELL_W, y, count * CELL_W)
        else:
            for n in range(count):
                steps += _turned(kind, arms, x + (at + n) * CELL_W, y)
        at += count
    return f'<path d="{"".join(steps)}" fill="none" stroke="{colour}" stroke-width="{STROKE[kind]}"/>'


def _level(kind: str, x: float, y: float, width: float) -> list[str]:
    middle = y + CELL_H / 2
    offsets = (-GAP / 2, GAP / 2) if kind == "double" else (0.0,)
    return [f"M{x:.1f} {middle + off:.1f}h{width:.1f}" for off in offsets]


def _turned(kind: str, arms: int, x: float, y: float) -> list[str]:
    """Return the strokes of one cell: a corner is one stroke (two if double), other characters one per direction."""
    middle_x, middle_y = x + CELL_W / 2, y + CELL_H / 2
    side = x + CELL_W if arms & RIGHT else x
    end = y if arms & UP else y + CELL_H
    is_corner = bool(arms & (LEFT | RIGHT)) and bool(arms & (UP | DOWN)) and arms.bit_count() == 2
    if kind == "double":
        if not is_corner:
            return [f"M{middle_x + off:.1f} {y:.1f}v{CELL_H}" for off in (-GAP / 2, GAP / 2)]
        inward_x, inward_y = (1 if arms & RIGHT else -1), (-1 if arms & UP else 1)
        return [
            f"M{side:.1f} {middle_y + inward_y * off:.1f}H{middle_x + inward_x * off:.1f}V{end:.1f}"
            for off in (-GAP / 2, GAP / 2)
        ]
    if is_corner and kind == "light":
        return [f"M{side:.1f} {middle_y:.1f}Q{middle_x:.1f} {middle_y:.1f} {middle_x:.1f} {end:.1f}"]
    ends = {UP: (middle_x, y), RIGHT: (x + CELL_W, middle_y), DOWN: (middle_x, y + CELL_H), LEFT: (x, middle_y)}
    return [f"M{middle_x:.1f} {middle_y:.1f}L{px:.1f} {py:.1f}" for arm, (px, py) in ends.items() if arms & arm]


FONT_PX: Final = 14
MARGIN: Final = 12.0
BAR_H: Final = 30.0
BAR_INSET: Final = 1.5
"""Margin between bars of adjacent rows. Charts and sparklines, which grow upward, have none."""

GROWING: Final = ("chart.", "spark")

FONTS: Final = "'JetBrains Mono','Cascadia Mono','SF Mono',Menlo,'DejaVu Sans Mono',Consolas,monospace"


def svg(rows: Sequence[Line], title: str = "") -> str:
    """Return the document. Each run of one style has an explicit width, independent of the font."""
    width = max((row.width for row in rows), default=0)
    size = (width * CELL_W + 2 * MARGIN, len(rows) * CELL_H + MARGIN + BAR_H)
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}" '
        f'font-family="{FONTS}" font-size="{FONT_PX}">',
        f'<rect width="100%" height="100%" rx="9" fill="{GROUND}"/>',
        *(
            f'<circle cx="{18 + 18 * n}" cy="15" r="5.5" fill="{colour}"/>'
            for n, colour in enumerate(("#ff6159", "#ffbd2e", "#28c941"))
        ),
        f'<text x="50%" y="20" text-anchor="middle" fill="#7f8a9a" font-size="13">{escape(title)}</text>',
    ]
    rects, marks = [], []
    for number, row in enumerate(rows):
        areas, others = _row(row, number * CELL_H)
        rects += areas
        marks += others
    at = f'transform="translate({MARGIN:.0f},{BAR_H:.0f})"'
    # Antialiased edges would leave gaps between adjacent blocks.
    elements += [f'<g {at} shape-rendering="crispEdges">', *rects, "</g>"]
    return "\n".join([*elements, f'<g {at} xml:space="preserve">', *marks, "</g>", "</svg>", ""])


def _row(row: Line, y: float) -> tuple[list[str], list[str]]:
    """Return the areas of a row, and the marks on them."""
    rects, marks = [], []
    x = 0
    for text, role in row.spans:
        style = style_of(role, "true")
        fg, ground = (style.bg, style.fg) if style.reverse else (style.fg, style.bg)
        if ground and ground != GROUND:
            area = f'width="{cells(text) * CELL_W:.1f}" height="{CELL_H}"'
            rects.append(f'<rect x="{x * CELL_W:.1f}" y="{y:.1f}" {area} fill="{ground}"/>')
        for kind, run in runs(text):
            match kind:
                case "block":
                    rects.append(rectangle(run, x * CELL_W, y, fg, 0.0 if role.startswith(GROWING) else BAR_INSET))
                case "text":
                    marks += _words(run, x, y, fg, is_bold=style.bold)
                case _:
                    marks.append(stroke(kind, run, x * CELL_W, y, fg))
            x += cells(run)
    return rects, marks


def _words(text: str, x: int, y: float, colour: str, *, is_bold: bool) -> list[str]:
    """Draw runs of letters, each with its width."""
    weight = ' font-weight="bold"' if is_bold else ""
    return [
        f'<text x="{(x + start) * CELL_W:.1f}" y="{y + 12.7:.1f}" textLength="{cells(piece) * CELL_W:.1f}" '
        f'lengthAdjust="spacingAndGlyphs" fill="{colour}"{weight}>{escape(piece)}</text>'
        for start, piece in _pieces(text)
    ]


def _pieces(text: str) -> list[tuple[int, str]]:
    """Split text at two or more blanks. Returns the runs with the cells where they start."""
    pieces: list[tuple[int, str]] = []
    x = 0
    for part in text.split("  "):
        lead = len(part) - len(part.lstrip(" "))
        body = part.strip(" ")
        if body:
            pieces.append((x + lead, body))
        x += cells(part) + 2
    return pieces
