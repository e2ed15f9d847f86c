"""Presence of living gateways: each locks a file of its own, which the kernel unlocks when the process dies."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

from mstar_core.gateway.tenants.accounts.folder import made

FOLDER: Final = ".present"


class Presence:
    """The presence of this gateway. Owned by the gate."""

    def __init__(self, folder: Path) -> None:
        self._folder = made(folder / FOLDER)
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._path = self._folder / self.name
        part = self._path.with_name(f".{self.name}")
        self._fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.rename(self._path)  # visible only with its lock

    def living(self) -> set[str]:
        """Return the names of all gateways that are alive, this one included. Files of dead ones are removed."""
        alive = {self.name}
        for path in self._folder.iterdir():
            if path.name == self.name or path.name.startswith("."):
                continue
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                alive.add(path.name)
            finally:
                os.close(fd)
        return alive

    def close(self) -> None:
        """End the presence."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
