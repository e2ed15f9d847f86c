"""Text snapshots of screens of recorded streams. `MSTAR_SNAPSHOTS=write` updates them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC
from functools import cache
from pathlib import Path

from mstar_core.observe.frames import Frame
from mstarctl.client.store import Store
from mstarctl.output.line import Line
from mstarctl.top import navigation
from mstarctl.top.data.queries import DeploymentQueries
from mstarctl.top.data.recording import Recording, read_recording
from mstarctl.top.data.session import ReplaySession
from mstarctl.top.data.view import Link, View
from mstarctl.top.drawing.glyphs import UNICODE, Glyphs
from mstarctl.top.layout.footer import Hint
from mstarctl.top.layout.pages import Painted, compose
from mstarctl.top.layout.scroll import Window
from mstarctl.top.layout.state import PAGES, State
from tests.top.recorded import RECORDINGS

SIZES = ((120, 34), (80, 24), (40, 12))
EVERY_PAGE = (*PAGES, "request")
SNAPSHOTS = Path(__file__).parent / "snapshots"
HINTS: tuple[Hint, ...] = (("1-8", "screen"), ("/", "filter"), ("enter", "open"), ("space", "pause"), ("q", "quit"))


@cache
def recording(name: str) -> Recording:
    """Read a stored recording."""
    return read_recording(RECORDINGS / f"{name}.mstar.gz")


def replayed(name: str, *, glyphs: Glyphs = UNICODE) -> ReplaySession:
    """Return a replay at the end of a recording."""
    session = ReplaySession(recording(name), glyphs=glyphs, clock=lambda: 0.0)
    session.start()
    session.skip(1e6)
    return session


@cache
def view_of(name: str, glyphs: Glyphs = UNICODE) -> View:
    """Return the view at the end of a recording, shown as live."""
    return replace(replayed(name, glyphs=glyphs).view(), link=Link(hz=4.0), zone=UTC, phase=2)


def view_after(frames: Iterable[Frame], **changes: object) -> View:
    """Return the view after some frames."""
    store = Store()
    for frame in frames:
        store.apply(frame)
    return replace(View(store=store, zone=UTC), **changes)  # type: ignore[arg-type]  # named fields of View


@cache
def state_of(page: str, name: str = "qwen3_omni") -> State:
    """Return a state with a selected row and an open request with spans."""
    state = State(page=page)
    view = view_of(name)
    if page in ("overview", "requests"):
        return replace(state, requests=Window(cursor=navigation.request_keys(view, state)[3]))
    if page == "request":
        key = next(k for k, r in view.store.requests.items() if "audio" in r.outputs and r.audio_s > 3)
        trace = DeploymentQueries(None, replayed(name)).trace(view.store.requests[key], view.t)
        return replace(state, request=key, trace=trace)
    return state


def painted(page: str, width: int, height: int, name: str = "qwen3_omni", glyphs: Glyphs = UNICODE) -> Painted:
    """Draw one screen of a recording."""
    return compose(view_of(name, glyphs), state_of(page, name), width, height, HINTS)


def text_of(lines: Sequence[Line]) -> str:
    """Return the screen as text; a bar at the end of each line makes blanks visible."""
    return "".join(f"{row.plain}|\n" for row in lines)


def check(name: str, text: str) -> None:
    """Compare with the stored snapshot, or update it on request."""
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("MSTAR_SNAPSHOTS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    stored = path.read_text(encoding="utf-8") if path.exists() else ""
    assert text == stored, f"{path.name} differs; look at it, then: MSTAR_SNAPSHOTS=write pytest tests/top"
