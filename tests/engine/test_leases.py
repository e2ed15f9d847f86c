"""Leases of sessions: what is evicted first, how much they may keep, and when they end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mstar_core.engine.base import Handle
from mstar_core.engine.cache.page_pool import OutOfPages, PagePool
from mstar_core.engine.cache.prefix_cache import PrefixCache
from tests.engine.fake_device import PAGE, FakeNode, alone


class Cached:
    """A cache of a pool, with a clock that a test sets."""

    def __init__(self, total: int) -> None:
        self.now = 0.0
        self.pool = PagePool(total, 1)
        self.cache = PrefixCache(self.pool, lambda: self.now)

    def keep(self, name: str, count: int) -> list[bytes]:
        """Cache pages that no table refers to any more. Returns their keys."""
        keys = [f"{name}{place}".encode() for place in range(count)]
        pages = self.pool.allocate(count)
        self.cache.insert(keys, pages)
        self.pool.release(pages)
        return keys

    def lease(self, session: str, keys: Sequence[bytes], seconds: float = 10) -> None:
        self.cache.leases.renew(session, self.cache.find(keys), seconds)

    def found(self, keys: Sequence[bytes]) -> int:
        return len(self.cache.find(keys))


def test_leased_pages_are_evicted_after_others_and_before_an_allocation_fails() -> None:
    world = Cached(10)
    old, new = world.keep("old", 3), world.keep("new", 6)
    world.lease("a", old)
    world.pool.allocate(7)
    assert (world.found(old), world.found(new)) == (3, 0)
    assert world.pool.available == 3 and world.pool.leased == 3
    world.pool.allocate(2)
    assert world.found(old) == 1 and world.pool.leased == 0, "the lease ended as a whole, its deepest pages are gone"
    with pytest.raises(OutOfPages):
        world.pool.allocate(2)


def test_the_oldest_lease_ends_where_the_share_is_exceeded() -> None:
    world = Cached(20)
    prefixes = [world.keep(name, 3) for name in "abc"]
    for session, keys in zip("abc", prefixes, strict=True):
        world.lease(session, keys)
    assert world.pool.leased == 6
    world.lease("b", prefixes[1])  # renewed, so that c is the oldest
    world.lease("a", prefixes[0])
    world.pool.allocate(14)
    assert [world.found(keys) for keys in prefixes] == [3, 3, 0]


def test_one_session_keeps_the_start_of_a_prefix_beyond_the_share() -> None:
    world = Cached(10)
    keys = world.keep("long", 8)
    world.lease("a", keys)
    world.pool.allocate(7)
    assert world.found(keys) == world.pool.leased == 3


def test_a_page_of_two_sessions_stays_leased_until_both_end() -> None:
    world = Cached(10)
    keys = world.keep("shared", 2)
    world.lease("a", keys)
    world.lease("b", keys)
    assert world.pool.leased == 2
    world.cache.leases.release("a")
    assert world.pool.leased == 2
    world.cache.leases.release("b")
    assert world.pool.leased == 0 and world.found(keys) == 2


def test_a_lease_ends_with_its_time() -> None:
    world = Cached(10)
    keys = world.keep("a", 2)
    world.lease("a", keys, seconds=5)
    other = world.keep("b", 2)
    world.now = 5.0
    world.cache.leases.expire()
    assert world.pool.leased == 0
    world.pool.allocate(8)
    assert (world.found(keys), world.found(other)) == (2, 0), "its pages age from the end of the lease"


def test_a_leased_page_in_use_becomes_leased_again_when_it_is_released() -> None:
    world = Cached(10)
    keys = world.keep("a", 2)
    world.lease("a", keys)
    pages = world.cache.find(keys)
    world.pool.share(pages)
    assert world.pool.used == 2 and world.pool.cached == 0 and world.pool.leased == 2
    world.pool.release(pages)
    world.pool.allocate(8)
    assert world.found(keys) == 2


def talk(node: FakeNode, handle: int, ids: list[int], session: str = "", steps: int = 6) -> int:
    """Run one request and close it. Returns the prompt ids that the cache supplied."""
    node.open(handle, 60)
    node.scheduler.lease(Handle(handle), session, 60.0)
    first = node.prefill(handle, ids, tokens_hash_seed=b"ids")
    loop = node.decode(handle, steps, tokens_hash_seed=b"ids")
    node.run()
    node.scheduler.close(Handle(handle))
    assert [int(node.done[first].outputs["token"]), *node.ids[loop]] == alone(ids, steps)
    return node.done[first].cached_tokens


def test_a_session_finds_its_pages_behind_the_traffic_of_others() -> None:
    for session, kept in (("mine", 16), ("", 0)):
        node = FakeNode(pages=20)
        first = list(range(10))
        talk(node, 0, first, session)
        assert node.memory.use().pages_leased == (4 if session else 0)
        for handle in range(1, 9):
            talk(node, handle, [(11 * handle + place) % 100 for place in range(30)])
        history = [*first, *alone(first, 6)]
        assert talk(node, 9, [*history, 50, 51], session) == kept
        node.scheduler.end_lease(session)
        assert node.memory.use().pages_leased == 0 and node.memory.use().pages_used == 0


def test_a_request_that_never_began_leaves_the_lease_as_it_is() -> None:
    node = FakeNode(pages=20)
    talk(node, 0, list(range(10)), "mine")
    node.open(1, 60)
    node.scheduler.lease(Handle(1), "mine", 60.0)
    node.scheduler.close(Handle(1))
    assert node.memory.use().pages_leased == 16 // PAGE


def test_a_lease_yields_to_a_request_before_anything_is_preempted() -> None:
    node = FakeNode(pages=17)
    talk(node, 0, list(range(10)), "mine")
    talk(node, 1, [(3 * place + 40) % 101 for place in range(52)], steps=8)
    assert node.memory.preempted == 0 and node.memory.use().pages_leased < 4
