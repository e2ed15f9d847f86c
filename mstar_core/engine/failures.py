"""Conversion of a node's exceptions to errors of the request, which a client may read. Used by both engines."""

from __future__ import annotations

import logging
import re
from typing import Final

import torch

from mstar_core.errors import EngineError, MstarError, OutOfMemory

HOST_WORDS: Final = ("can't allocate memory", "not enough memory")
"""Messages of torch's host allocator, which raises a plain RuntimeError. Source: c10/core/impl/alloc_cpu.cpp."""

WAY_OUT: Final = (
    "ask for less at once, such as fewer candidates or smaller images; the operator can lower "
    "kv_cache.memory_fraction or kv_cache.tokens, or raise kv_cache.reserve_bytes"
)

_SIZE: Final = r"([\d.]+ (?:bytes|[KMGT]iB))"
AMOUNTS: Final = (
    ("requested", re.compile(f"tried to allocate {_SIZE}", re.I)),
    ("free", re.compile(f"of which {_SIZE} is")),
)
"""Sizes in the messages of torch's allocators: c10/cuda/CUDACachingAllocator.cpp, c10/core/CPUAllocator.cpp."""

log = logging.getLogger("mstar.engine")


def node_error(node: str, error: Exception) -> MstarError:
    """Return the error of a request that failed in a node; a MstarError is returned as it is.

    The title names the kind of cause only, and the sizes of a failed allocation. The exception's own text, which may
    hold anything, becomes the detail. The traceback is logged.
    """
    if isinstance(error, MstarError):
        return error
    log.error("node %s failed on a request: %s", node, type(error).__name__, exc_info=error)
    detail = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        amounts = [f"{match[1]} {name}" for name, size in AMOUNTS if (match := size.search(str(error))) is not None]
        sizes = f": {', '.join(amounts)}" if amounts else ""
        return OutOfMemory(f"node {node} ran out of memory on its device{sizes}", detail, WAY_OUT, node=node)
    return EngineError(f"node {node} failed on this request ({type(error).__name__})", detail, node=node)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that the device or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in HOST_WORDS)
