"""Glyph sets of the screens: Unicode, and plain ASCII for `--ascii`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mstarctl.output.line import Line, Span, cells


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Glyphs:
    """One set. Each glyph is one cell wide. steps: levels of a sparkline, lowest first (index 0: blank).

    eighths: a bar's last cell, from one eighth to seven; if empty, bars have whole cells.
    lines: box drawing by the sum of the directions in which a line leaves a cell (1 up, 2 right, 4 down, 8 left);
    heavy ones for large rates, dashed ones between hosts.
    spans: queue, wait, compute, transfer, stall of a waterfall.
    """

    steps: str
    eighths: str
    full: str
    rest: str
    lines: str
    heavy: str
    dashed: str
    heavy_dashed: str
    frame: str
    box: str
    arrow_right: str
    arrow_left: str
    dot: str
    loop: str
    up: str
    down: str
    ready: str
    loading: str
    unwell: str
    failed: str
    done: str
    active: str
    rule: str
    bottleneck: str
    live: str
    pause: str
    record: str
    stale: str
    spans: dict[str, str]
    thumb: str
    track: str
    cursor: str
    into: str
    is_ascii: bool = False


#                0 . U . R . UR  D  UD  RD URD  L  UL RL URL DL UDL RDL all
UNICODE: Final = Glyphs(
    steps=" ▁▂▃▄▅▆▇█",
    eighths="▏▎▍▌▋▊▉",
    full="█",
    rest="░",
    lines=" ╵╶╰╷│╭├╴╯─┴╮┤┬┼",
    heavy=" ╹╺┗╻┃┏┣╸┛━┻┓┫┳╋",
    dashed=" ╵╶╰╷╎╭├╴╯╌┴╮┤┬┼",
    heavy_dashed=" ╹╺┗╻╏┏┣╸┛╍┻┓┫┳╋",
    frame="╔╗╚╝═║",
    box="╭╮╰╯─│",
    arrow_right="▶",
    arrow_left="◀",
    dot="●",
    loop="↻",
    up="↑",
    down="↓",
    ready="●",
    loading="◐",
    unwell="▲",
    failed="✕",
    done="✓",
    active="▶",
    rule="─",
    bottleneck="◀",
    live="▶",
    pause="‖",
    record="●",
    stale="◌",
    spans={"queue": "░", "wait": "─", "compute": "█", "transfer": "▒", "stall": "▓"},
    thumb="┃",
    track="│",
    cursor="▌",
    into="→",
)

ASCII: Final = Glyphs(
    steps=" .:-=+*#@",
    eighths="",
    full="#",
    rest=".",
    lines=" |-+||++-+-+++++",
    heavy=" !=+!!++=+=+++++",
    dashed=" :~+::++~+~+++++",
    heavy_dashed=" :~+::++~+~+++++",
    frame="++++=|",
    box="++++-|",
    arrow_right=">",
    arrow_left="<",
    dot="o",
    loop="@",
    up="^",
    down="v",
    ready="*",
    loading="~",
    unwell="!",
    failed="x",
    done="+",
    active=">",
    rule="-",
    bottleneck="<",
    live=">",
    pause="=",
    record="*",
    stale="?",
    spans={"queue": ".", "wait": "_", "compute": "#", "transfer": ":", "stall": "!"},
    thumb="#",
    track="|",
    cursor=">",
    into=">",
    is_ascii=True,
)

_SIMILAR: Final = {"…": "~", "→": ">", "←": "<", "↑": "^", "↓": "v", "°": "'", "×": "x", "·": ".", "–": "-", "’": "'"}


def in_ascii(row: Line) -> Line:
    """Replace non-ASCII characters cell by cell: known marks by a similar character, others by `?`."""
    if row.plain.isascii():
        return row
    return Line(tuple(Span("".join(_similar(char) for char in text), role) for text, role in row.spans))


def _similar(char: str) -> str:
    return char if char.isascii() else _SIMILAR.get(char, "?" * cells(char))
