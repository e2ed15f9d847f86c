"""The store of responses: limits of age, number and size, restarts, keys, conversations, damage, a full disk."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mstar_core.api.requests.response_store import ResponseStore, StoredResponse, StoreLimits, owner_of
from mstar_core.errors import RequestError, Unavailable

NOW = 1_000_000.0


class Clock:
    """Seconds since the epoch, as a test sets them."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened(
    folder: Path, *, ttl_s: float = 100.0, most: int = 100, most_bytes: int = 1 << 20, clock: Clock | None = None
) -> AsyncIterator[ResponseStore]:
    limits = StoreLimits(ttl_s=ttl_s, most=most, most_bytes=most_bytes)
    store = ResponseStore(folder / "responses.sqlite", limits, clock or Clock())
    try:
        yield store
    finally:
        await store.close()


def entry(name: str, **fields: Any) -> StoredResponse:
    fields = {"owner": b"", "status": "completed", "created": NOW, "body": b"{}", "items": b"[]", **fields}
    return StoredResponse(id=name, **fields)


async def test_an_entry_is_read_as_it_was_saved_also_by_the_next_process(tmp_path: Path) -> None:
    saved = entry("a", owner=owner_of("key"), body=b'{"x": "\xc3\xa9"}', items=b"[1]", status="queued")
    async with opened(tmp_path) as store:
        assert await store.find("a", saved.owner) is None
        assert not store.exists, "a lookup makes no file"
        assert await store.save(saved)
        assert await store.find("a", saved.owner) == saved
    async with opened(tmp_path) as store:
        assert await store.find("a", saved.owner) == saved
        await store.save(entry("a", owner=saved.owner, body=b"{2}"))
        again = await store.find("a", saved.owner)
        assert again is not None and again.body == b"{2}"


async def test_keys_do_not_see_each_others_entries_nor_does_the_file_hold_them(tmp_path: Path) -> None:
    one, two = owner_of("secret-one"), owner_of("secret-two")
    async with opened(tmp_path) as store:
        await store.save(entry("a", owner=one, body=b"one"))
        await store.save(entry("a", owner=two, body=b"two"))
        await store.save(entry("b", owner=two, previous="a"))
        for owner, body in ((one, b"one"), (two, b"two")):
            found = await store.find("a", owner)
            assert found is not None and found.body == body
        assert await store.find("a", b"") is None
        assert not await store.delete("b", one)
        assert [each.body for each in await store.conversation("b", two)] == [b"two", b"{}"]
        assert await store.conversation("b", one) == []
        assert b"secret" not in b"".join(path.read_bytes() for path in files(tmp_path))


async def test_the_files_belong_to_their_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with opened(tmp_path) as store:
            await store.save(entry("a"))
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path)}
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600} and "responses.sqlite" in modes


async def test_entries_leave_after_their_time_to_live_which_a_continuation_renews(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, ttl_s=100, clock=clock) as store:
        await store.save(entry("a"))
        await store.save(entry("b"))
        clock.now += 60
        await store.save(entry("c", previous="a"))
        clock.now += 60
        assert await store.find("b", b"") is None
        assert [each.id for each in await store.conversation("c", b"")] == ["a", "c"]
        await store.save(entry("d"))
        assert numbers(tmp_path) == 3, "what is past its time leaves the file too"
        clock.now += 101
        assert await store.find("d", b"") is None


async def test_the_entries_unused_for_the_longest_time_leave_first(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, most=3, clock=clock) as store:
        for number, (name, previous) in enumerate((("a", ""), ("b", ""), ("c", ""), ("d", "a"))):
            clock.now += 1
            await store.save(entry(name, previous=previous, created=NOW + number))
        stored = [name for name in "abcd" if await store.find(name, b"")]
        assert stored == ["a", "c", "d"], "d continues a, so a was used after b and c"


async def test_the_size_is_limited_and_one_entry_cannot_take_it_all(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, most_bytes=100_000, clock=clock) as store:
        assert not await store.save(entry("large", body=b"x" * 30_000))
        for number in range(20):
            clock.now += 1
            assert await store.save(entry(f"{number}", items=b"x" * 20_000))
        stored = [number for number in range(20) if await store.find(f"{number}", b"")]
        assert stored == [16, 17, 18, 19]
        assert sum(path.stat().st_size for path in files(tmp_path)) < 6_000_000


async def test_a_store_of_none_keeps_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, most=0) as store:
        assert not store.is_on and not await store.save(entry("a"))
        assert await store.find("a", b"") is None and not files(tmp_path)


async def test_a_conversation_whose_beginning_has_left_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for name, previous in (("a", ""), ("b", "a"), ("c", "b")):
            await store.save(entry(name, previous=previous))
        assert [each.id for each in await store.conversation("c", b"")] == ["a", "b", "c"]
        assert await store.delete("a", b"") and not await store.delete("a", b"")
        with pytest.raises(RequestError) as refused:
            await store.conversation("c", b"")
        assert (refused.value.code, refused.value.field) == ("previous_response_not_found", "previous_response_id")
        assert await store.conversation("x", b"") == []


@pytest.mark.parametrize("damage", ["head", "middle", "text"])
async def test_a_damaged_file_is_put_aside_and_the_store_goes_on(damage: str, tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for number in range(50):
            await store.save(entry(f"{number}", body=b"x" * 3000))
    path = tmp_path / "responses.sqlite"
    data = bytearray(path.read_bytes())
    if damage == "text":
        data = bytearray(b"not a database at all" * 100)
    else:
        start = 0 if damage == "head" else 4096
        data[start : start + 40_000] = b"\xff" * 40_000
    path.write_bytes(data)
    async with opened(tmp_path) as store:
        assert await store.find("1", b"") is None
        assert await store.save(entry("new"))
        assert await store.find("new", b"") is not None
    assert (tmp_path / "responses.sqlite.damaged").read_bytes()[:100] == bytes(data[:100])


async def test_a_file_of_another_layout_begins_empty(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "responses.sqlite") as connection:
        connection.executescript("CREATE TABLE responses (id TEXT); PRAGMA user_version = 77;")
    connection.close()
    async with opened(tmp_path) as store:
        assert await store.save(entry("a")) and await store.find("a", b"")


async def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    async with opened(tmp_path / "missing") as store:
        with pytest.raises(Unavailable) as refused:
            await store.save(entry("a"))
        assert refused.value.code == "storage_full"
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "responses.sqlite").symlink_to(tmp_path / "elsewhere")
    async with opened(tmp_path / "link") as store:
        with pytest.raises(Unavailable):
            await store.save(entry("a"))
    assert not (tmp_path / "elsewhere").exists()


async def test_many_callers_share_one_thread_which_ends_with_the_store(tmp_path: Path) -> None:
    async with opened(tmp_path, most=1000) as store:
        await asyncio.gather(*(store.save(entry(f"{number}")) for number in range(200)))
        founds = await asyncio.gather(*(store.find(f"{number}", b"") for number in range(200)))
        assert all(founds)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("mstar-responses")]
        assert len(names) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mstar-responses")]


async def test_a_slow_disk_does_not_block_the_loop(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.save(entry("a"))
        other = sqlite3.connect(store.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # the store's next write waits for the end of this
        waiting = asyncio.create_task(store.save(entry("b")))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        other.execute("COMMIT")
        other.close()
        assert await waiting


def numbers(folder: Path) -> int:
    """Return the number of entries in the file."""
    connection = sqlite3.connect(folder / "responses.sqlite")
    try:
        return int(connection.execute("SELECT COUNT(*) FROM responses").fetchone()[0])
    finally:
        connection.close()


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())
