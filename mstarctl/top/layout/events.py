"""The feed of events, newest last: preemptions, restarts, refusals, the turns of a deployment's life."""

from __future__ import annotations

from typing import Any, Final

from mstar_core.observe.frames import Event
from mstarctl.output.units import duration_text
from mstarctl.top.layout.scroll import Window, framed, scrolled
from mstarctl.top.line import Line, fit, left, line, safe, take
from mstarctl.top.view import View

BAD: Final = ("died", "failed", "fatal", "unhealthy", "lost", "stall", "killed")
WORN: Final = ("preempt", "refused", "restart", "degraded", "drain", "stale", "cut")
AMOUNTS: Final = ("pages", "requests", "rows", "tokens", "bytes")
SUBJECTS: Final = ("request", "child", "node")
GOOD: Final = ("ready", "resumed", "finished")


def role_of(kind: str) -> str:
    """The colour of an event's type."""
    if any(word in kind for word in BAD):
        return "bad"
    if any(word in kind for word in WORN):
        return "warn"
    return "ok" if any(word in kind for word in GOOD) else "accent"


def facts_text(facts: dict[str, Any]) -> str:
    """`r-7f11 96 pages (pool full)`: whom it is about, the rest as `key value`, the reason. Zeros say nothing."""
    words = [str(facts[key]) for key in SUBJECTS if facts.get(key) not in (None, "")]
    for key, value in facts.items():
        if key in (*SUBJECTS, "why", "cause") or value in (None, "", 0, [], {}):
            continue
        words.append(_fact(key, value))
    why = facts.get("why") or facts.get("cause")
    if isinstance(why, dict):
        why = why.get("message") or why.get("reason")
    return safe(" ".join(words) + (f" ({why})" if why else "")).strip()


def _fact(key: str, value: Any) -> str:
    if isinstance(value, float) and key.endswith("_s"):
        return f"{key.removesuffix('_s').replace('_', ' ')} {duration_text(value)}"
    if isinstance(value, int) and key in AMOUNTS:
        return f"{value} {key}"
    return f"{key.replace('_', ' ')} {value}"


def short(view: View, event: Event) -> Line:
    """One event in the line below a table."""
    return line(
        (f"{view.clock(event.time)} ", "faint"),
        (safe(event.type), role_of(event.type)),
        (f" {facts_text(event.facts)}", "dim"),
    )


def last(view: View, width: int) -> Line:
    """As many of the newest events as fit into one line."""
    newest = [short(view, event) for event in list(view.store.events)[-4:][::-1]]
    return fit(line(" ") + take(newest, width - 2, "   "), width)


def feed(view: View, width: int, height: int, window: Window, kinds: str = "") -> tuple[list[Line], list[str]]:
    """(exactly `height` lines with the newest at the end, keys of those that are shown). kinds: a part of the type."""
    found = [event for event in view.store.events if kinds in event.type]
    keys = [str(event.n) for event in found]
    if window.cursor is None:
        window = Window(offset=max(0, len(found) - height))
    window = scrolled(keys, window, height)
    shown = found[window.offset : window.offset + height]
    rows = [full(view, event, width) for event in shown] or [line(("  no events yet", "dim"))]
    shown_keys = [str(event.n) for event in shown]
    return framed(view, rows, shown_keys, window, len(found), width, height), shown_keys


def full(view: View, event: Event, width: int) -> Line:
    """One event as a row."""
    kind_width = 22 if width >= 70 else 14
    return line(
        (f" {view.clock(event.time)}  ", "dim"),
        (left(safe(event.type), kind_width), role_of(event.type)),
        ("  " + facts_text(event.facts), ""),
    )
