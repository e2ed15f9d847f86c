"""SVG shapes of block and line characters, because fonts leave gaps between them or lack some. Used by `svg`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

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
}  # fmt: skip
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
