"""Deployments that made ids, in a SQLite file of all gateways of a user, so that a restart does not forget them.

Names are stored as hashes, because those of sessions and voices contain the key of their client. A thread writes; a
lookup is one read by the primary key on the event loop, about 20 us, and only for ids that the memory does not have.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sqlite3
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

from mstar_core.gateway.tenants.accounts.folder import made
from mstar_core.gateway.tenants.store import BUSY_MS, Writer

FILE: Final = "ids.sqlite"
MOST_KEPT: Final = 65_536
"""Names of the file; the oldest are deleted."""

READ_BUSY_MS: Final = 20
"""Longest wait of a lookup. Readers of a WAL file wait for no writer, so only a checkpoint at its end can delay one."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS ids (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name BLOB NOT NULL UNIQUE, model TEXT NOT NULL, deployment TEXT NOT NULL,
    tenant TEXT NOT NULL
)
"""

log = logging.getLogger("mstar.gateway")


@dataclass(frozen=True, slots=True)
class KeptOwner:
    """The deployment that made an id, for a tenant."""

    model: str
    deployment: str
    tenant: str


class KeptIds:
    """The file of one gateway's worker. Owned by the door. Its faults are logged: ids are then looked for as before."""

    def __init__(self, folder: Path, most: int = MOST_KEPT) -> None:
        """Open the file, or create it with mode 0600. Raises OSError, sqlite3.Error and ConfigError."""
        self._most = most
        path = made(folder) / FILE
        path.touch(mode=0o600)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(SCHEMA)
        self._reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=READ_BUSY_MS / 1000)
        self._writer = Writer(connection)

    @classmethod
    def opened(cls, folder: Path) -> Self | None:
        """Open the file; None, with a warning, if it cannot be used."""
        try:
            return cls(folder)
        except Exception as error:  # noqa: BLE001  isolation boundary: a gateway serves without its memory too
            log.warning("ids are forgotten at a restart: %s cannot be used: %s", folder / FILE, error)
            return None

    def write(self, name: str, owner: KeptOwner) -> None:
        """Note who made an id. Returns at once."""
        self._writer.post(partial(_write, name=_hash(name), owner=owner, most=self._most))

    def find(self, name: str) -> KeptOwner | None:
        """Return who made an id, None if it is not known."""
        try:
            row = self._reader.execute(
                "SELECT model, deployment, tenant FROM ids WHERE name = ?", (_hash(name),)
            ).fetchone()
        except sqlite3.Error as error:
            log.warning("an id could not be looked up: %s", error)
            return None
        return None if row is None else KeptOwner(*row)

    async def flush(self) -> None:
        """Return when all that was noted is in the file."""
        await self._writer.call(lambda connection: None)

    async def close(self) -> None:
        """Write what was noted, and close the file."""
        await asyncio.to_thread(self._writer.close)
        self._reader.close()


def _write(db: sqlite3.Connection, name: bytes, owner: KeptOwner, most: int) -> None:
    row = (name, owner.model, owner.deployment, owner.tenant)
    cursor = db.execute("INSERT OR REPLACE INTO ids (name, model, deployment, tenant) VALUES (?, ?, ?, ?)", row)
    db.execute("DELETE FROM ids WHERE number <= ?", ((cursor.lastrowid or 0) - most,))


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=20).digest()
