"""SQLite store of responses that clients may retrieve or continue. Owned by the service, used by /v1/responses.

One thread of its own holds the only connection, so that a slow disk never blocks the event loop and statements need no
locks. Entries leave after their time to live, or when the store is full, the one unused for the longest time first.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from mstar_core.api.errors import storage_full
from mstar_core.errors import RequestError

T = TypeVar("T")

VERSION: Final = 1
"""Layout of the table. A file of another one begins empty."""

OWNER_BYTES: Final = 16
ENTRY_BYTES: Final = 512
"""Bytes that an entry takes beside its texts."""

LARGEST_SHARE: Final = 0.25
"""Largest part of the store that one entry may take, so that it does not drive out all others."""

MOST_TURNS: Final = 4096
"""Longest conversation that is followed back."""

WAL_BYTES: Final = 4 << 20
BUSY_S: Final = 5.0
BROKEN: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

NAMES: Final = ("id", "owner", "previous", "status", "created", "body", "items")
COLUMNS: Final = ", ".join(NAMES)
SAVED: Final = (*NAMES, "used", "size")
TABLE: Final = f"""
CREATE TABLE responses (
    id TEXT NOT NULL, owner BLOB NOT NULL, previous TEXT NOT NULL, status TEXT NOT NULL, created REAL NOT NULL,
    used REAL NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL, items BLOB NOT NULL,
    UNIQUE (owner, id)
);
CREATE INDEX by_use ON responses (used, created, size);
PRAGMA user_version = {VERSION};
"""
ANCESTORS: Final = f"""
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE owner = :owner AND id = :id AND used > :oldest
    UNION ALL
    SELECT r.id, r.previous, depth + 1 FROM responses r JOIN chain c ON r.owner = :owner AND r.id = c.previous
    WHERE c.depth < {MOST_TURNS}
)
"""

log = logging.getLogger("mstar.api.responses")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Limits of the store. ttl_s: of an entry, counted from its last use. most: number of entries; 0 stores none."""

    ttl_s: float
    most: int
    most_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """An entry. owner: digest of the API key that created it. previous: id of the response that it continues, or empty.

    status: of the response. body: JSON of the response. items: JSON list of its own input items. created: seconds since
    the epoch.
    """

    id: str
    owner: bytes
    previous: str = ""
    status: str
    created: float
    body: bytes
    items: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.items) + ENTRY_BYTES


def owner_of(key: str) -> bytes:
    """Return the digest of an API key that entries are stored under. The key itself is never written."""
    return hashlib.blake2b(key.encode(), digest_size=OWNER_BYTES).digest() if key else b""


