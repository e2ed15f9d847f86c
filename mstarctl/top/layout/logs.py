"""Merged tail of the logs: time, process, level, message. It follows the newest line until it is scrolled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mstarctl.output.line import Line, cells, clip, fit, left, line, safe, wrap
from mstarctl.output.states import source_role
from mstarctl.output.units import counted
from mstarctl.top.data.logs import Logged
from mstarctl.top.data.view import View
from mstarctl.top.layout.scroll import FOLDS_BELOW, Window, framed

LEVEL_ROLES: Final = {"DEBUG": "faint", "INFO": "dim", "WARNING": "warn", "ERROR": "bad", "CRITICAL": "bad"}
SHORT_LEVELS: Final = {"WARNING": "WARN", "CRITICAL": "FATAL"}
TEXT_LINES: Final = 3
LEAST_BESIDE: Final = 12
"""Least cells beside time and process in which a message starts."""
INDENT: Final = "   "


def matching_lines(view: View, source: str, text: str) -> list[Logged]:
    """Return the lines of one process (empty: all) that contain `text` in message, fields, process, host or request."""
    if not source and not text:
        return list(view.logs)  # fast path for 10,000 lines, several times per second
    word = text.casefold()
    hosts = {child.name: child.host for child in view.store.children.values() if child.host}
    return [
        logged
        for logged in view.logs
        if source in ("", logged.source)
        and (
            not word
            or word in f"{logged.source} {hosts.get(logged.source, '')} {logged.request} {logged.text}".casefold()
        )
    ]


def tail(view: View, width: int, height: int, above: int, source: str = "", text: str = "") -> list[Line]:
    """Draw exactly `height` lines. above: rows scrolled up from the newest one."""
    matching = matching_lines(view, source, text)
    first = max(0, len(matching) - height - above)
    shown = matching[first : first + height]
    if not shown:
        why = "no line contains that text" if view.logs else "no log lines yet"
        return framed(view, [line((f"  {why}", "dim"))], (), Window(), 0, width, height)
    if width < FOLDS_BELOW:
        return _folded(view, matching[: first + height], len(matching), width, height)
    names = max(6, min(12, max(len(logged.source) for logged in shown)))
    rows = [log_line(logged, names) for logged in shown]
    return framed(view, rows, (), Window(offset=first), len(matching), width, height)


def log_line(logged: Logged, names: int) -> Line:
    """Draw one log line."""
    role = source_role(logged.source)
    level = SHORT_LEVELS.get(logged.level, logged.level[:5])
    row = line(
        (f" {logged.time[:8]:<8} ", "faint"),
        (left(safe(logged.source), names), role),
        " ",
        (f"{level:<5} ", LEVEL_ROLES.get(logged.level, "")),
    )
    if logged.request:
        row = row + line((f"{safe(logged.request)} ", "accent"))
    row = row + line((safe(logged.message), "bad" if logged.level in ("ERROR", "CRITICAL") else ""))
    return row + line((f"  {safe(logged.facts)}" if logged.facts else "", "dim"))


def _folded(view: View, lines: Sequence[Logged], total: int, width: int, height: int) -> list[Line]:
    """Draw the last of `found` that fit, each in as many lines as its message needs, at most three."""
    rows: list[Line] = []
    count = 0
    for logged in reversed(lines):
        rows = folded(logged, width - 1) + rows  # the last cell may belong to the scroll bar
        count += 1
        if len(rows) >= height:
            break
    mean_rows = len(rows) / count  # mean rows per log line, for the scroll bar
    is_whole = count == total and len(rows) <= height
    place = Window(offset=0 if is_whole else round((len(lines) - count) * mean_rows))
    return framed(
        view,
        rows[-height:],
        (),
        place,
        height if is_whole else max(height + 1, round(total * mean_rows)),
        width,
        height,
    )


def folded(logged: Logged, width: int) -> list[Line]:
    """Draw one log line on a narrow screen, with its level if above INFO."""
    level = "" if logged.level in ("INFO", "DEBUG") else f"{SHORT_LEVELS.get(logged.level, logged.level[:5])} "
    head = line(
        (f" {logged.time[:8]} " if logged.time else " ", "faint"),
        (f"{safe(logged.source)} ", source_role(logged.source)),
        (level, LEVEL_ROLES.get(logged.level, "")),
        (f"{safe(logged.request)} " if logged.request else "", "accent"),
    )
    role = "bad" if logged.level in ("ERROR", "CRITICAL") else ""
    message, room = safe(logged.text), width - len(INDENT)
    beside = width - head.width
    if cells(message) <= beside:
        return [head + line((message, role))]
    start = wrap(message, beside)[0] if beside >= LEAST_BESIDE else ""
    below = wrap(message[len(start) :].lstrip(" "), room)
    if len(below) >= TEXT_LINES:
        below = [*below[: TEXT_LINES - 2], clip(" ".join(below[TEXT_LINES - 2 :]), room)]
    return [head + line((start, role)), *(line(INDENT, (row, role)) for row in below)]


def sources(lines: Sequence[Logged]) -> list[str]:
    """Return the names of processes with log lines, sorted."""
    return sorted({logged.source for logged in lines})


def status(view: View, above: int, source: str, text: str, width: int) -> Line:
    """Draw the status line: filters, and whether the view follows."""
    following = ("following", "ok") if not above else (f"{counted(above, 'line')} above the newest", "warn")
    if width < FOLDS_BELOW:
        chosen = [(f"  {safe(word)}", "accent") for word in (source, text) if word]
        return fit(line(" ", following, *chosen, (f"  {len(view.logs)} kept", "faint")), width)
    return fit(
        line(
            (" ", ""),
            following,
            ("   from: ", "dim"),
            (safe(source) or "all", "accent" if source else "dim"),
            ("   text: ", "dim"),
            (safe(text) or "any", "accent" if text else "dim"),
            (f"   {counted(len(view.logs), 'line')} kept", "faint"),
        ),
        width,
    )
