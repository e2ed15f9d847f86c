"""Locks of this host's GPUs: a deployment holds a whole GPU, or a share of its memory beside others.

Supervisors hold the locks; `up` checks them. A lock belongs to the open file, so lock files of whole GPUs are never
removed: a new file of the same name would be a second lock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress

from mstar_core.errors import StartError
from mstar_core.host.ledger.lock_files import (
    FOLDER,
    FOLDER_VARIABLE,
    Holder,
    held_in,
    holder_of,
    lock_folder,
    lock_path,
    note_holder,
    open_lock,
    read_record,
)
from mstar_core.host.ledger.shares import (
    MemoryClaim,
    check_claim,
    device_text,
    gib,
    gpu_shares,
    is_exclusive,
    ledgers,
    resize_share,
    short_error,
    take_shares,
)
from mstar_core.host.run_dir import lock_soon

__all__ = [
    "FOLDER",
    "FOLDER_VARIABLE",
    "Holder",
    "MemoryClaim",
    "acquire_gpus",
    "check_claim",
    "device_text",
    "gib",
    "gpu_holder",
    "gpu_holders",
    "held_bytes",
    "is_exclusive",
    "is_share",
    "lock_folder",
    "lock_path",
    "note_holder",
    "release",
    "resize_gpus",
    "short_error",
    "taken_error",
]


def gpu_holder(key: str) -> Holder | None:
    """Return the holder of a GPU, or the first of those that share it; None if it is free. Does not keep the lock."""
    return next(iter(gpu_holders(key)), None)


def gpu_holders(key: str) -> list[Holder]:
    """Return the deployment that holds a GPU, or those that share its memory. Does not keep the lock."""
    try:
        fd = os.open(lock_path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return gpu_shares(key)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return [holder_of(read_record(fd))]
    finally:
        os.close(fd)
    return gpu_shares(key)


def acquire_gpus(gpus: Mapping[str, str], name: str, claims: Mapping[str, MemoryClaim] | None = None) -> dict[str, int]:
    """Lock all the GPUs or none, and return the descriptors that hold the locks by key. gpus: device -> key.

    claims: memory by key, of the GPUs that are shared; the others are held alone. Raises StartError that names the
    holders of a GPU in use, and the bytes that are missing.
    """
    shared = {key: claim for key, claim in (claims or {}).items() if key in gpus.values()}
    held: dict[str, int] = {}
    try:
        with ledgers(list(shared)):
            for key, claim in shared.items():
                if is_exclusive(key):
                    raise taken_error(claim.device, next(iter(gpu_holders(key)), Holder()))
            held |= take_shares(shared, name)
        for device, key in sorted(gpus.items(), key=lambda pair: pair[1]):  # a fixed order prevents deadlock
            if key not in shared and key not in held:
                held[key] = _acquire(device, key, name)
    except BaseException:
        release(held)
        raise
    return held


def resize_gpus(held: Mapping[str, int], claims: Mapping[str, MemoryClaim], name: str) -> None:
    """Change the shares that this process holds, all or none.

    A sleeping deployment gives memory back. It takes it again when it wakes, which may be refused. held: descriptors by
    key; GPUs that are held alone stay so. Raises StartError as `acquire_gpus`.
    """
    shared = {key: claim for key, claim in claims.items() if key in held and is_share(held[key])}
    with ledgers(list(shared)):
        before = {key: held_in(read_record(held[key])) or 0 for key in shared}
        try:
            for key, claim in shared.items():
                resize_share(key, held[key], claim, name)
        except BaseException:
            for key, claim in shared.items():
                was = MemoryClaim(device=claim.device, need_bytes=before[key], total_bytes=claim.total_bytes)
                with suppress(StartError):
                    resize_share(key, held[key], was, name)
            raise


def held_bytes(fd: int) -> int | None:
    """Return the bytes that a descriptor of `acquire_gpus` holds, None for a whole GPU."""
    return held_in(read_record(fd))


def is_share(fd: int) -> bool:
    """Return whether a descriptor of `acquire_gpus` holds a share of a GPU, not the whole."""
    return held_bytes(fd) is not None


def release(held: Mapping[str, int]) -> None:
    """Release the locks that `acquire_gpus` returned."""
    for fd in held.values():
        os.close(fd)


def taken_error(device: str, holder: Holder) -> StartError:
    """Return the error of a start that needs a GPU in use."""
    hint = f"mstarctl down {holder.name}, or choose others with --gpus" if holder.name else "choose others with --gpus"
    part = "" if holder.held_bytes is None else f" {gib(holder.held_bytes)} of"
    where = device_text(device) if ":" in device else f"GPU {device}"
    return StartError(
        f"{where} is in use",
        f"{holder} holds{part} it",
        hint,
        phase="plan",
        code="gpu_in_use",
        holders=[holder.name] if holder.name else [],
    )


def _acquire(device: str, key: str, name: str) -> int:
    try:
        fd = open_lock(lock_path(key))
    except OSError as error:
        raise StartError(
            "the lock of a GPU cannot be opened",
            f"{lock_path(key)}: {error.strerror}",
            f"set {FOLDER_VARIABLE} to a folder that every user of this host can write",
            phase="plan",
            code="gpu_lock",
        ) from error
    try:
        if not lock_soon(fd):
            raise taken_error(device, holder_of(read_record(fd)))
        with ledgers([key]):  # a share is taken only while no process holds the whole GPU, so one of both is refused
            for sharer in gpu_shares(key):
                raise taken_error(device, sharer)
    except BaseException:
        os.close(fd)
        raise
    note_holder(fd, name)
    return fd
