"""Colours of commands on a terminal, in the palette of `top`. Pipes and NO_COLOR get plain text."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Final, TextIO

from mstarctl.output.line import Line, Span, line
from mstarctl.output.options import GlobalOptions
from mstarctl.output.theme import Mode, sgr

PLAIN: Final = ("", "value")
"""Roles in the terminal's own colour: `top` draws on a dark ground, but a terminal may be light."""


@dataclass(frozen=True, slots=True)
class Paint:
    """Colours for one stream. mode: of the palette; `mono` leaves text as it is."""

    mode: Mode = "mono"

    @classmethod
    def of(cls, options: GlobalOptions, stream: TextIO | None = None) -> Paint:
        """Return the colours for `stream` (stdout): none for a pipe, --no-color and NO_COLOR."""
        if not options.is_coloured(sys.stdout if stream is None else stream):
            return cls()
        return cls("true" if has_many_colours() else "ansi")

    def text(self, text: str, role: str) -> str:
        """Return text in the colour of a role."""
        return self.line(line((text, role))) if text else text

    def line(self, row: Line) -> str:
        """Return a line with its colours, without blanks at its end."""
        if self.mode == "mono":
            return row.plain.rstrip() if row.plain.strip() else row.plain
        return "".join(self._span(span) for span in row.spans)

    def _span(self, span: Span) -> str:
        base = span.role.partition("+")[0]
        if base in PLAIN:
            return span.text
        return f"\x1b[1m{span.text}\x1b[0m" if base == "strong" else sgr(Line((span,)), self.mode)


def has_many_colours() -> bool:
    """Return whether the terminal declares truecolour, or 256 colours, whose terminals take truecolour too."""
    depth, term = os.environ.get("COLORTERM", "").lower(), os.environ.get("TERM", "")
    return depth in ("truecolor", "24bit") or "256color" in term or "direct" in term


def takes_ascii_only() -> bool:
    """Return whether stdout can encode only ASCII."""
    return (sys.stdout.encoding or "").lower().replace("-", "") not in ("utf8", "utf16")
