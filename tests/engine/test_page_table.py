"""The page pool and its tables against a plain model of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.engine.cache.page_pool import OutOfPages, PagePool
from mstar_core.engine.cache.page_table import PageTables
from mstar_core.engine.cache.prefix_cache import ContentChain, PrefixCache
from mstar_core.errors import TooLarge

ROWS, PAGE, PAGES, LONGEST = 4, 3, 9, 18

ACTION = st.one_of(
    st.tuples(st.just("write"), st.integers(0, ROWS - 1), st.integers(1, 7)),
    st.tuples(st.just("fork"), st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)),
    st.tuples(st.just("truncate"), st.integers(0, ROWS - 1), st.integers(1, 4)),
    st.tuples(st.just("release"), st.integers(0, ROWS - 1), st.just(0)),
    st.tuples(st.just("remember"), st.integers(0, ROWS - 1), st.just(0)),
    st.tuples(st.just("adopt"), st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)),
    st.tuples(st.just("lease"), st.integers(0, ROWS - 1), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.just(0), st.integers(1, 3)),
)


class World:
    """Tables over real contents: a list of values per row says what the pages must hold."""

    def __init__(self) -> None:
        self.pool = PagePool(PAGES, PAGE)
        self.now = 0
        self.cache = PrefixCache(self.pool, lambda: self.now)
        self.tables = PageTables(self.pool, ROWS, LONGEST)
        self.memory = np.full((PAGES, PAGE), -1)
        self.rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.stamp = 0

    def write(self, row: int, count: int) -> None:
        before = (self.tables.ids.copy(), self.tables.count.copy(), self.pool.used)
        try:
            copies = self.tables.ensure(row, count)
        except (OutOfPages, TooLarge) as error:
            assert (before[0] == self.tables.ids).all() and (before[1] == self.tables.count).all()
            assert before[2] == self.pool.used
            if isinstance(error, TooLarge):
                assert len(self.rows[row]) + count > LONGEST
            return
        for copy in copies:
            self.memory[copy.target] = self.memory[copy.source]
        for _ in range(count):
            place = len(self.rows[row])
            self.stamp += 1
            self.memory[self.tables.ids[row, place // PAGE], place % PAGE] = self.stamp
            self.rows[row].append(self.stamp)
            self.tables.length[row] += 1
        assert self.tables.length[row] <= self.tables.capacity[row]

    def fork(self, source: int, into: int) -> None:
        if source != into:
            self.tables.fork(source, into)
            self.rows[into] = list(self.rows[source])

    def truncate(self, row: int, count: int) -> None:
        count = min(count, len(self.rows[row]))
        if count:
            self.tables.truncate(row, count)
            del self.rows[row][-count:]

    def release(self, row: int, _: int) -> None:
        self.tables.release(row)
        self.rows[row] = []

    def _keys(self, values: list[int]) -> list[bytes]:
        chain = ContentChain(PAGE)
        chain.extend(np.array(values, dtype=np.int32), b"")
        return chain.keys

    def remember(self, row: int, _: int) -> None:
        keys = self._keys(self.rows[row])
        self.cache.insert(keys, self.tables.pages(row)[: len(keys)])

    def lease(self, row: int, seconds: int) -> None:
        self.cache.leases.renew(str(row % 2), self.cache.find(self._keys(self.rows[row])), seconds)
        assert self.pool.leased <= 0.3 * PAGES

    def wait(self, _: int, seconds: int) -> None:
        self.now += seconds
        self.cache.leases.expire()

    def adopt(self, row: int, like: int) -> None:
        values = list(self.rows[like])
        self.release(row, 0)
        pages = self.cache.match(self._keys(values), len(values))
        assert len(pages) * PAGE < max(1, len(values))
        if pages:
            self.tables.adopt(row, pages)
            self.rows[row] = values[: len(pages) * PAGE]

    def check(self) -> None:
        for row, values in enumerate(self.rows):
            held = [int(self.memory[self.tables.ids[row, i // PAGE], i % PAGE]) for i in range(len(values))]
            assert held == values and self.tables.length[row] == len(values)
        counts = np.zeros(PAGES, dtype=int)
        for row in range(ROWS):
            counts[self.tables.pages(row)] += 1
        assert (self.pool.refs == counts).all()
        assert self.pool.used == (counts > 0).sum()
        assert self.pool.used + self.pool.cached + self.pool.free == PAGES


@settings(max_examples=120, deadline=None)
@given(st.lists(ACTION, max_size=40))
def test_tables_hold_what_was_written_and_counts_add_up(actions: list[tuple[str, int, int]]) -> None:
    world = World()
    for name, row, number in actions:
        {
            "write": world.write,
            "fork": world.fork,
            "truncate": world.truncate,
            "release": world.release,
            "remember": world.remember,
            "adopt": world.adopt,
            "lease": world.lease,
            "wait": world.wait,
        }[name](row, number)
        world.check()
    for row in range(ROWS):
        world.release(row, 0)
    assert world.pool.used == 0
    world.pool.evict_cached()
    assert world.pool.free == PAGES and world.pool.leased == 0


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(4, 2)
    pool.allocate(3)
    with pytest.raises(OutOfPages) as caught:
        pool.allocate(2)
    assert caught.value.facts["available"] == 1 and pool.used == 3


def test_cached_pages_are_evicted_oldest_and_deepest_first() -> None:
    pool = PagePool(4, 1)
    cache = PrefixCache(pool)
    old, new = pool.allocate(2), pool.allocate(2)
    cache.insert([b"a", b"ab"], old)
    cache.insert([b"x", b"xy"], new)
    pool.release(old)
    pool.release(new)
    assert (pool.used, pool.cached) == (0, 4)
    pool.allocate(1)
    assert cache.match([b"a", b"ab"], 9) == old[:1]
    pool.allocate(1)
    assert cache.match([b"a", b"ab"], 9) == [] and cache.match([b"x", b"xy"], 9) == new


def test_reused_pages_are_reported_for_clearing_once() -> None:
    pool = PagePool(2, 1)
    first = pool.allocate(2)
    assert pool.take_stale() == []
    pool.release(first)
    again = pool.allocate(1)
    assert pool.take_stale() == again and pool.take_stale() == []


def test_page_keys_depend_on_seed_order_and_cut() -> None:
    def keys(*parts: tuple[list[int], bytes | None]) -> list[bytes]:
        chain = ContentChain(2)
        for ids, seed in parts:
            chain.extend(np.array(ids, dtype=np.int32), seed)
        return chain.keys

    plain = keys(([1, 2, 3, 4], b""))
    assert plain == keys(([1, 2], b""), ([3, 4], b"")) and len(plain) == 2
    assert plain[0] != keys(([1, 2], b"image"))[0]
    assert plain[1] != keys(([9, 9, 3, 4], b""))[1]
    assert keys(([1, 2, 3], b""), ([4, 5], None)) == plain[:1]
