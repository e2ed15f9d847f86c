"""Logs screen: narrow terminals, and logs as the first screen."""

from __future__ import annotations

import json

import pytest

from mstarctl.client.store import Store
from mstarctl.top.app import TopApp
from mstarctl.top.data.logs import Logged, parse
from mstarctl.top.data.queries import DeploymentQueries
from mstarctl.top.data.view import View
from mstarctl.top.layout.logs import matching_lines, tail
from mstarctl.top.layout.state import State
from tests.top.screen import Screen, followed

MESSAGES = (
    "serving",
    "node LLM: KV pool 128 MiB: 262,144 tokens in 16,384 pages",
    "phase child=worker-0 phase=kv total=0 after=weights after_s=0.1",
)


def view_of(count: int) -> View:
    lines = [
        Logged(
            source="supervisor",
            message=MESSAGES[n % 3],
            level="WARNING" if n == count - 1 else "INFO",
            time=f"17:44:{n:02}.000",
        )
        for n in range(count)
    ]
    return View(store=Store(), logs=lines)


@pytest.mark.parametrize("width", [40, 54, 69])
@pytest.mark.parametrize("above", [0, 7])
def test_a_narrow_screen_shows_complete_messages(width: int, above: int) -> None:
    rows = tail(view_of(30), width, 9, above)
    assert (len(rows), {row.width for row in rows}) == (9, {width})
    text = "".join("".join(row.plain.rstrip("┃ ") for row in rows).split())
    newest = 29 - above
    for n in range(newest - 1, newest + 1):
        level = "WARN" if n == 29 else ""
        assert f"17:44:{n:02}supervisor{level}{MESSAGES[n % 3]}".replace(" ", "") in text
    assert ("┃" in text or any("┃" in row.plain for row in rows)) and f"17:44:{newest + 1:02}" not in text


def test_few_lines_are_at_the_top_without_a_scroll_bar() -> None:
    rows = tail(view_of(2), 40, 9, 0)
    assert "serving" in rows[0].plain and not any("┃" in row.plain for row in rows)


def test_a_very_long_message_takes_three_lines() -> None:
    view = View(store=Store(), logs=[Logged(source="api", message="word " * 99, time="17:44:00"), *view_of(1).logs])
    rows = [row.plain.rstrip() for row in tail(view, 40, 9, 0)]
    assert rows[2].endswith("…") and "supervisor" in rows[3]


@pytest.mark.parametrize("width", [140, 54])
def test_fields_of_a_line_are_shown(width: int) -> None:
    facts = {
        "time": "2026-11-23T17:44:00.120Z",
        "level": "INFO",
        "child": "api",
        "message": "answered",
        "status": 400,
        "code": "invalid_value",
        "ms": 12,
        "request": "r-1",
        "why": "",
    }
    logged = parse("api", json.dumps(facts))
    drawn = " ".join(" ".join(row.plain for row in tail(View(store=Store(), logs=[logged]), width, 5, 0)).split())
    assert "r-1 answered status=400 code=invalid_value ms=12" in drawn and "why" not in drawn
    assert matching_lines(View(store=Store(), logs=[logged]), "", "invalid_val") == [logged]


async def test_logs_are_read_when_they_are_the_first_screen() -> None:
    session, feed, admin = followed()
    app = TopApp(session, DeploymentQueries(admin, session), is_animated=False, state=State(page="logs"))
    async with app.run_test(size=(80, 24)) as pilot:
        assert "line of api" in await Screen(app, pilot, feed, admin).settled()
