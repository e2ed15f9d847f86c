"""SQLite file of the api: one table, one connection, one thread. Used by the stores of responses and of videos.

The thread holds the only connection, so that a slow disk never blocks the event loop and statements need no locks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from mstar_core.api.errors import storage_full

T = TypeVar("T")

WAL_BYTES: Final = 4 << 20
BUSY_S: Final = 5.0
BROKEN: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

log = logging.getLogger("mstar.api.storage")


class SqliteFile:
    """A file of mode 0600, opened by its first use.

    create: statements that make the table. version: of its layout; a file of another one begins empty. Operations raise
    Unavailable (`storage_full`) if the file cannot be read or written. A damaged file is put aside with a log message,
    and the store goes on empty.
    """

    def __init__(self, path: Path, *, table: str, create: str, version: int) -> None:
        self.path = path
        self._table = table
        self._create = create
        self._version = version
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None

    @property
    def exists(self) -> bool:
        """Whether there may be rows, of this process or of an earlier one."""
        return self._connection is not None or self.path.exists()

    async def run(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Run an operation on the file's thread, after those that were begun before it."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"mstar-{self._table}")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, operation)

    async def close(self) -> None:
        """Close the file after all operations that have begun."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        await asyncio.get_running_loop().run_in_executor(thread, self._forget)
        thread.shutdown()

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
            if version != self._version:
                connection.executescript(f"DROP TABLE IF EXISTS {self._table}; {self._create}")
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
        log.error("the store of %s is damaged and begins empty", self._table, extra={"facts": {"why": str(error)}})
        for name in (f"{self.path}-wal", f"{self.path}-shm"):
            with suppress(FileNotFoundError):
                os.unlink(name)
        with suppress(FileNotFoundError):
            os.replace(self.path, kept)

    def _forget(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _damaged() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("the file fails its check")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
