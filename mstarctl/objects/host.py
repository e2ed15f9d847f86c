"""This host as operators see it: GPUs with their holders, free memory, cores. Used by `ps` and `top`."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mstar_core.host.gpu_locks import Holder, gpu_holders
from mstar_core.host.hardware.gpus import Gpu, gpus
from mstar_core.host.hardware.memory import MEMINFO, memory_facts
from mstarctl.output.table import Column, render_table
from mstarctl.output.units import counted, size_text

COLUMNS: Final = (
    Column("GPU", "index", is_right=True),
    Column("PRODUCT", "product"),
    Column("FREE", "free", is_right=True),
    Column("TOTAL", "total", is_right=True),
    Column("HELD BY", "holder"),
)
BUSY_SHARE: Final = 0.05
"""Used share of a GPU without a holder above which other processes are named as its users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpu:
    """One GPU. free, total: bytes. holder: a deployment that has locked it. shares: those that share its memory."""

    index: int
    product: str
    free: int
    total: int
    holder: Holder | None = None
    shares: tuple[Holder, ...] = ()

    @property
    def user(self) -> str:
        """Return the holder or the shares, or that other processes use its memory; empty for a free GPU."""
        if self.shares:
            return ", ".join(f"{each.name or 'another'} {size_text(each.held_bytes or 0)}" for each in self.shares)
        if self.holder is not None:
            return str(self.holder).removeprefix("deployment ").replace("'", "")
        used = self.total - self.free
        return f"other processes, {size_text(used)}" if self.total and used > BUSY_SHARE * self.total else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Resources of one host. Memory in bytes, 0 if unknown."""

    name: str
    cores: int
    memory_free: int
    memory_total: int
    gpus: tuple[HostGpu, ...] = ()


def read_host(present: Sequence[Gpu] | None = None, meminfo: Path = MEMINFO) -> HostFacts:
    """Return the current resources of this host. present: its GPUs, None to ask the driver."""
    devices = gpus() if present is None else present
    memory = memory_facts(meminfo)
    free, total = memory.get("MemAvailable", 0), memory.get("MemTotal", 0)
    return HostFacts(
        name=platform.node() or "this host",
        cores=len(os.sched_getaffinity(0)),
        memory_free=free,
        memory_total=total,
        gpus=tuple(_host_gpu(index, gpu) for index, gpu in enumerate(devices)),
    )


def _host_gpu(index: int, gpu: Gpu) -> HostGpu:
    holders = gpu_holders(gpu.uuid or f"nvidia{index}")
    return HostGpu(
        index=index,
        product=gpu.name,
        free=gpu.free,
        total=gpu.total,
        holder=next(iter(holders), None),
        shares=tuple(each for each in holders if each.held_bytes is not None),
    )


def host_line(host: HostFacts) -> str:
    """Return `node7: 2 cores, memory 12.1 GiB free of 23.5 GiB, no GPU`."""
    memory = f"memory {size_text(host.memory_free)} free of {size_text(host.memory_total)}" if host.memory_total else ""
    many = counted(len(host.gpus), "GPU") if host.gpus else "no GPU"
    return f"{host.name}: {', '.join(part for part in (counted(host.cores, 'core'), memory, many) if part)}"


def host_lines(host: HostFacts) -> Iterator[str]:
    """Return the resources as lines of text: one for the host, then a table of its GPUs."""
    yield host_line(host)
    if host.gpus:
        items = [
            {
                "index": gpu.index,
                "product": gpu.product,
                "free": size_text(gpu.free),
                "total": size_text(gpu.total),
                "holder": gpu.user or "free",
            }
            for gpu in host.gpus
        ]
        yield from render_table(items, COLUMNS)
