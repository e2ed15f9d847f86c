"""Device checks, launch options and L2 prefetch of Triton kernels. Used by layers, attention kernels and plugins."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

PROCESSORS: Final = 132
"""Streaming multiprocessors of an H100. Up to this many rows, each row has one of its own."""

FEW_ROWS: Final = 512
"""Most rows that run at once with twice the usual number of warps."""


@triton.jit
def prefetch_l2(pointers, size):
    """Prefetch `size` bytes, a multiple of 16, from each pointer into the L2 cache. Asynchronous."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_l2_where(pointers, inside, size):
    """Prefetch as `prefetch_l2` does, from the pointers where `inside` is true."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [pointers.to(tl.int64), inside.to(tl.int32), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether the device has programmatic dependent launch: compute capability 9.0 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Return whether one program can use 192 KiB of shared memory: compute capabilities 9 and 10."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the device has the Hopper-only instructions (wgmma): compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel with an `overlaps` parameter. The interpreter knows no `launch_pdl`."""
    return {"overlaps": True, "launch_pdl": True} if supports_pdl(device) else {"overlaps": False}


def warps_for(block: int, rows: int | None = None) -> int:
    """Return the warps of a program that processes one row of `block` values.

    Few values per thread, because such kernels have nothing else to hide latency. rows: the total, if it may be too
    small to fill the device; programs then get more warps.
    """
    per_warp = 256
    if rows is not None and rows <= FEW_ROWS:
        per_warp = 64 if rows <= PROCESSORS else 128
    return min(16, max(4, block // per_warp))
