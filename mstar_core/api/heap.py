"""The C library's heap of the processes that handle bodies and media: it keeps memory between requests."""

from __future__ import annotations

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_TOP_PAD: Final = -2
M_MMAP_THRESHOLD: Final = -3
"""Source: glibc, malloc.h."""

MAPPED_BYTES: Final = 32 << 20
"""Pieces from here on are mapped and given back at once; glibc takes no more than this."""

KEPT_BYTES: Final = 64 << 20
PAD_BYTES: Final = 8 << 20


def keep_heap() -> bool:
    """Keep up to `KEPT_BYTES` that were freed. Returns False where the C library has no such setting.

    Else each image of a few hundred kilobytes is fresh memory, given back when it is freed, and the kernel hands its
    pages out and clears them again for the next.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_MMAP_THRESHOLD, MAPPED_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES), (M_TOP_PAD, PAD_BYTES))
    return all(mallopt(name, value) for name, value in settings)
