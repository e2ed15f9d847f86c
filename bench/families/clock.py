"""Timing of device work, in total and by kernel family. Used by the benchmarks of one GPU."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final

import torch

FAMILIES: Final[tuple[tuple[str, str], ...]] = (
    (
        "attention",
        r"flash|fmha|attention|attn|_prefill_kernel|BatchPrefill|_(split_kv|dense|combine|combine_few|prefix|prefix_single_block|gqa_packed)_kernel",
    ),
    (
        "products",
        r"gemm|cutlass|cublas|matmul|nvjet|addmm|linear|splitk|xmma|mm_|_product_kernel|_(qkv_rotary|split_k|gate_up_gelu)_",
    ),
    ("norms", r"norm"),
    ("copies", r"memcpy|memset|copy|cat|gather|index|scatter"),
)
"""Kernel family -> substrings of kernel names; the first match counts. Other kernels are elementwise or reductions."""


def wait(device: torch.device) -> None:
    """Wait for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], object], device: torch.device, repeats: int, warm: int = 3) -> list[float]:
    """Return the seconds of each of `repeats` runs, started on an idle device and synchronised, after
    `warm` warm-up runs.
    """
    found = []
    for number in range(warm + repeats):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        if number >= warm:
            found.append(time.perf_counter() - start)
    return found


def by_family(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return the device time of one run by kernel family, in seconds; on the CPU, the self time of
    operations.

    launches: number of kernels. busy_s: sum of their times; overlapping kernels count twice.
    """
    on_gpu = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    wait(device)
    with torch.profiler.profile(activities=[kind]) as profile:
        run()
        wait(device)
    spent: dict[str, float] = {}
    slowest: dict[str, float] = {}
    launches = 0
    for event in profile.key_averages():
        seconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        if seconds > 0:
            spent[family(event.key)] = spent.get(family(event.key), 0.0) + seconds
            slowest[event.key] = seconds
            launches += event.count
    top = sorted(slowest.items(), key=lambda each: -each[1])[:12]
    return {
        "busy_s": sum(spent.values()),
        "launches": launches,
        "by_family_s": spent,
        "slowest_s": {name[:100]: seconds for name, seconds in top},
    }


def family(kernel: str) -> str:
    """Return the family of a kernel by its name."""
    return next((name for name, words in FAMILIES if re.search(words, kernel, re.IGNORECASE)), "elementwise")


def ceilings(device: torch.device, size: int = 8192, copied_bytes: int = 1 << 31) -> dict[str, float]:
    """Measure the device's ceilings: a bfloat16 GEMM of random squares in operations per second, and a copy
    in bytes.
    """
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    product = min(timed(lambda: a @ b, device, 5, 2))
    copy = min(timed(lambda: target.copy_(source), device, 5, 2))
    return {"product_per_s": 2 * size**3 / product, "copy_bytes_per_s": 2 * copied_bytes / copy}
