"""Lock files, one per GPU of this host, that keep two deployments off one GPU.

Supervisors hold the locks; `up` checks them. A lock belongs to the open file, so lock files are never removed: a new
file of the same name would be a second lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mstar_core.errors import StartError
from mstar_core.host.run_dir import lock_soon

FOLDER: Final = "mstar-gpus"
FOLDER_VARIABLE: Final = "MSTAR_GPU_LOCK_DIR"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The deployment that holds a GPU. pid: 0 if unknown."""

    pid: int = 0
    name: str = ""
    user: str = ""

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


def gpu_holder(key: str) -> Holder | None:
    """Return the current holder of a GPU, None if it is free. Does not keep the lock."""
    try:
        fd = os.open(lock_path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _read(fd)
    finally:
        os.close(fd)


def acquire_gpus(gpus: Mapping[str, str], name: str) -> dict[str, int]:
    """Lock all the GPUs or none, and return the descriptors that hold the locks by key. gpus: device -> key.

    Raises StartError that names the holder of a GPU in use.
    """
    held: dict[str, int] = {}
    try:
        for device, key in sorted(gpus.items(), key=lambda pair: pair[1]):  # a fixed order prevents deadlock
            held[key] = _acquire(device, key, name)
    except BaseException:
        release(held)
        raise
    return held


def release(held: Mapping[str, int]) -> None:
    """Release the locks that `acquire_gpus` returned."""
    for fd in held.values():
        os.close(fd)


def taken_error(device: str, holder: Holder) -> StartError:
    """Return the error of a start that needs a GPU in use."""
    hint = f"mstarctl down {holder.name}, or choose others with --gpus" if holder.name else "choose others with --gpus"
    return StartError(
        f"GPU {device.partition(':')[2] or device} is in use",
        f"{holder} holds it",
        hint,
        phase="plan",
        code="gpu_in_use",
    )


def _acquire(device: str, key: str, name: str) -> int:
    try:
        fd = _open(lock_path(key))
    except OSError as error:
        raise StartError(
            "the lock of a GPU cannot be opened",
            f"{lock_path(key)}: {error.strerror}",
            f"set {FOLDER_VARIABLE} to a folder that every user of this host can write",
            phase="plan",
            code="gpu_lock",
        ) from error
    if not lock_soon(fd):
        holder = _read(fd)
        os.close(fd)
        raise taken_error(device, holder) from None
    note_holder(fd, name)
    return fd


def note_holder(fd: int, name: str) -> None:
    """Write this process into the lock that it holds, for the errors of others."""
    with suppress(OSError):  # another user's file can be locked but not written: its holder stays unnamed
        facts = {"pid": os.getpid(), "name": name, "user": _user(), "since": round(time.time())}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(facts).encode(), 0)


def _open(path: Path) -> int:
    """Open a lock, for writing if permitted. The first use creates it with access for every user of the host."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            path.parent.chmod(0o1777)
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


def _read(fd: int) -> Holder:
    try:
        facts = json.loads(os.pread(fd, 4096, 0))
        pid = int(facts["pid"])
        os.kill(pid, 0)
        return Holder(pid=pid, name=str(facts["name"]), user=str(facts["user"]))
    except PermissionError:
        return Holder(pid=pid, name=str(facts["name"]), user=str(facts["user"]))
    except (ValueError, KeyError, TypeError, OSError):  # nothing is written yet, or its writer has exited
        return Holder()


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
