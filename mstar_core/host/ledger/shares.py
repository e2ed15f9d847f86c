"""Shares of a GPU's memory: several deployments on one GPU, each with its bytes, never more than the device has.

A share is a file whose lock its deployment holds, so that the kernel frees it if the process is killed. Shares of a GPU
change only under a lock of the GPU's ledger, which is held for a moment. Locks of several GPUs are taken in one order.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec

from mstar_core.errors import StartError
from mstar_core.host.ledger.lock_files import (
    Holder,
    held_in,
    holder_of,
    lock_path,
    make_folder,
    open_lock,
    read_record,
    write_record,
)

LEDGER_WAIT_S: Final = 10.0
LEDGER_PAUSE_S: Final = 0.005
GIB: Final = 1 << 30


class MemoryClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a deployment needs of a GPU. device: for people, `cuda:0`. Bytes; total_bytes: of the device."""

    device: str
    need_bytes: int
    total_bytes: int


def shares_folder(key: str) -> Path:
    """Return the folder with the shares of a GPU."""
    path = lock_path(key)
    return path.with_name(f"{path.name}.shares")


def gpu_shares(key: str) -> list[Holder]:
    """Return the deployments that hold shares of a GPU, the oldest first. Changes nothing."""
    return [holder_of(record) for record in _records(key)]


def is_exclusive(key: str) -> bool:
    """Return whether a deployment holds the whole GPU."""
    try:
        fd = os.open(lock_path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _is_locked(fd)
    finally:
        os.close(fd)


@contextmanager
def ledgers(keys: Sequence[str]) -> Iterator[None]:
    """Hold the ledgers of GPUs while their shares change. Raises StartError if another process does not leave one."""
    with ExitStack() as stack:
        for key in sorted(set(keys)):  # one order for all processes prevents deadlock
            path = lock_path(key).with_name(f"{lock_path(key).name}.ledger")
            try:
                fd = open_lock(path)
            except OSError as error:
                raise ledger_error(path, error.strerror or "") from error
            stack.callback(os.close, fd)
            if not _lock_within(fd, LEDGER_WAIT_S):
                raise ledger_error(path, f"another process has held it for {LEDGER_WAIT_S:g} s")
        yield


def take_shares(claims: Mapping[str, MemoryClaim], name: str) -> dict[str, int]:
    """Take a share of each GPU or none, and return the descriptors that hold them by key. claims: by key.

    The caller holds the ledgers. Raises StartError that names the holders and the bytes that are missing.
    """
    for key, claim in claims.items():
        check_claim(key, claim, name)
    held: dict[str, int] = {}
    try:
        for key, claim in claims.items():
            held[key] = _new_share(key, name, claim.need_bytes)
    except BaseException as error:
        for fd in held.values():
            os.close(fd)
        if isinstance(error, OSError):
            raise ledger_error(shares_folder(key), error.strerror or "") from error
        raise
    return held


def check_claim(key: str, claim: MemoryClaim, name: str, *, ours: int | None = None) -> None:
    """Raise StartError if the memory of a GPU does not suffice beside the shares of others.

    ours: descriptor of the share that grows to the claim, None for a new one.
    """
    own = None if ours is None else os.fstat(ours).st_ino
    others = [holder_of(record) for record in _records(key, but=own)]
    held = sum(other.held_bytes or 0 for other in others)
    short = held + claim.need_bytes - claim.total_bytes
    if short <= 0:
        return
    raise short_error(claim, name, others, short)


def resize_share(key: str, fd: int, claim: MemoryClaim, name: str) -> None:
    """Change the bytes of a share that this process holds. The caller holds the ledger.

    Raises StartError, and changes nothing, if it grows beyond the memory that others leave.
    """
    if claim.need_bytes > (held_in(read_record(fd)) or 0):
        check_claim(key, claim, name, ours=fd)
    write_record(fd, name, claim.need_bytes)


def short_error(claim: MemoryClaim, name: str, others: Sequence[Holder], short: int) -> StartError:
    """Return the refusal of a claim: the bytes that are asked, held and missing, and the holders."""
    where = device_text(claim.device)
    holders = [other.name for other in others if other.name]
    if claim.need_bytes > claim.total_bytes:
        title, code = f"{name} can never fit on {where}", "gpu_memory_never"
        hint = "use a device with more memory, or a smaller memory_budget"
    else:
        title, code = f"{where} has too little memory left for {name}", "gpu_memory_short"
        hint = f"mstarctl sleep {holders[0]}, or mstarctl down {holders[0]}, or use another device" if holders else ""
    needs = f"it needs {gib(claim.need_bytes)} of {gib(claim.total_bytes)}"
    held = [f"{other} holds {gib(other.held_bytes or 0)}" for other in others]
    detail = "; ".join([needs, *held, f"{short:,} bytes too few"])
    return StartError(title, detail, hint, phase="plan", code=code, holders=holders, short_bytes=short)


def ledger_error(path: Path, why: str) -> StartError:
    """Return the error of a ledger that cannot be used."""
    hint = "set MSTAR_GPU_LOCK_DIR to a folder that every user of this host can write"
    return StartError(
        "the memory ledger of a GPU cannot be used", f"{path}: {why}", hint, phase="plan", code="gpu_lock"
    )


def device_text(device: str) -> str:
    """Return a device as people name it: `GPU 0`, `cpu:0`."""
    kind, _, number = device.partition(":")
    return f"GPU {number}" if kind == "cuda" and number else device


def gib(size: int) -> str:
    """Return a size as text: `20.0 GiB`, or MiB below one."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"


def _new_share(key: str, name: str, size: int) -> int:
    folder = shares_folder(key)
    make_folder(folder)
    path = folder / f"{time.monotonic_ns():020d}-{os.getpid()}-{uuid4().hex[:8]}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        if not _lock_within(fd, LEDGER_WAIT_S):  # a reader may hold it for a moment
            raise OSError(0, "its file is locked")
        write_record(fd, name, size)
    except BaseException:
        os.close(fd)
        raise
    _drop_dead(folder)
    return fd


def _drop_dead(folder: Path) -> None:
    """Remove the files of shares whose process has ended. The caller holds the ledger."""
    for path in folder.iterdir():
        with suppress(OSError):  # of another user, who will remove it
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if not _is_locked(fd):
                    path.unlink()
            finally:
                os.close(fd)


def _records(key: str, but: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of the shares that are held. but: inode of a share to leave out."""
    folder = shares_folder(key)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for name in names:
        try:
            fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # it has ended meanwhile
        try:
            if os.fstat(fd).st_ino != but and _is_locked(fd):
                yield read_record(fd)
        finally:
            os.close(fd)


def _is_locked(fd: int) -> bool:
    """Return whether another open file holds the lock. Takes it for a moment, in shared mode, if none does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _lock_within(fd: int, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(LEDGER_PAUSE_S)
