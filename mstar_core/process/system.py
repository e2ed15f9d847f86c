"""Operating-system settings of a process: signals, timers, garbage collection and the C allocator."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
from typing import Final

from mstar_core.errors import ExitCode

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_TIMERSLACK: Final = 29
_EXACT_NS: Final = 1000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
MOST_FDS: Final = 1 << 20
"""Some container runtimes set a hard limit of a billion, which programs that close all descriptors walk through."""

KEPT_BLOCK_BYTES: Final = 64 << 20
"""Blocks below this size come from memory that the process keeps."""

KEPT_BYTES: Final = 256 << 20
"""Most free memory that the process keeps at the end of its heap."""


def prepare_process(parent: int) -> None:
    """End with the parent, and write all stacks to standard error on SIGUSR1. parent: the pid of the supervisor."""
    die_with_parent(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def end_imports() -> None:
    """Exclude the objects that the imports have made from all collections, then switch collections on.

    `entry.py` switches them off before a child's imports. The garbage among them stays: 7,500 of 200,000 objects in a
    worker.
    """
    gc.freeze()
    gc.enable()


def keep_start() -> None:
    """Collect garbage once, then exclude all objects that the start made from later collections.

    Called once, when a process is ready to serve. A full collection visits every object that can be part of a cycle,
    about 200,000 in a process with torch, and stalls requests.
    """
    gc.collect()
    gc.freeze()


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies (Linux). parent: its pid, if the caller knows it.

    Raises SystemExit if the parent is dead.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        raise SystemExit(int(ExitCode.INTERNAL))


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard limit. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(soft, min(hard, MOST_FDS))
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def set_exact_timers() -> None:
    """Set the timer slack of this thread, and of threads that it starts, from 50 µs to 1 µs (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, _EXACT_NS)


def give_back_freed_memory() -> None:
    """Return freed memory to the system: 2 MB of a supervisor after its start, more of an api. Only with glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory(kept_bytes: int = KEPT_BYTES) -> None:
    """Have the C library reuse freed blocks of several megabytes instead of returning them to the system.

    Video clips and latents are 10 to 20 MB, and page faults of a fresh block cost five times a copy into a used one.
    Up to `kept_bytes` stay with the process. A C library without `mallopt` ignores the call.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, kept_bytes)
