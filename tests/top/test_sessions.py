"""Screen of sessions: rows, their order, what fits, and the request that a row opens."""

from __future__ import annotations

import pytest

from mstar_core.observe.frames import DeploymentStatus, RequestStatus, SessionStatus
from mstarctl.client.store import Store
from mstarctl.top.data.view import View
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.scroll import Window
from mstarctl.top.layout.state import State
from mstarctl.top.navigation import move, opened

SPEAKERS = ("user", "model", "interrupted", "thinking", "silence")


def view(*sessions: SessionStatus) -> View:
    store = Store(t=100.0)
    store.deployment = DeploymentStatus(name="one", state="ready", pages_leased=5)
    store.sessions = {f"{session.kind}/{session.id}": session for session in sessions}
    return View(store=store)


def rows(shown: View, width: int = 120) -> list[list[str]]:
    lines = [row.plain for row in compose(shown, State(page="sessions"), width, 24).lines]
    first = next(number for number, text in enumerate(lines) if text.startswith(" SESSION"))
    return [text.split() for text in lines[first + 1 :]]


def test_a_row_says_who_speaks_and_what_happened() -> None:
    one = SessionStatus(
        id="sess_1",
        speaks="interrupted",
        began=40.0,
        answers=7,
        interrupts=3,
        false_starts=2,
        items=14,
        first_audio_ms=81.0,
        lease_ends=130.0,
    )
    assert rows(view(one))[0] == [
        *("sess_1", "realtime", "interrupted", "7", "3", "2", "14", "81"),
        *("30.0", "s", "1m00s"),
    ]


def test_realtime_sessions_come_before_chats_and_the_oldest_first() -> None:
    shown = view(
        SessionStatus(id="chat", kind="chat", began=1.0),
        SessionStatus(id="late", began=3.0, is_lost=True, speaks="model"),
        SessionStatus(id="early", began=2.0, running=1),
    )
    drawn = rows(shown)
    assert [row[0] for row in drawn[:3]] == ["early", "late", "chat"]
    assert drawn[1][2] == "away", "a lost connection is shown in place of the speaker"
    assert "in use" in " ".join(drawn[0])


def test_the_last_line_counts_the_speakers_and_the_leased_pages() -> None:
    shown = view(*(SessionStatus(id=name, speaks=name, began=1.0) for name in SPEAKERS))
    text = " ".join(" ".join(row) for row in rows(shown))
    assert "5 sessions user 1 model 1 interrupted 1 thinking 1 silence 1 leased 5 pages" in text


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_screen_keeps_the_speaker(width: int) -> None:
    assert rows(view(SessionStatus(id="a", speaks="thinking", began=1.0)), width)[0][:2] in (
        ["a", "thinking"],
        ["a", "realtime"],
    )
    assert "thinking" in rows(view(SessionStatus(id="a", speaks="thinking", began=1.0)), width)[0]


def test_without_sessions_the_screen_says_how_to_begin_one() -> None:
    assert "mstarctl talk one" in " ".join(" ".join(row) for row in rows(view()))


def test_enter_opens_the_latest_request_of_the_selected_session() -> None:
    shown = view(SessionStatus(id="a", began=1.0, request="r-1-2"), SessionStatus(id="b", began=2.0, request="r-7-1"))
    shown.store.requests = {
        "1": RequestStatus(id="r-7-1", handle=1, route="realtime", started=9.0),
        "2": RequestStatus(id="r-1-1", handle=2, route="realtime", started=5.0),
        "3": RequestStatus(id="r-1-2", handle=3, route="realtime", started=8.0),
        "4": RequestStatus(id="r-1-3", handle=4, route="chat", started=9.0),
    }
    state = State(page="sessions")
    assert opened(shown, state).request == "3"
    below = move(shown, State(page="sessions", sessions=Window(cursor="realtime/a")), 1)
    assert below.sessions.cursor == "realtime/b"
    assert opened(shown, below).request == "1" and opened(shown, below).came_from == "sessions"
    assert opened(view(SessionStatus(id="c", kind="chat")), state) == state
