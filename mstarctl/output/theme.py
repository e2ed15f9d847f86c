"""Styles by role: truecolour, the terminal's 16 colours, or none (bold and reverse alone).

Colour is never the only sign of a state: a glyph or a word stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from mstarctl.output.line import Line

Mode: TypeAlias = Literal["true", "light", "ansi", "mono"]
"""Colours of a style: a dark or light ground of its own, those of the terminal, or none."""

NODE_COLOURS: Final = 8
"""Roles `node.0` to `node.7`. A node has the same colour on all screens."""


@dataclass(frozen=True, slots=True)
class Style:
    """fg, bg: `#rrggbb`, the number of one of the 16 colours as text, or empty for the terminal's own."""

    fg: str = ""
    bg: str = ""
    bold: bool = False
    reverse: bool = False
    underline: bool = False


GROUND: Final = "#0e1218"
BAR: Final = "#1a212c"
CHOSEN: Final = "#23405c"
TEXT: Final = "#c5cdd8"

_TRUE: Final[dict[str, Style]] = {
    "": Style(TEXT),
    "dim": Style("#7f8a9a"),
    "faint": Style("#465162"),
    "value": Style("#f2f6fa"),
    "strong": Style("#f2f6fa", bold=True),
    "title": Style("#8ecbff", bold=True),
    "accent": Style("#6cb6ff"),
    "ok": Style("#72dfa4"),
    "warn": Style("#f4c56a"),
    "bad": Style("#ff7a88", bold=True),
    "hot": Style("#ffb454", bold=True),
    "bar": Style("#5aa9f0"),
    "rest": Style("#2b3442"),
    "frame": Style("#38465a"),
    "head": Style("#8b97a8", bold=True),
    "key": Style("#8ecbff", bold=True),
    "hint": Style("#8b97a8"),
    "tab": Style("#7f8a9a"),
    "tab.on": Style("#0e1218", "#6cb6ff", bold=True),
    "spark": Style("#4f8fc7"),
    "flow": Style("#7fd7c4"),
    "queue": Style("#7f8a9a"),
    "wait": Style("#465162"),
    "compute": Style("#5aa9f0"),
    "transfer": Style("#7fd7c4"),
    "stall": Style("#ff7a88"),
    "node.0": Style("#63d9c9"),
    "node.1": Style("#8ecbff"),
    "node.2": Style("#c3a6ff"),
    "node.3": Style("#ffa8d0"),
    "node.4": Style("#f7c873"),
    "node.5": Style("#b9e072"),
    "node.6": Style("#ffa581"),
    "node.7": Style("#9fe4ff"),
    "chart.0": Style("#2f6ea8"),
    "chart.1": Style("#3f86c4"),
    "chart.2": Style("#54a2e4"),
    "chart.3": Style("#7cc0ff"),
}

LIGHT_GROUND: Final = "#f7f8fa"

_LIGHT: Final[dict[str, Style]] = {
    "": Style("#2b3442"),
    "dim": Style("#5b6675"),
    "faint": Style("#8b97a8"),
    "value": Style("#10151c"),
    "strong": Style("#10151c", bold=True),
    "title": Style("#0b5cad", bold=True),
    "accent": Style("#0b66c3"),
    "ok": Style("#0f7a3d"),
    "warn": Style("#8a5a00"),
    "bad": Style("#b3122b", bold=True),
    "hot": Style("#9a4a00", bold=True),
    "bar": Style("#2f7fd0"),
    "rest": Style("#d5dbe3"),
    "frame": Style("#b4becb"),
    "head": Style("#5b6675", bold=True),
    "key": Style("#0b5cad", bold=True),
    "hint": Style("#5b6675"),
    "tab": Style("#5b6675"),
    "tab.on": Style("#ffffff", "#0b66c3", bold=True),
    "spark": Style("#3f86c4"),
    "flow": Style("#0c7a6a"),
    "queue": Style("#5b6675"),
    "wait": Style("#a8b3c1"),
    "compute": Style("#2f7fd0"),
    "transfer": Style("#0c7a6a"),
    "stall": Style("#b3122b"),
    "node.0": Style("#0c7a6a"),
    "node.1": Style("#0b66c3"),
    "node.2": Style("#6a3fc0"),
    "node.3": Style("#a82a72"),
    "node.4": Style("#8a5a00"),
    "node.5": Style("#4c7a00"),
    "node.6": Style("#a8431a"),
    "node.7": Style("#00718f"),
    "chart.0": Style("#9cc4ea"),
    "chart.1": Style("#74aade"),
    "chart.2": Style("#4d91d1"),
    "chart.3": Style("#2f7fd0"),
}

