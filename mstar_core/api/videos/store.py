"""Store of videos: rows in SQLite, files beside them. Owned by the service, used by /v1/videos.

A video leaves after its time to live, or when the files exceed their quota: the one that ended first goes first. Videos
that are still generated stay.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mstar_core.api.requests.sqlite_file import SqliteFile

VERSION: Final = 1
RUNNING: Final = ("queued", "in_progress")
NAMES: Final = ("id", "owner", "key", "status", "created", "ended", "size", "body", "request")
TABLE: Final = f"""
CREATE TABLE videos (
    id TEXT NOT NULL PRIMARY KEY, owner BLOB NOT NULL, key TEXT NOT NULL, status TEXT NOT NULL, created REAL NOT NULL,
    ended REAL NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL, request BLOB NOT NULL
);
CREATE INDEX by_owner ON videos (owner, created);
PRAGMA user_version = {VERSION};
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    """Limits of the store. ttl_s: of a video, counted from its end. most_bytes: of all files."""

    ttl_s: float
    most_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVideo:
    """A row. owner: digest that only requests of the same API key find. key: digest for admission; no key is stored.

    created, ended: seconds since the epoch, ended 0 while it runs. size: bytes of its files. body: JSON of the video.
    request: JSON that the video can be generated from again.
    """

    id: str
    owner: bytes
    key: str
    status: str
    created: float
    ended: float = 0.0
    size: int = 0
    body: bytes
    request: bytes


class VideoStore:
    """Rows and files of all videos of a deployment, in a folder of mode 0700."""

    def __init__(self, folder: Path, limits: VideoLimits, clock: Callable[[], float] = time.time) -> None:
        """clock: seconds since the epoch."""
        self.limits = limits
        self._folder = folder
        self._clock = clock
        self._file = SqliteFile(folder / "videos.sqlite", table="videos", create=TABLE, version=VERSION)

    @property
    def exists(self) -> bool:
        """Whether there may be videos."""
        return self._file.exists

    def files(self, video_id: str) -> Path:
        """Return the folder of a video's files."""
        return self._folder / video_id

    async def save(self, entry: StoredVideo) -> None:
        """Insert or replace a row. Raises Unavailable if it cannot be written."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        await self._file.run(lambda connection: self._save(connection, entry))

    async def find(self, video_id: str, owner: bytes) -> StoredVideo | None:
        """Return the video of an id, if `owner` created it and its time has not passed."""
        chosen = f"SELECT {', '.join(NAMES)} FROM videos WHERE id = ? AND owner = ?"
        if not self.exists:
            return None
        row = await self._file.run(lambda connection: connection.execute(chosen, (video_id, owner)).fetchone())
        entry = None if row is None else _entry(row)
        return None if entry is None or self._has_passed(entry) else entry

    async def page(self, owner: bytes, limit: int, after: str | None, *, is_ascending: bool) -> list[StoredVideo]:
        """Return up to `limit` videos of an owner behind the id `after`, by their time of creation."""
        if not self.exists:
            return []
        order = "ASC" if is_ascending else "DESC"
        chosen = f"SELECT {', '.join(NAMES)} FROM videos WHERE owner = ? ORDER BY created {order}, id {order}"
        rows = await self._file.run(lambda connection: connection.execute(chosen, (owner,)).fetchall())
        entries = [entry for entry in map(_entry, rows) if not self._has_passed(entry)]
        start = next((number for number, entry in enumerate(entries, 1) if entry.id == after), 0)
        return entries[start : start + limit]

    async def unfinished(self) -> list[StoredVideo]:
        """Return the videos that an earlier api was generating, the oldest first."""
        if not self.exists:
            return []
        chosen = f"SELECT {', '.join(NAMES)} FROM videos WHERE status IN (?, ?) ORDER BY created, id"
        rows = await self._file.run(lambda connection: connection.execute(chosen, RUNNING).fetchall())
        return list(map(_entry, rows))

    async def delete(self, video_id: str, owner: bytes) -> bool:
        """Delete a video with its files. Returns whether there was one."""
        if not self.exists:
            return False
        return await self._file.run(lambda connection: self._delete(connection, video_id, owner))

    async def close(self) -> None:
        """Close the file after all operations that have begun."""
        await self._file.close()

    def _has_passed(self, entry: StoredVideo) -> bool:
        return entry.ended > 0 and entry.ended + self.limits.ttl_s <= self._clock()

    def _save(self, connection: sqlite3.Connection, entry: StoredVideo) -> None:
        places = ", ".join(f":{name}" for name in NAMES)
        fields = {name: getattr(entry, name) for name in NAMES}
        with connection:
            connection.execute(f"INSERT OR REPLACE INTO videos ({', '.join(NAMES)}) VALUES ({places})", fields)
        self._make_room(connection)

    def _make_room(self, connection: sqlite3.Connection) -> None:
        """Delete videos whose time has passed, and those that ended first until the rest fits the quota."""
        total = connection.execute("SELECT COALESCE(SUM(size), 0) FROM videos").fetchone()[0]
        ended = connection.execute(
            "SELECT id, owner, ended, size FROM videos WHERE ended > 0 ORDER BY ended"
        ).fetchall()
        for video_id, owner, at, size in ended:
            if at + self.limits.ttl_s > self._clock() and total <= self.limits.most_bytes:
                break
            self._delete(connection, video_id, owner)
            total -= size

    def _delete(self, connection: sqlite3.Connection, video_id: str, owner: bytes) -> bool:
        with connection:
            done = connection.execute("DELETE FROM videos WHERE id = ? AND owner = ?", (video_id, owner))
        if done.rowcount > 0:
            shutil.rmtree(self.files(video_id), ignore_errors=True)
        return done.rowcount > 0


def _entry(columns: tuple[object, ...]) -> StoredVideo:
    return StoredVideo(**dict(zip(NAMES, columns, strict=True)))  # type: ignore[arg-type]  # as the table has them
