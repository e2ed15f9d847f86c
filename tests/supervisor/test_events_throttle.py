"""Throttled events of preemptions and refusals: reported at once, then as sums at bounded rates."""

from __future__ import annotations

from typing import Any

from mstar_core.supervisor.events import PAUSE_MAX_S, PAUSE_MIN_S, EventThrottle, ThrottledCounter


def preempted(count: int, pages: int, last: int = 7) -> dict[str, float]:
    return {
        "worker-1.LLM.preempted": float(count),
        "worker-1.LLM.preempted_pages": float(pages),
        "worker-1.LLM.preempted_last": float(last),
    }


def events(
    throttle: EventThrottle, values: dict[str, float], now: float, **refused: float
) -> list[tuple[str, dict[str, Any]]]:
    return list(throttle.due(values, refused, now))


def test_one_preemption_is_reported_at_once_with_request_pages_and_reason() -> None:
    throttle = EventThrottle(lambda handle: f"r-{handle}")
    assert events(throttle, preempted(0, 0), 0.0) == []
    facts = {"request": "r-7", "node": "LLM", "rank": 1, "pages": 96, "why": "pool full"}
    assert events(throttle, preempted(1, 96), 0.1) == [("kv.preempt", facts)]
    assert events(throttle, preempted(1, 96), 60.0) == []


def test_an_unknown_request_is_not_named() -> None:
    ((_, facts),) = events(EventThrottle(lambda handle: ""), preempted(1, 5), 0.0)
    assert "request" not in facts


def test_a_burst_is_one_event_with_sums() -> None:
    throttle = EventThrottle(str)
    events(throttle, preempted(1, 10), 0.0)
    assert events(throttle, preempted(4, 40), PAUSE_MIN_S / 2) == []
    ((_, facts),) = events(throttle, preempted(6, 70), PAUSE_MIN_S + 0.1)
    assert (facts["requests"], facts["pages"]) == (5, 60)
    assert "request" not in facts


def test_a_burst_of_an_hour_is_about_sixty_events_with_complete_sums() -> None:
    counter, told, seen = ThrottledCounter(), 0, 0
    for tick in range(36_000):
        found = counter.increase(tick * 50, tick * 100, tick / 10)
        if found is not None:
            seen += 1
            told += found[0]
    assert 3600 / PAUSE_MAX_S < seen < 3600 / PAUSE_MAX_S + 12
    assert told == counter.reported > 36_000 * 50 - 50 * 10 * PAUSE_MAX_S - 1


def test_after_a_pause_the_next_one_is_reported_at_once() -> None:
    counter = ThrottledCounter()
    assert counter.increase(1, 1, 0.0) == (1, 1)
    assert counter.increase(2, 2, 1.1) == (1, 1)
    assert counter.increase(3, 3, 2.0) is None
    assert counter.increase(3, 3, 100.0) == (1, 1)
    assert counter.pause_s == PAUSE_MIN_S


def test_a_restarted_worker_restarts_its_count() -> None:
    throttle = EventThrottle(str)
    events(throttle, preempted(5, 50), 0.0)
    ((_, facts),) = events(throttle, preempted(1, 8), 50.0)
    assert (facts["request"], facts["pages"]) == ("7", 8)


def test_refusals_are_reported_by_code() -> None:
    throttle = EventThrottle(str)
    assert events(throttle, {}, 0.0, overloaded=3) == [("api.refused", {"code": "overloaded", "requests": 3})]
    assert events(throttle, {}, 0.1, overloaded=3, too_large=1) == [
        ("api.refused", {"code": "too_large", "requests": 1})
    ]
