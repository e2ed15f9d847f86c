"""SQLite store of responses that clients may retrieve or continue. Owned by the service, used by /v1/responses.

Entries leave after their time to live, or when the store is full, the one unused for the longest time first.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from mstar_core.api.requests.sqlite_file import SqliteFile
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
        self._file = SqliteFile(path, table="responses", create=TABLE, version=VERSION)

    @property
    def is_on(self) -> bool:
        """Return whether responses can be stored."""
        return self.limits.most > 0

    @property
    def exists(self) -> bool:
        """Return whether there may be entries, of this process or of an earlier one."""
        return self.is_on and self._file.exists

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
        await self._file.close()

    @property
    def _oldest(self) -> float:
        return self._clock() - self.limits.ttl_s

    async def _read(self, operation: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run an operation that finds nothing in a store without a file."""
        return await self._run(operation) if self.exists else None

    async def _run(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        return await self._file.run(operation)

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
