"""Reading of files that operators name: only regular files, so that a pipe or a device never blocks a command."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def check_regular(path: Path) -> None:
    """Raise OSError if a path does not exist or is not a regular file. Follows links and opens nothing."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
        kind = kinds.get(stat.S_IFMT(mode), "a special file")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """Return the content of a regular file. limit: bytes after which reading ends; the rest is cut off by one byte.

    Raises OSError. The kind is checked again after opening, because another process may replace the file.
    """
    check_regular(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read(-1 if limit is None else limit + 1)
