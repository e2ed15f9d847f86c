"""What a node's exception becomes: the request's error, in words that a client may read. Used by both engines."""

from __future__ import annotations

import logging
from typing import Final

import torch

from mstar_core.errors import EngineError, MstarError, OutOfMemory

HOST_WORDS: Final = ("can't allocate memory", "not enough memory")
"""What torch's allocator of the host says in a plain RuntimeError. Source: c10/core/impl/alloc_cpu.cpp."""

WAY_OUT: Final = (
    "ask for fewer candidates or less at once; the operator can lower kv_cache.memory_fraction or kv_cache.tokens, or "
    "raise kv_cache.reserve_bytes"
)

log = logging.getLogger("mstar.engine")


def node_error(node: str, error: Exception) -> MstarError:
    """The error of a request that failed in a node; ours stay what they are.

    Its title names the kind of cause and nothing of the exception's own words, which are its detail and may hold
    anything. The log gets the traceback.
    """
    if isinstance(error, MstarError):
        return error
    log.error("node %s failed on a request: %s", node, type(error).__name__, exc_info=error)
    detail = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        return OutOfMemory(f"node {node} ran out of memory on its device", detail, WAY_OUT, node=node)
    return EngineError(f"node {node} failed on this request ({type(error).__name__})", detail, node=node)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device, or the host, has no memory for a tensor."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in HOST_WORDS)
