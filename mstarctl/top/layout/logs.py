"""The merged tail of the logs: time, process, level, message. Follows the newest line until it is scrolled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from mstarctl.top.layout.scroll import Window, framed
from mstarctl.top.line import Line, fit, left, line, safe
from mstarctl.top.view import Logged, View

LEVEL_ROLES: Final = {"DEBUG": "faint", "INFO": "dim", "WARNING": "warn", "ERROR": "bad", "CRITICAL": "bad"}
SHORT_LEVELS: Final = {"WARNING": "WARN", "CRITICAL": "FATAL"}
SOURCE_ROLES: Final = {"api": "node.1", "conductor": "node.2", "supervisor": "node.4"}


def parse(source: str, text: str) -> Logged:
    """A line as a child wrote it: JSON with time, level and message, or plain text."""
    try:
        facts: Any = json.loads(text) if text.startswith("{") else None
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        return Logged(source=source, message=text)
    return Logged(
        source=source,
        message=str(facts.get("message", text)),
        level=str(facts.get("level", "")).upper(),
        time=str(facts.get("time", ""))[11:],
        request=str(facts.get("request") or ""),
    )


def merged(lines: Sequence[Logged]) -> list[Logged]:
    """Lines of several processes by time. Plain text has none: it stays behind the line that it followed."""
    stamps: dict[str, str] = {}
    dated = []
    for logged in lines:
        stamps[logged.source] = logged.time or stamps.get(logged.source, "")
        dated.append((stamps[logged.source], logged))
    return [logged for _, logged in sorted(dated, key=lambda pair: pair[0])]


def wanted(view: View, source: str, text: str) -> list[Logged]:
    """Lines of one process (empty: all) that hold `text` in message, process or request."""
    if not source and not text:
        return list(view.logs)  # the usual case, ten thousand lines several times a second
    word = text.casefold()
    return [
        logged
        for logged in view.logs
        if source in ("", logged.source)
        and (not word or word in f"{logged.source} {logged.request} {logged.message}".casefold())
    ]


def tail(view: View, width: int, height: int, above: int, source: str = "", text: str = "") -> list[Line]:
    """Exactly `height` lines. above: rows that the view is scrolled up from the newest one."""
    found = wanted(view, source, text)
    first = max(0, len(found) - height - above)
    shown = found[first : first + height]
    if not shown:
        why = "no line holds that text" if view.logs else "no log lines yet"
        return framed(view, [line((f"  {why}", "dim"))], (), Window(), 0, width, height)
    names = max(6, min(12, max(len(logged.source) for logged in shown)))
    rows = [log_line(logged, names) for logged in shown]
    return framed(view, rows, (), Window(offset=first), len(found), width, height)


def log_line(logged: Logged, names: int) -> Line:
    """One line of a log."""
    role = SOURCE_ROLES.get(logged.source, "node.0")
    level = SHORT_LEVELS.get(logged.level, logged.level[:5])
    row = line(
        (f" {logged.time[:8]:<8} ", "faint"),
        (left(safe(logged.source), names), role),
        " ",
        (f"{level:<5} ", LEVEL_ROLES.get(logged.level, "")),
    )
    if logged.request:
        row = row + line((f"{safe(logged.request)} ", "accent"))
    return row + line((safe(logged.message), "bad" if logged.level in ("ERROR", "CRITICAL") else ""))


def sources(lines: Sequence[Logged]) -> list[str]:
    """The processes that have written, by name."""
    return sorted({logged.source for logged in lines})


def status(view: View, above: int, source: str, text: str, width: int) -> Line:
    """What is shown, and whether it follows."""
    following = ("following", "ok") if not above else (f"{above} lines above the newest", "warn")
    return fit(
        line(
            (" ", ""),
            following,
            ("   from: ", "dim"),
            (safe(source) or "all", "accent" if source else "dim"),
            ("   text: ", "dim"),
            (safe(text) or "any", "accent" if text else "dim"),
            (f"   {len(view.logs)} lines kept", "faint"),
        ),
        width,
    )
