"""Deployments that this gateway, or one before it, started, by name. The file survives a kill of the gateway."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

FILE = "deployments.json"


class OwnedNames:
    """Names in a file, each with the folder of logs of its deployment, which every start makes anew. Owned by a fleet.

    The folder is empty while the deployment starts. During a rolling restart two workers change the file, so each
    change reads it again, under a lock.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def log_dir(self, name: str) -> str | None:
        """Return what is noted of a name: empty while its deployment starts, None without an entry."""
        return self._read().get(name)

    def claim(self, name: str, log_dir: str) -> bool:
        """Return whether a running deployment is the one that was noted, and note its folder if it has just started.

        A later deployment of the same name, which an operator has started, has another folder.
        """
        known = self.log_dir(name)
        if known == "" and log_dir:
            self.note(name, log_dir)
        return known is not None and known in ("", log_dir)

    def add(self, name: str) -> None:
        """Note a deployment before it is started."""
        self.note(name, "")

    def note(self, name: str, log_dir: str | None) -> None:
        """Note the folder of a name. None: forget it."""
        self._change(lambda names: {**{key: names[key] for key in names if key != name}, **_entry(name, log_dir)})

    def discard(self, name: str) -> None:
        """Forget a deployment that has ended."""
        self.note(name, None)

    def _change(self, changed: Callable[[dict[str, str]], dict[str, str]]) -> None:
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

    def _read(self) -> dict[str, str]:
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=dict[str, str] | list[str])
        except (OSError, msgspec.DecodeError):  # the first start, or a file of another version
            return {}
        return dict.fromkeys(found, "") if isinstance(found, list) else found  # a list: without folders, as it was once

    def _write(self, names: dict[str, str]) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(names, order="sorted"))
        os.replace(fresh, self._path)


def _entry(name: str, log_dir: str | None) -> dict[str, str]:
    return {} if log_dir is None else {name: log_dir}
