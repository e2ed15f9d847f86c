"""A screen as an SVG picture: a window with cells of fixed width, so that every viewer aligns it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

from mstarctl.top.line import Line, cells
from mstarctl.top.theme import GROUND, style_of

CELL_W: Final = 8.43
CELL_H: Final = 16.5
FONT_PX: Final = 14
MARGIN: Final = 12.0
BAR_H: Final = 30.0
"""Box-drawing glyphs are 1.16 times the size of the font high: rows at that distance join."""

FONTS: Final = "'JetBrains Mono','Cascadia Mono','SF Mono',Menlo,'DejaVu Sans Mono',Consolas,monospace"


def svg(rows: Sequence[Line], title: str = "") -> str:
    """A document of about 2 bytes a cell. Every run of one style states its width, whatever font draws it."""
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
        f'<g transform="translate({MARGIN:.0f},{BAR_H:.0f})" xml:space="preserve">',
    ]
    for number, row in enumerate(rows):
        found += _row(row, number * CELL_H)
    return "\n".join([*found, "</g>", "</svg>", ""])


def _row(row: Line, y: float) -> list[str]:
    grounds, texts = [], []
    x = 0
    for text, role in row.spans:
        style = style_of(role, "true")
        wide = cells(text)
        fg, ground = (style.bg, style.fg) if style.reverse else (style.fg, style.bg)
        if ground and ground != GROUND:
            area = f'width="{wide * CELL_W:.1f}" height="{CELL_H}"'
            grounds.append(f'<rect x="{x * CELL_W:.1f}" y="{y:.1f}" {area} fill="{ground}"/>')
        for start, piece in _pieces(text):
            weight = ' font-weight="bold"' if style.bold else ""
            size = cells(piece)
            texts.append(
                f'<text x="{(x + start) * CELL_W:.1f}" y="{y + 12.7:.1f}" textLength="{size * CELL_W:.1f}" '
                f'lengthAdjust="spacingAndGlyphs" fill="{fg}"{weight}>{escape(piece)}</text>'
            )
        x += wide
    return grounds + texts


def _pieces(text: str) -> list[tuple[int, str]]:
    """Runs without two blanks in a row, with the cell where each begins."""
    found: list[tuple[int, str]] = []
    x = 0
    for part in text.split("  "):
        lead = len(part) - len(part.lstrip(" "))
        body = part.strip(" ")
        if body:
            found.append((x + lead, body))
        x += cells(part) + 2
    return found
