"""Output without a live terminal: `--once`, and raw frames for `-o json`. Imports no Textual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mstar_core.errors import Unreachable
from mstar_core.observe.frames import HelloFrame
from mstarctl.client.store import Store, decode
from mstarctl.output.line import Line
from mstarctl.top.data.feed import Lines, check
from mstarctl.top.data.history import History
from mstarctl.top.data.logs import Logged, merged, parse
from mstarctl.top.data.recording import Recording
from mstarctl.top.data.view import View
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.state import State

if TYPE_CHECKING:
    from mstarctl.client import AdminClient


def first_state(admin: Lines, filter_text: str = "") -> Store:
    """Return the state of a deployment from the first frames of a watch. The server applies the filter."""
    store = Store()
    arguments = {"filter": filter_text} if filter_text else {}
    for raw in admin.raw_lines("/v1/watch", hz=10, **arguments):
        frame = decode(raw) if raw.strip() else None
        if frame is None:
            continue
        store.apply(frame)
        if isinstance(frame, HelloFrame):
            check(frame)
        if store.is_synced:
            return store
    raise Unreachable("the watch ended before its first snapshot", hint="mstarctl ps")


def last_state(recording: Recording) -> tuple[Store, History]:
    """Return the state at the end of a recording, and the history before it."""
    store, history = Store(), History()
    for index in range(len(recording.lines)):
        frame = recording.entry(index).frame
        if frame is not None:
            store.apply(frame)
            history.note(store)
    return store, history


def raw_frames(admin: Lines, hz: float, filter_text: str = "") -> Iterator[str]:
    """Yield the raw lines of the watch, the output of `top -o json`."""
    arguments = {"filter": filter_text} if filter_text else {}
    for raw in admin.raw_lines("/v1/watch", hz=hz, **arguments):
        if raw.strip():
            yield raw.decode().rstrip("\n")


def screen_lines(view: View, state: State, width: int, height: int | None) -> list[Line]:
    """Return a screen without its footer. height: of the terminal; None shows every row."""
    tall = height + 2 if height is not None else 60 + len(view.store.requests) + len(view.store.events)
    lines = compose(view, state, width, max(14, tall)).lines[:-2]
    return without_gaps(lines) if height is None else lines


def log_lines(admin: AdminClient) -> list[Logged]:
    """Return the newest log lines of all processes, by time."""
    items = admin.lines("/v1/logs", tail=50)
    return merged([parse(str(item.get("from", "")), str(item.get("line", ""))) for item in items if item is not None])


def without_gaps(lines: list[Line]) -> list[Line]:
    """Remove blank lines at the end and repeated blank lines, which fill the unused rows of the screen."""
    kept: list[Line] = []
    for row in lines:
        if row.plain.strip() or (kept and kept[-1].plain.strip()):
            kept.append(row)
    return kept[:-1] if kept and not kept[-1].plain.strip() else kept
