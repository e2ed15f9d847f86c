"""Sessions screen: one row for each conversation, with its speaker, its counts and its lease."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mstar_core.observe.frames import SessionStatus
from mstarctl.output.line import EMPTY, Line, clip_inside, fit, left, line, pair, right, safe, wrap
from mstarctl.output.units import counted, duration_text
from mstarctl.top.data.view import View
from mstarctl.top.drawing import numbers
from mstarctl.top.layout.scroll import Window, framed, scrolled

HINT: Final = "no session is open"
START: Final = "begin one:  mstarctl talk {name}"
ROLES: Final = {"user": "accent", "model": "ok", "interrupted": "warn", "thinking": "value", "silence": "dim"}
"""Role of the speaker, in the order of the summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionColumn:
    """One column. rank: columns with a small rank are kept longest. show: returns text and role of a cell."""

    title: str
    width: int
    rank: int
    show: Callable[[View, SessionStatus], tuple[str, str]]
    is_right: bool = True


def sessions_page(view: View, width: int, height: int, window: Window) -> tuple[list[Line], list[str]]:
    """Return (exactly `height` lines, keys of the visible sessions)."""
    keys = session_keys(view)
    room = height - 2
    window = scrolled(keys, window, room)
    shown = keys[window.offset : window.offset + room]
    chosen = columns(width)
    rows = [session_row(view, view.store.sessions[key], chosen) for key in shown] or hint_rows(view, width)
    titles = "".join(f" {_placed(column, column.title)} " for column in chosen)
    return [
        fit(line((titles, "head")), width),
        *framed(view, rows, shown, window, len(keys), width, room),
        fit(summary(view), width),
    ], shown


def session_keys(view: View) -> list[str]:
    """Return the keys of the rows: realtime sessions first, then chats; the oldest first."""
    sessions = view.store.sessions
    return sorted(sessions, key=lambda key: (sessions[key].kind != "realtime", sessions[key].began, key))


def latest_request(view: View, session: SessionStatus) -> str | None:
    """Return the key of the latest request of a session that is still shown, None without one."""
    family = session.request.rpartition("-")[0]
    requests = view.store.requests.items()
    keys = [key for key, r in requests if family and r.route == "realtime" and r.id.rpartition("-")[0] == family]
    return max(keys, key=lambda key: view.store.requests[key].started, default=None)


def columns(width: int) -> list[SessionColumn]:
    """Return the columns that fit, in order."""
    room, kept = width, []
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        room -= column.width + 2
        if room < 0:
            break
        kept.append(column)
    return [column for column in COLUMNS if column in kept]


def session_row(view: View, session: SessionStatus, chosen: list[SessionColumn]) -> Line:
    """Draw one session."""
    row = EMPTY
    for column in chosen:
        text, role = column.show(view, session)
        row = row + line(" ", (_placed(column, text), role), " ")
    return row


def summary(view: View) -> Line:
    """Draw the number of sessions, their speakers, and the pages under leases."""
    sessions = view.store.sessions.values()
    speakers = Counter(session.speaks for session in sessions)
    row = line((f" {counted(len(sessions), 'session')}", "dim"))
    for speaker, role in ROLES.items():
        if speakers[speaker]:
            row = row + line("   ") + pair(speaker, str(speakers[speaker]), role)
    leased = view.store.deployment.pages_leased
    return row + (line("   ") + pair("leased", counted(leased, "page")) if leased else EMPTY)


def hint_rows(view: View, width: int) -> list[Line]:
    """Say how to begin a session."""
    start = START.format(name=view.store.deployment.name or "NAME")
    texts = [*((row, "dim") for row in wrap(HINT, width - 3)), *((row, "value") for row in wrap(start, width - 3))]
    return [line("  ", text) for text in texts]


def _placed(column: SessionColumn, text: str) -> str:
    return right(text, column.width) if column.is_right else left(text, column.width)


def _speaks(view: View, session: SessionStatus) -> tuple[str, str]:
    if session.is_lost:
        return "away", "bad"
    return session.speaks, ROLES.get(session.speaks, "value")


def _count(value: int, role: str = "value") -> tuple[str, str]:
    return (str(value), role) if value else ("-", "faint")


def _lease(view: View, session: SessionStatus) -> tuple[str, str]:
    """Show how long the cached pages of an idle session are kept."""
    if session.running or session.lease_ends is None:
        return ("in use", "value") if session.running else ("-", "faint")
    left_s = session.lease_ends - view.t
    return (duration_text(left_s), "value") if left_s > 0 else ("ended", "dim")


COLUMNS: Final = (
    SessionColumn(
        title="SESSION",
        width=16,
        rank=0,
        is_right=False,
        show=lambda view, one: (clip_inside(safe(one.id), 16), "strong"),
    ),
    SessionColumn(title="KIND", width=8, rank=7, is_right=False, show=lambda view, one: (safe(one.kind), "dim")),
    SessionColumn(title="SPEAKS", width=11, rank=1, is_right=False, show=_speaks),
    SessionColumn(title="ANSWERS", width=7, rank=3, show=lambda view, one: _count(one.answers)),
    SessionColumn(title="INTERRUPTS", width=10, rank=4, show=lambda view, one: _count(one.interrupts)),
    SessionColumn(title="FALSE STARTS", width=12, rank=8, show=lambda view, one: _count(one.false_starts, "warn")),
    SessionColumn(title="ITEMS", width=5, rank=6, show=lambda view, one: _count(one.items)),
    SessionColumn(
        title="FIRST ms",
        width=8,
        rank=5,
        show=lambda view, one: (numbers.whole_ms(one.first_audio_ms), "value"),
    ),
    SessionColumn(title="LEASE", width=6, rank=9, show=_lease),
    SessionColumn(title="AGE", width=6, rank=2, show=lambda view, one: (duration_text(view.t - one.began), "dim")),
)
