"""Names of the deployments that this gateway, or one before it, started. They survive a kill of the gateway."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

FILE = "deployments.json"


class OwnedNames:
    """Set of names in a file. Owned by the fleet."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE
        try:
            self._names = set(msgspec.json.decode(self._path.read_bytes(), type=list[str]))
        except (OSError, msgspec.DecodeError):  # the first start, or a file of another version
            self._names = set()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Note a deployment before it is started."""
        if name not in self._names:
            self._names.add(name)
            self._write()

    def discard(self, name: str) -> None:
        """Forget a deployment that has ended."""
        if name in self._names:
            self._names.discard(name)
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(sorted(self._names)))
        os.replace(fresh, self._path)
