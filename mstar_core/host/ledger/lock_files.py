"""Files whose locks say which deployment holds a GPU: their folder, their names and the holder written into them."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "mstar-gpus"
FOLDER_VARIABLE: Final = "MSTAR_GPU_LOCK_DIR"
RECORD_BYTES: Final = 512
"""Size of a record. It is written at once and padded, so that a reader never sees half of it."""

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A deployment that holds a GPU. pid: 0 if unknown. held_bytes: of its memory; None: all of it."""

    pid: int = 0
    name: str = ""
    user: str = ""
    held_bytes: int | None = None

    def __str__(self) -> str:
        who = f"deployment {self.name!r}" if self.name else "another deployment"
        facts = [f"pid {self.pid}"] if self.pid else []
        facts += [f"user {self.user}"] if self.user else []
        return f"{who} ({', '.join(facts)})" if facts else who


def lock_folder() -> Path:
    """Return the folder of the locks: $MSTAR_GPU_LOCK_DIR, else /dev/shm, where old files are not cleaned up."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / FOLDER


def lock_path(key: str) -> Path:
    """Return the path of a GPU's lock. key: its UUID, or another name that is unique on this host."""
    return lock_folder() / _UNSAFE.sub("_", key)


def make_folder(path: Path) -> None:
    """Create a folder that every user of the host can write, if it does not exist."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            path.chmod(0o1777)


def open_lock(path: Path) -> int:
    """Open a lock, for writing if permitted. The first use creates it with access for every user of the host."""
    make_folder(path.parent)
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):
        fd = os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(fd, 0o666)
        return fd
    try:
        fd = os.open(path, flags | os.O_RDWR)
    except PermissionError:
        fd = os.open(path, flags | os.O_RDONLY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "not a regular file")
    return fd


def read_record(fd: int) -> dict[str, Any]:
    """Return the record of a lock, empty if nothing is written yet."""
    with suppress(ValueError, OSError):
        record = json.loads(os.pread(fd, 4096, 0))
        return record if isinstance(record, dict) else {}
    return {}


def write_record(fd: int, name: str, held_bytes: int | None = None) -> None:
    """Write this process into a lock that it holds. held_bytes: of the GPU's memory; None: all of it."""
    facts: dict[str, Any] = {"pid": os.getpid(), "name": name, "user": _user(), "since": round(time.time())}
    if held_bytes is not None:
        facts["bytes"] = held_bytes
    os.pwrite(fd, json.dumps(facts).encode().ljust(RECORD_BYTES), 0)
    os.ftruncate(fd, RECORD_BYTES)


def note_holder(fd: int, name: str) -> None:
    """Write this process into the lock that it holds, for the errors of others. Its bytes stay."""
    with suppress(OSError):  # another user's file can be locked but not written: its holder stays unnamed
        write_record(fd, name, held_in(read_record(fd)))


def held_in(record: dict[str, Any]) -> int | None:
    """Return the bytes of a record, None if it is of a whole GPU."""
    held = record.get("bytes")
    return max(0, held) if isinstance(held, int) else None


def holder_of(record: dict[str, Any]) -> Holder:
    """Return the holder that a record names; unknown if its process has exited or nothing is written yet."""
    held = held_in(record)
    try:
        pid = int(record["pid"])
        known = Holder(pid=pid, name=str(record["name"]), user=str(record["user"]), held_bytes=held)
        os.kill(pid, 0)
        return known
    except PermissionError:
        return known
    except (ValueError, KeyError, TypeError, OSError):
        return Holder(held_bytes=held)


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
