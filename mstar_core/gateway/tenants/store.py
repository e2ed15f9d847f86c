"""SQLite file of quotas and usage in the gateway's state folder, shared by gateways and read by `mstarctl usage`.

One thread of a gateway writes: operations that wait together are one transaction, so the event loop never waits for the
disk. WAL: readers and a second gateway go on meanwhile, and a killed process loses nothing that was committed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from mstar_core.errors import ConfigError, MstarError
from mstar_core.gateway.tenants.accounts.folder import made

FILE: Final = "usage.sqlite"
VERSION: Final = 1
BUSY_MS: Final = 10_000
"""Longest wait for a transaction of another gateway."""

MOST_TOGETHER: Final = 256
"""Operations of one transaction."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS counters (
    tenant TEXT NOT NULL, quota TEXT NOT NULL, window INTEGER NOT NULL,
    used REAL NOT NULL DEFAULT 0, reserved REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, quota, window)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS journal (
    number INTEGER PRIMARY KEY, request TEXT NOT NULL, gateway TEXT NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL,
    model TEXT NOT NULL, route TEXT NOT NULL, deployment TEXT NOT NULL DEFAULT '', day INTEGER NOT NULL,
    admitted REAL NOT NULL, closed REAL, status INTEGER, state TEXT NOT NULL DEFAULT 'running',
    tokens_held REAL NOT NULL DEFAULT 0, audio_held REAL NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS journal_request ON journal (request);
CREATE INDEX IF NOT EXISTS journal_open ON journal (tenant) WHERE closed IS NULL;
CREATE INDEX IF NOT EXISTS journal_admitted ON journal (admitted);
CREATE INDEX IF NOT EXISTS journal_pending ON journal (number) WHERE state = 'running';
CREATE TABLE IF NOT EXISTS reports (
    report TEXT PRIMARY KEY, number INTEGER NOT NULL, input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, audio_in_s REAL NOT NULL,
    audio_out_s REAL NOT NULL, images INTEGER NOT NULL, video_s REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS reports_number ON reports (number);
CREATE TABLE IF NOT EXISTS usage (
    day INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL DEFAULT 0, errors INTEGER NOT NULL DEFAULT 0, unknown INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0, audio_in_s REAL NOT NULL DEFAULT 0, audio_out_s REAL NOT NULL DEFAULT 0,
    images INTEGER NOT NULL DEFAULT 0, video_s REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (day, tenant, key, model)
) WITHOUT ROWID;
"""

ADDED: Final = {"usage": {"refused": "INTEGER", "device_s": "REAL"}, "reports": {"device_s": "REAL"}}
"""Columns by table that older files lack. They have a default, so that an older version can go on writing its rows."""

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T]
"""Runs inside a transaction. It must raise an MstarError, if at all, before its first write."""


def opened(folder: Path) -> sqlite3.Connection:
    """Open the file for reading and writing; create it with mode 0600. Raises ConfigError."""
    path = made(folder) / FILE
    try:
        path.touch(mode=0o600)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000)
        with _alone(path.with_suffix(".lock")):  # the change of a new file to WAL fails at once if another makes it too
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        transact(connection, prepare)
    except (OSError, sqlite3.Error) as error:
        hint = "check its owner and the free space; a damaged file can be moved away, and usage begins anew"
        raise ConfigError(f"{path} cannot be opened", str(error), hint, file=str(path)) from error
    return connection


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that one process has at a time."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def prepare(connection: sqlite3.Connection) -> None:
    """Create what the file lacks. Raises ConfigError for a file of an unknown version."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version not in (0, VERSION):
        raise ConfigError(
            f"the usage file has version {version}, this version of mstarctl writes {VERSION}",
            hint="use the version of mstarctl that wrote it, or move the file away",
        )
    for statement in SCHEMA.split(";"):
        connection.execute(statement)
    for table, columns in ADDED.items():
        present = columns_of(connection, table)
        for name, kind in columns.items():
            if name not in present:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind} NOT NULL DEFAULT 0")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def columns_of(connection: sqlite3.Connection, table: str) -> set[str]:
    """Return the names of a table's columns."""
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


def read_only(folder: Path) -> sqlite3.Connection | None:
    """Open the file for reading, None if it does not exist. All reads see one state. Raises ConfigError."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_MS / 1000)
        connection.execute("BEGIN")
        return connection
    except sqlite3.Error as error:
        raise ConfigError(f"{path} cannot be opened", str(error), file=str(path)) from error


def transact(connection: sqlite3.Connection, operation: Operation[T]) -> T:
    """Run an operation in a transaction of its own, which excludes those of other processes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = operation(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result


class Writer:
    """The thread that writes. Owned by the gate."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[tuple[Operation[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def post(self, operation: Operation[T]) -> Future[T]:
        """Queue an operation. Those of one caller run in their order."""
        future: Future[T] = Future()
        self._queue.put((operation, future))
        return future

    async def call(self, operation: Operation[T]) -> T:
        """Run an operation and return its result. A cancelled caller does not stop it."""
        return await asyncio.wrap_future(self.post(operation))

    def close(self) -> None:
        """Run what is queued, then end the thread and close the file."""
        self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch, is_last = [first], False
            while len(batch) < MOST_TOGETHER and not self._queue.empty():
                item = self._queue.get()
                if item is None:
                    is_last = True
                    break
                batch.append(item)
            self._commit(batch)
            if is_last:
                return

    def _commit(self, batch: list[tuple[Operation[Any], Future[Any]]]) -> None:
        results: list[Any] = []

        def together(connection: sqlite3.Connection) -> None:
            for operation, _ in batch:
                try:
                    results.append(operation(connection))
                except MstarError as refusal:  # before its first write: the others are not affected
                    results.append(refusal)

        try:
            transact(self._connection, together)
        except Exception as error:  # noqa: BLE001  a fault of one operation must not end the thread
            if len(batch) == 1:
                results = [error]
            else:
                for item in batch:
                    self._commit([item])
                return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
