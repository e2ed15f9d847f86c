"""Names of the deployments that this gateway, or one before it, started. They survive a kill of the gateway."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

FILE = "deployments.json"


class OwnedNames:
    """Set of names in a file. Owned by the fleet.

    During a rolling restart two workers change the file, so each change reads it again, under a lock.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def add(self, name: str) -> None:
        """Note a deployment before it is started."""
        self._change(lambda names: names | {name})

    def discard(self, name: str) -> None:
        """Forget a deployment that has ended."""
        self._change(lambda names: names - {name})

    def _change(self, changed: Callable[[frozenset[str]], frozenset[str]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self._read()
            after = changed(before)
            if after != before:
                self._write(after)
        finally:
            os.close(lock)

    def _read(self) -> frozenset[str]:
        try:
            return frozenset(msgspec.json.decode(self._path.read_bytes(), type=list[str]))
        except (OSError, msgspec.DecodeError):  # the first start, or a file of another version
            return frozenset()

    def _write(self, names: frozenset[str]) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(sorted(names)))
        os.replace(fresh, self._path)
