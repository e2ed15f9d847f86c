"""Generated parts of docs/top.md: the table of keys, and screens of a recording as SVG. Used by docs_parts.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC
from functools import cache
from pathlib import Path

from mstarctl.top import navigation
from mstarctl.top.data.queries import DeploymentQueries
from mstarctl.top.data.recording import read_recording
from mstarctl.top.data.session import ReplaySession
from mstarctl.top.data.view import Link, View
from mstarctl.top.drawing.svg import svg
from mstarctl.top.keys import KEYS, works
from mstarctl.top.layout.footer import Hint
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.scroll import Window
from mstarctl.top.layout.state import PAGES, State

ROOT = Path(__file__).resolve().parent.parent
RECORDINGS = ROOT / "tests" / "top" / "recordings"
ONE_HOST, TWO_HOSTS = "qwen3_omni", "hosts"
"""Recordings of a deployment of two ranks."""

SIZE = (120, 34)
SMALL = ((80, 24), (40, 12))


def keys() -> str:
    """Return the table of keys by group, with the screens where they work."""
    rows = []
    for group in dict.fromkeys(key.group for key in KEYS):
        for key in (key for key in KEYS if key.group == group):
            where = (
                "everywhere"
                if len(key.pages) == len(PAGES) + 1
                else ", ".join(p for p in (*PAGES, "request") if p in key.pages)
            )
            rows.append(f"| {group} | `{key.shown}` | {key.help} | {where} |")
    return "\n".join(["| | key | action | where |", "| --- | --- | --- | --- |", *rows])


def screen(page: str, size: tuple[int, int] = SIZE, recording: str = ONE_HOST) -> str:
    """Draw one screen as SVG, at the end of the recording."""
    session, view = replayed(recording)
    state = State(page=page)
    if page == "overview":
        state = replace(state, requests=Window(cursor=navigation.request_keys(view, state)[3]))
    if page == "request":
        key = next(key for key, r in view.store.requests.items() if "audio" in r.outputs and r.audio_s > 3)
        state = replace(
            state, request=key, trace=DeploymentQueries(None, session).trace(view.store.requests[key], view.t)
        )
    return svg(compose(view, state, *size, hints(page)).lines, title="mstarctl top qwen3_omni")


def hints(page: str) -> list[Hint]:
    """Return the hints in the footer of a live screen."""
    found = sorted(
        (key for key in KEYS if key.footer and works(key, page, may_write=True, may_save=True, is_live=True)),
        key=lambda k: k.footer,
    )
    return [("1-7", "screen"), *((key.shown, key.label) for key in found)]


@cache
def replayed(recording: str) -> tuple[ReplaySession, View]:
    """Play a recording to its end."""
    session = ReplaySession(read_recording(RECORDINGS / f"{recording}.mstar.gz"), clock=lambda: 0.0)
    session.start()
    session.skip(1e6)
    return session, replace(session.view(), link=Link(hz=4.0), zone=UTC, phase=2)


TOP_PARTS: dict[str, Callable[[], str]] = {"top-keys": keys}
TOP_FILES: dict[str, Callable[[], str]] = {
    f"docs/images/top-{page}.svg": lambda page=page: screen(page)  # type: ignore[misc]  # bound in the loop
    for page in ("overview", "graph", "request", "ranks")
}
TOP_FILES |= {
    f"docs/images/top-overview-{size[0]}x{size[1]}.svg": lambda size=size: screen("overview", size)  # type: ignore[misc]
    for size in SMALL
}
TOP_FILES["docs/images/top-hosts.svg"] = lambda: screen("overview", recording=TWO_HOSTS)
