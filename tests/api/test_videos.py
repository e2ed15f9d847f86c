"""The store of videos: limits of age and of bytes, the files that leave with their rows, owners."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mstar_core.api.videos.store import StoredVideo, VideoLimits, VideoStore
from tests.api.conftest import Started
from tests.api.test_responses import MODEL, service_of

NOW = 1_000_000.0
OWNER = b"one"


class Clock:
    """Seconds since the epoch, as a test sets them."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened(folder: Path, clock: Clock, *, ttl_s: float = 100.0, most: int = 1000) -> AsyncIterator[VideoStore]:
    store = VideoStore(folder / "videos", VideoLimits(ttl_s=ttl_s, most_bytes=most), clock)
    try:
        yield store
    finally:
        await store.close()


async def save(store: VideoStore, name: str, **fields: Any) -> None:
    """Save a row with a folder of files."""
    fields = {"owner": OWNER, "key": "", "status": "completed", "created": NOW, "ended": NOW, "size": 100, **fields}
    await store.save(StoredVideo(id=name, body=b"{}", request=b"{}", **fields))
    store.files(name).mkdir(exist_ok=True)
    (store.files(name) / "video.mp4").write_bytes(b"x")


async def found(store: VideoStore) -> list[str]:
    return [entry.id for entry in await store.page(OWNER, 100, None, is_ascending=True)]


async def test_a_video_leaves_with_its_files_after_its_time(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as store:
        await save(store, "old")
        await save(store, "runs", status="in_progress", ended=0.0)
        clock.now += 99
        assert await found(store) == ["old", "runs"]
        clock.now += 1
        assert await found(store) == ["runs"] and await store.find("old", OWNER) is None
        assert store.files("old").exists(), "files leave with the next row"
        await save(store, "new", created=clock.now, ended=clock.now)
        assert not store.files("old").exists() and store.files("runs").exists()


async def test_beyond_the_quota_the_one_that_ended_first_leaves(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock, most=250) as store:
        await save(store, "a", created=NOW, ended=NOW + 3)
        await save(store, "b", created=NOW + 1, ended=NOW + 2)
        await save(store, "c", created=NOW + 2, ended=NOW + 4)
        assert await found(store) == ["a", "c"]
        assert [store.files(name).exists() for name in "abc"] == [True, False, True]
        await save(store, "large", created=NOW + 3, status="in_progress", ended=0.0, size=1000)
        assert await found(store) == ["large"], "a video that is generated stays"


async def test_a_video_belongs_to_its_owner(tmp_path: Path) -> None:
    async with opened(tmp_path, Clock()) as store:
        await save(store, "a")
        assert await store.find("a", b"other") is None and not await store.delete("a", b"other")
        assert store.files("a").exists()
        assert await store.delete("a", OWNER) and not store.files("a").exists()


async def test_limits_of_the_store_reach_it(started: Started) -> None:
    async with started(model=MODEL, videos_ttl_s=5.0, videos_max_bytes=100_000) as api:
        assert service_of(api).videos.store.limits == VideoLimits(ttl_s=5.0, most_bytes=100_000)