_ANSI: Final[dict[str, Style]] = {
    "": Style(),
    "dim": Style("8"),
    "faint": Style("8"),
    "value": Style("15"),
    "strong": Style("15", bold=True),
    "title": Style("14", bold=True),
    "accent": Style("12"),
    "ok": Style("2"),
    "warn": Style("3"),
    "bad": Style("9", bold=True),
    "hot": Style("11", bold=True),
    "bar": Style("4"),
    "rest": Style("8"),
    "frame": Style("8"),
    "head": Style("7", bold=True),
    "key": Style("14", bold=True),
    "hint": Style("7"),
    "tab": Style("7"),
    "tab.on": Style("0", "12", bold=True),
    "spark": Style("4"),
    "flow": Style("6"),
    "queue": Style("8"),
    "wait": Style("8"),
    "compute": Style("4"),
    "transfer": Style("6"),
    "stall": Style("9"),
    **{f"node.{i}": Style(colour) for i, colour in enumerate(("6", "12", "13", "5", "3", "10", "11", "14"))},
    **{f"chart.{i}": Style(colour) for i, colour in enumerate(("4", "4", "12", "12"))},
}

_MONO: Final[dict[str, Style]] = {
    **{role: Style() for role in _TRUE},
    "strong": Style(bold=True),
    "title": Style(bold=True),
    "bad": Style(reverse=True),
    "hot": Style(bold=True),
    "head": Style(bold=True),
    "key": Style(bold=True),
    "tab.on": Style(reverse=True),
}

_TABLES: Final[dict[Mode, dict[str, Style]]] = {"true": _TRUE, "light": _LIGHT, "ansi": _ANSI, "mono": _MONO}
ROLES: Final = frozenset(_TRUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Backgrounds of a mode that has its own: of the screen, the header and a selection. off: text that is greyed."""

    screen: str
    bar: str
    chosen: str
    off: str


GROUNDS: Final[dict[str, Ground]] = {
    "true": Ground(screen=GROUND, bar=BAR, chosen=CHOSEN, off="#465162"),
    "light": Ground(screen=LIGHT_GROUND, bar="#e4e9f0", chosen="#cfe3f8", off="#b4becb"),
}


def has_ground(mode: Mode) -> bool:
    """Return whether a mode paints the background, instead of leaving it to the terminal."""
    return mode in GROUNDS


@lru_cache(maxsize=1024)
def style_of(role: str, mode: Mode) -> Style:
    """Return the style of a role, combined with its marks: `+selected`, `+bar` (the header's strip), `+off`.

    Raises KeyError for an unknown role.
    """
    base, _, marks = role.partition("+")
    style, ground = _TABLES[mode][base], GROUNDS.get(mode)
    if ground is not None and not style.bg:
        style = replace(style, bg=ground.screen)
    for mark in filter(None, marks.split("+")):
        style = _marked(style, mark, mode) if ground is None else _grounded(style, mark, mode, ground)
    return style


def _grounded(style: Style, mark: str, mode: Mode, ground: Ground) -> Style:
    match mark:
        case "selected":
            return replace(style, bg=ground.chosen, fg=_lifted(style.fg) if mode == "true" else style.fg)
        case "bar":
            return replace(style, bg=ground.bar)
        case "off":
            return replace(style, fg=ground.off, bold=False)
    raise KeyError(mark)


def _marked(style: Style, mark: str, mode: Mode) -> Style:
    match mark, mode:
        case "selected", _:
            return Style(reverse=True, bold=style.bold)
        case "bar", _:
            return style
        case "off", "ansi":
            return Style("8")
        case "off", _:
            return Style()
    raise KeyError(mark)


def _lifted(fg: str) -> str:
    """Return a lighter grey that is readable on the colour of a selection."""
    return {"#465162": "#8b97a8", "#7f8a9a": "#b3bdca", "#2b3442": "#4a6480", "#38465a": "#6d84a0"}.get(fg, fg)


def sgr(row: Line, mode: Mode) -> str:
    """Return a line with escape sequences for `top --once`. The background is that of the terminal."""
    parts = []
    for text, role in row.spans:
        style = style_of(role, mode)
        codes = [*(["1"] if style.bold else []), *(["7"] if style.reverse else []), *_colour(style.fg, 38)]
        codes += _colour("" if style.bg in (GROUND, LIGHT_GROUND) else style.bg, 48)
        parts.append(f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if codes else text)
    return "".join(parts)


def _colour(colour: str, kind: int) -> list[str]:
    if not colour:
        return []
    if colour.startswith("#"):
        return [f"{kind};2;{int(colour[1:3], 16)};{int(colour[3:5], 16)};{int(colour[5:7], 16)}"]
    return [f"{kind};5;{colour}"]
