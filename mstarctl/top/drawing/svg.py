"""SVG picture of a screen: a window with cells of fixed width, which every viewer aligns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

from mstarctl.top.drawing.line import Line, cells
from mstarctl.top.drawing.shapes import CELL_H, CELL_W, rectangle, runs, stroke
from mstarctl.top.drawing.theme import GROUND, style_of

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
    found = [
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
    found += [f'<g {at} shape-rendering="crispEdges">', *rects, "</g>"]
    return "\n".join([*found, f'<g {at} xml:space="preserve">', *marks, "</g>", "</svg>", ""])


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
    found: list[tuple[int, str]] = []
    x = 0
    for part in text.split("  "):
        lead = len(part) - len(part.lstrip(" "))
        body = part.strip(" ")
        if body:
            found.append((x + lead, body))
        x += cells(part) + 2
    return found
