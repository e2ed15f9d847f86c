"""Requests whose owner does not know them any more: found at the second message that lacks them, newer ones never."""

from __future__ import annotations

from mstar_core.messages.requests import Reconcile
from mstar_core.process.leftovers import Leftovers


def test_a_request_has_to_be_unknown_twice_in_a_row() -> None:
    leftovers, held = Leftovers(), [1, 2, 3]
    assert leftovers.find(Reconcile(live=[1], newest=3), held) == []
    assert leftovers.find(Reconcile(live=[1, 2], newest=3), held) == [3], "the news of the second came late"
    assert leftovers.find(Reconcile(live=[1], newest=3), [1, 2]) == []
    assert leftovers.find(Reconcile(live=[1], newest=3), [1]) == [], "it has ended meanwhile"
    assert leftovers.closed == 1


def test_requests_that_are_newer_than_the_message_are_left() -> None:
    leftovers = Leftovers()
    for _ in range(3):
        assert leftovers.find(Reconcile(live=[], newest=4), [5, 6]) == []
    assert leftovers.closed == 0


def test_each_is_found_once() -> None:
    leftovers = Leftovers()
    found = [leftovers.find(Reconcile(live=[], newest=9), [1, 2] if turn < 2 else []) for turn in range(4)]
    assert found == [[], [1, 2], [], []] and leftovers.closed == 2
