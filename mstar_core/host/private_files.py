"""Files and folders that no other user can read, replace or redirect. Used by the writers of run directories."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")
UID_MAP: Final = Path("/proc/self/uid_map")
ALL_UIDS: Final = ["0", "0", "4294967295"]
"""The map of a process that is in no user namespace of its own."""


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 0600, whole or not at all. A link at `path` is replaced and never followed."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def exposure(folder: Path) -> str | None:
    """Return why another user could replace what `folder` holds, None if no other user can.

    The folder and all above it must belong to this user or root, and be writable by no one else; a folder above may be
    sticky, as /tmp is, because only its owner can then rename an entry. Links on the way must belong to the same users.
    """
    absolute, resolved = folder.absolute(), folder.resolve()
    for place in dict.fromkeys((absolute, *absolute.parents, resolved, *resolved.parents)):
        facts = place.lstat()
        if facts.st_uid not in _trusted(is_above=place not in (absolute, resolved)):
            return f"{place} belongs to uid {facts.st_uid}"
        if stat.S_ISDIR(facts.st_mode) and facts.st_mode & 0o022:
            if place == resolved or not facts.st_mode & stat.S_ISVTX:
                return f"{place} can be written by other users (mode {stat.S_IMODE(facts.st_mode):o})"
    return None


def _trusted(*, is_above: bool) -> Iterator[int]:
    yield 0
    yield os.getuid()
    if is_above:  # in a user namespace, folders of the host's root belong to a uid that stands for all unknown ones
        try:
            if UID_MAP.read_text().split() != ALL_UIDS:
                yield int(OVERFLOW_UID.read_text())
        except (OSError, ValueError):
            return