class ResponseStore:
    """Entries of all API keys in one file of mode 0600. Opened by its first use.

    All methods raise Unavailable (`storage_full`) if the file cannot be read or written. A damaged file is put aside
    with a log message, and the store goes on empty.
    """

    def __init__(self, path: Path, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        """clock: seconds since the epoch."""
        self.path = path
        self.limits = limits
        self._clock = clock
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None

    @property
    def is_on(self) -> bool:
        """Return whether responses can be stored."""
        return self.limits.most > 0

    @property
    def exists(self) -> bool:
        """Return whether there may be entries, of this process or of an earlier one."""
        return self.is_on and (self._connection is not None or self.path.exists())

    async def save(self, entry: StoredResponse) -> bool:
        """Insert or replace an entry and mark the conversation before it as used. Returns False if it is too large."""
        if not self.is_on or entry.size_bytes > self.limits.most_bytes * LARGEST_SHARE:
            return False
        await self._run(lambda connection: self._save(connection, entry))
        return True

    async def find(self, response_id: str, owner: bytes) -> StoredResponse | None:
        """Return the entry of an id, if `owner` created it."""
        chosen = f"SELECT {COLUMNS} FROM responses WHERE owner = ? AND id = ? AND used > ?"
        return await self._read(lambda db: _entry(db.execute(chosen, (owner, response_id, self._oldest)).fetchone()))

    async def conversation(self, response_id: str, owner: bytes) -> list[StoredResponse]:
        """Return the entry of an id and all that it continues, the first one first; empty if the id is unknown.

        Raises RequestError (`previous_response_not_found`) if an earlier one has left the store.
        """
        columns = ", ".join(f"r.{name}" for name in NAMES)
        joined = "chain c JOIN responses r ON r.owner = :owner AND r.id = c.id"
        chosen = f"{ANCESTORS} SELECT {columns} FROM {joined} ORDER BY c.depth DESC"
        values = {"owner": owner, "id": response_id}
        entries = await self._read(
            lambda db: [_whole(row) for row in db.execute(chosen, {**values, "oldest": self._oldest}).fetchall()]
        )
        if entries and entries[0].previous:
            raise RequestError(
                f"{response_id[:80]} continues a response that is not stored any more",
                hint="send the whole conversation as input",
                field="previous_response_id",
                code="previous_response_not_found",
            )
        return entries or []

    async def delete(self, response_id: str, owner: bytes) -> bool:
        """Delete an entry. Returns whether there was one."""

        def run(connection: sqlite3.Connection) -> bool:
            with connection:
                done = connection.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, response_id))
            return done.rowcount > 0

        return bool(await self._read(run))

    async def close(self) -> None:
        """Close the file after all operations that have begun."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        await asyncio.get_running_loop().run_in_executor(thread, self._forget)
        thread.shutdown()

    @property
    def _oldest(self) -> float:
        return self._clock() - self.limits.ttl_s

    async def _read(self, operation: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run an operation that finds nothing in a store without a file."""
        return await self._run(operation) if self.exists else None

    async def _run(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="mstar-responses")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, operation)

    def _guarded(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return operation(self._open())
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in BROKEN:
                raise storage_full(error) from error
            self._put_aside(error)
        except OSError as error:
            raise storage_full(error) from error
        try:
            return operation(self._open())
        except (sqlite3.Error, OSError) as error:
            raise storage_full(error) from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self.path, timeout=BUSY_S, check_same_thread=False)
        try:
            connection.executescript(
                f"PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA secure_delete = ON;"
                f"PRAGMA journal_size_limit = {WAL_BYTES};"
            )
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version != VERSION:
                connection.executescript(f"DROP TABLE IF EXISTS responses; {TABLE}")
            if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise _damaged()
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _put_aside(self, error: sqlite3.Error) -> None:
        """Rename a damaged file, which replaces an earlier one, so that the next operation makes a new one."""
        self._forget()
        kept = self.path.with_name(f"{self.path.name}.damaged")
        log.error("the store of responses is damaged and begins empty", extra={"facts": {"why": str(error)}})
        for name in (f"{self.path}-wal", f"{self.path}-shm"):
            with suppress(FileNotFoundError):
                os.unlink(name)
        with suppress(FileNotFoundError):
            os.replace(self.path, kept)

    def _forget(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _save(self, connection: sqlite3.Connection, entry: StoredResponse) -> None:
        now = self._clock()
        fields = {name: getattr(entry, name) for name in NAMES} | {"used": now, "size": entry.size_bytes}
        places = ", ".join(f":{name}" for name in SAVED)
        with connection:
            connection.execute("DELETE FROM responses WHERE used <= ?", (self._oldest,))
            connection.execute(f"INSERT OR REPLACE INTO responses ({', '.join(SAVED)}) VALUES ({places})", fields)
            if entry.previous:
                touched = "UPDATE responses SET used = :now WHERE owner = :owner AND id IN (SELECT id FROM chain)"
                before = {"owner": entry.owner, "id": entry.previous, "oldest": self._oldest, "now": now}
                connection.execute(f"{ANCESTORS} {touched}", before)
            self._make_room(connection)

    def _make_room(self, connection: sqlite3.Connection) -> None:
        """Delete the entries that were unused for the longest time until the rest fits the limits."""
        count, size = connection.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM responses").fetchone()
        leaving = []
        for number, size_bytes in connection.execute("SELECT rowid, size FROM responses ORDER BY used, created"):
            if count <= self.limits.most and size <= self.limits.most_bytes:
                break
            leaving.append((number,))
            count, size = count - 1, size - size_bytes
        connection.executemany("DELETE FROM responses WHERE rowid = ?", leaving)


def _entry(columns: Sequence[Any] | None) -> StoredResponse | None:
    return None if columns is None else _whole(columns)


def _whole(columns: Sequence[Any]) -> StoredResponse:
    return StoredResponse(**dict(zip(NAMES, columns, strict=True)))


def _damaged() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("the file fails its check")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
