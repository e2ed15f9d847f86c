"""Words of the screens: one word for one thing, and plurals that fit their number."""

from __future__ import annotations

import pytest

from mstar_core.observe.frames import DeploymentStatus, NodeStatus, RankStatus, RequestStatus
from mstarctl.client.store import Store
from mstarctl.output.facts import facts_text
from mstarctl.top.data.logs import Logged
from mstarctl.top.data.view import Link, View
from mstarctl.top.layout.logs import status
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.request_list import Sort
from mstarctl.top.layout.request_list import status as requests_status
from mstarctl.top.layout.state import PAGES, State


def view() -> View:
    store = Store()
    store.deployment = DeploymentStatus(name="one", state="ready", waiting=1)
    store.ranks = {str(n): RankStatus(rank=n, nodes=["LLM"]) for n in range(2)}
    store.nodes = {"LLM@0": NodeStatus(name="LLM", rank=0, batch=1, step_ms=5.0, queue=2)}
    store.requests = {"1": RequestStatus(id="r", handle=1, state="queue")}
    store.truncated = {"requests": 1}
    return View(store=store, logs=[Logged(source="api", message="x")], link=Link(state="paused", behind=1))


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("size", [(140, 40), (80, 24)])
def test_one_of_a_thing_is_singular(page: str, size: tuple[int, int]) -> None:
    text = " ".join(" ".join(row.plain for row in compose(view(), State(page=page), *size).lines).split())
    wrong = ("1 updates", "1 events", "1 lines", "1 requests", "1 walks", "1 more were", "1 more ranks", "1 frames")
    assert [words for words in wrong if f" {words}" in text] == []


def test_waiting_requests_and_rows_have_one_word() -> None:
    text = "\n".join(row.plain for row in compose(view(), State(), 140, 40).lines)
    assert "1 queued" in text and "queue 2" in text and " wait " not in text.splitlines()[0]


def test_counts_at_the_edges_of_lists_are_singular() -> None:
    assert "1 more was not sent" in requests_status(view(), 1, 1, Sort(), 120).plain
    assert "1 line above the newest" in status(view(), 1, "", "", 120).plain
    assert "1 line kept" in status(view(), 0, "", "", 120).plain
    assert facts_text({"pages": 1, "requests": 2}) == "1 page 2 requests"


def test_realtime_sessions_are_shown_with_their_requests_interrupts_and_leases() -> None:
    quiet = view()
    assert "realtime" not in compose(quiet, State(), 140, 40).lines[1].plain
    facts = {"realtime_sessions": 3, "realtime_interrupts": 2, "pages_leased": 1}
    quiet.store.deployment = DeploymentStatus(name="one", state="ready", **facts)  # type: ignore[arg-type]
    quiet.store.requests = {
        "1": RequestStatus(id="r-1", handle=1, route="realtime", state="run"),
        "2": RequestStatus(id="r-2", handle=2, route="realtime", state="finished", ended=1.0),
        "3": RequestStatus(id="r", handle=3, route="chat", state="run"),
    }
    assert "realtime 3 (1 request)   interrupts 2   leased 1 page" in compose(quiet, State(), 140, 40).lines[1].plain
