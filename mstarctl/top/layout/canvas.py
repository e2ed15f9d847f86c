"""Canvas: a grid of cells for text, frames and wires that join where they meet."""

from __future__ import annotations

from mstarctl.output.line import Line, Span, cells
from mstarctl.top.drawing.glyphs import Glyphs

UP, RIGHT, DOWN, LEFT = 1, 2, 4, 8


class Canvas:
    """`width` x `height` cells. Drawing outside has no effect."""

    def __init__(self, width: int, height: int, glyphs: Glyphs) -> None:
        self.width, self.height, self.glyphs = width, height, glyphs
        self._cells: list[list[Span]] = [[Span(" ")] * width for _ in range(height)]
        self._bits: dict[tuple[int, int], tuple[int, bool, bool, str]] = {}

    def put(self, x: int, y: int, text: str, role: str = "") -> None:
        """Write text from a cell to the right. A wide character takes two cells, the second one empty."""
        if not 0 <= y < self.height:
            return
        for char in text:
            size = cells(char)
            if size == 0:
                continue
            if 0 <= x and x + size <= self.width:
                self._cells[y][x] = Span(char, role)
                if size == 2:
                    self._cells[y][x + 1] = Span("", role)
            x += size

    def put_line(self, x: int, y: int, row: Line) -> None:
        """Write a finished line."""
        for text, role in row.spans:
            self.put(x, y, text, role)
            x += cells(text)

    def frame(self, x: int, y: int, width: int, height: int, role: str) -> None:
        """Draw a double frame."""
        a, b, c, d, flat, tall = tuple(self.glyphs.frame)
        self.put(x, y, a + flat * (width - 2) + b, role)
        self.put(x, y + height - 1, c + flat * (width - 2) + d, role)
        for row in range(y + 1, y + height - 1):
            self.put(x, row, tall, role)
            self.put(x + width - 1, row, tall, role)

    def wire(
        self,
        start: tuple[int, int],
        end: tuple[int, int],
        role: str,
        *,
        is_heavy: bool = False,
        is_dashed: bool = False,
    ) -> None:
        """Add a straight wire, both ends included. Wires that meet in a cell join."""
        (x0, y0), (x1, y1) = start, end
        step_x, step_y = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        out = {(1, 0): RIGHT, (-1, 0): LEFT, (0, 1): DOWN, (0, -1): UP}.get((step_x, step_y), 0)
        back = {RIGHT: LEFT, LEFT: RIGHT, UP: DOWN, DOWN: UP}.get(out, 0)
        x, y = x0, y0
        while True:
            bits = (back if (x, y) != (x0, y0) else 0) | (out if (x, y) != (x1, y1) else 0)
            old, heavy, dashed, before = self._bits.get((x, y), (0, False, True, role))
            stronger = before if before.startswith("flow") and "+off" not in before else role
            self._bits[x, y] = (old | bits, heavy or is_heavy, dashed and is_dashed, stronger)
            if (x, y) == (x1, y1):
                return
            x, y = x + step_x, y + step_y

    def ink(self) -> None:
        """Draw the wires into the cells. Later text overwrites them."""
        glyphs = self.glyphs
        for (x, y), (bits, is_heavy, is_dashed, role) in self._bits.items():
            if bits in (LEFT, RIGHT):
                bits = LEFT | RIGHT
            solid, dashed = (glyphs.heavy, glyphs.heavy_dashed) if is_heavy else (glyphs.lines, glyphs.dashed)
            self.put(x, y, (dashed if is_dashed else solid)[bits], role)
        self._bits.clear()

    def is_blank(self, x: int, y: int, width: int) -> bool:
        """Return whether these cells are blank."""
        if not (0 <= y < self.height and 0 <= x and x + width <= self.width):
            return False
        return all(self._cells[y][at].text == " " for at in range(x, x + width))

    def lines(self) -> list[Line]:
        """Return the rows, with adjacent cells of one role joined."""
        lines = []
        for row in self._cells:
            spans: list[Span] = []
            for text, role in row:
                if spans and spans[-1].role == role:
                    spans[-1] = Span(spans[-1].text + text, role)
                else:
                    spans.append(Span(text, role))
            lines.append(Line(tuple(spans)))
        return lines
