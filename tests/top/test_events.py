"""Event feed on narrow screens: no text is clipped if there is room, and the selected event is visible."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from mstar_core.observe.frames import Event
from mstarctl.client.store import Store
from mstarctl.output.facts import facts_text
from mstarctl.top.data.view import View
from mstarctl.top.layout.events import feed
from mstarctl.top.layout.scroll import Window

FACTS: list[tuple[str, dict[str, Any]]] = [
    ("child.spawned", {"child": "worker-0", "pid": 14721, "incarnation": 1}),
    ("phase", {"child": "worker-0", "phase": "kv", "after": "weights", "after_s": 21.4}),
    ("kv.preempt", {"request": "r-7f11", "pages": 96, "why": "pool full"}),
    ("child.died", {"child": "worker-0", "status": -9, "cause": "worker-0 was killed by SIGKILL", "phase": "ready"}),
    ("deployment.draining", {}),
]


def view_of(count: int) -> View:
    events = (Event(n=n, time=60.0 * n, type=FACTS[n % 5][0], facts=FACTS[n % 5][1]) for n in range(count))
    return View(store=Store(events=deque(events)))


def words_of(rows: list[Any]) -> str:
    return "".join("".join(row.plain.rstrip("┃ ") for row in rows).split())


@pytest.mark.parametrize("width", [40, 54, 69])
def test_a_narrow_feed_ends_with_the_newest_events_in_full(width: int) -> None:
    view = view_of(40)
    rows, keys = feed(view, width, 9, Window())
    assert (len(rows), {row.width for row in rows}) == (9, {width})
    shown = sorted({int(key) for key in keys})
    assert shown == list(range(40 - len(shown), 40)) and len(shown) >= 4
    for n in shown:
        assert f"{FACTS[n % 5][0]}{facts_text(FACTS[n % 5][1])}".replace(" ", "") in words_of(rows)


@pytest.mark.parametrize("marked", [0, 1, 17, 38, 39])
def test_the_selected_event_is_visible_in_full(marked: int) -> None:
    rows, keys = feed(view_of(40), 40, 9, Window(cursor=str(marked)))
    kind, facts = FACTS[marked % 5]
    block = [row for row, key in zip(rows, keys, strict=False) if key == str(marked)]
    assert words_of(block).endswith(f"{kind}{facts_text(facts)}".replace(" ", ""))
    assert all("+selected" in span.role for row in block for span in row.spans[:1])


def test_few_events_are_at_the_top_without_a_scroll_bar() -> None:
    rows, keys = feed(view_of(2), 40, 9, Window())
    assert sorted(set(keys)) == ["0", "1"] and "┃" not in "".join(row.plain for row in rows)
    empty, none = feed(view_of(0), 40, 9, Window())
    assert (len(empty), none) == (9, []) and "no events yet" in empty[0].plain


def test_a_very_long_text_takes_three_lines() -> None:
    view = View(store=Store(events=deque([Event(n=1, time=0.0, type="child.died", facts={"why": "word " * 90})])))
    rows, keys = feed(view, 40, 9, Window())
    assert len(keys) == 4 and rows[3].plain.rstrip().endswith("…")


def test_lists_sizes_and_times_of_an_event_are_formatted() -> None:
    facts = {"ranks": ["0 cpu: LLM", "1 cpu: codec"], "free_bytes": 3 << 30, "phases_s": {"kv": 0.22, "fetch": 21.4}}
    assert facts_text(facts) == "ranks 0 cpu: LLM, 1 cpu: codec free 3.0 GiB (kv 220 ms, fetch 21.4 s)"
