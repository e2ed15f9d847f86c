"""The device of a rank: its name, its process-wide settings, and a check that it computes."""

from __future__ import annotations

import re
import time
from typing import Final

import torch

from mstar_core.errors import ConfigError, StartError

FREEING_S: Final = 5.0
"""Longest wait for the memory of a process that died."""

FREEING_POLL_S: Final = 0.05

OUTSIDE_BYTES: Final = 1 << 30
"""Part of a memory budget that PyTorch's allocator does not count: the context of the GPU, kernels and graphs.

A quarter of a small budget.
"""

_NAME = re.compile(r"^(cpu|cuda(:\d+)?)$")


def resolve_device(name: str) -> torch.device:
    """Return the device called `cpu`, `cuda` or `cuda:i`.

    Raises ConfigError for another name and StartError for a GPU that does not exist.
    """
    if not _NAME.match(name):
        raise ConfigError(f"{name!r} is not a device", hint="write cpu, cuda or cuda:0", key="device")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        raise StartError(
            f"device cuda:{index} does not exist", f"torch {torch.__version__} sees {count} GPUs", phase="plan"
        )
    return torch.device("cuda", index)


def prepare_device(device: torch.device) -> None:
    """Bind this process to its device: one torch thread, and the current device on a GPU."""
    # Worker processes outnumber cores; spinning torch threads would starve them.
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # TF32 would round float32 convolutions to ten bits: samples of a vocoder were off by 4e-3.
        torch.backends.cudnn.allow_tf32 = False


def await_free_memory(device: torch.device, limit_s: float = FREEING_S) -> None:
    """Wait until the free memory of a GPU no longer grows: the driver may still free that of a process that died."""
    if device.type != "cuda":
        return
    until, free = time.monotonic() + limit_s, -1
    while (now := torch.cuda.mem_get_info(device)[0]) > free and time.monotonic() < until:
        free = now
        time.sleep(FREEING_POLL_S)


def limit_memory(device: torch.device, size_bytes: int | None) -> None:
    """Have PyTorch refuse more of a GPU than a memory budget leaves it, see `OUTSIDE_BYTES`. None: no limit."""
    if device.type != "cuda" or size_bytes is None:
        return
    total = torch.cuda.mem_get_info(device)[1]
    share = (size_bytes - min(OUTSIDE_BYTES, size_bytes // 4)) / total
    torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that PyTorch can still take: those that are free, and within `limit_memory`.

    Memory that its allocator only keeps is given back first.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    most = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(int(free), most - torch.cuda.memory_reserved(device))


def check_device(device: torch.device) -> None:
    """Compute a known value on the device. Raises StartError if it is wrong or cannot be computed."""
    try:
        left = torch.arange(64, dtype=torch.float32, device=device).view(8, 8)
        trace = float((left @ torch.eye(8, device=device)).diagonal().sum().cpu())
    except RuntimeError as error:
        raise StartError(f"{device} does not compute", str(error).splitlines()[0], phase="plan") from error
    if trace != 252.0:
        raise StartError(f"{device} computes wrong results", f"a trace of 252 came out as {trace}", phase="plan")
