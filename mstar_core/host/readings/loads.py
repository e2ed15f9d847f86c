"""Loads of this host from /proc: cores, memory, swap, network, disks. Used by the supervisor and by agents."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mstar_core.observe.frames import HostStatus

SECTOR_BYTES: Final = 512
"""Unit of /proc/diskstats, whatever the disk's own is."""

NOT_DISKS: Final = re.compile(
    r"(loop|ram|zram|dm-|md|sr)\d+|(sd[a-z]+|vd[a-z]+|xvd[a-z]+)\d+|(nvme\d+n\d+|mmcblk\d+)p\d+"
)
"""Partitions, and devices that stand for others, which would count twice."""

IDLE: Final = (3, 4)
"""Columns of idle time in a line of /proc/stat: idle and iowait."""


@dataclass(slots=True)
class HostLoads:
    """Readings of counters, and the shares and rates since the previous one, once a second."""

    proc: Path = Path("/proc")
    _at: float | None = None
    _cores: list[tuple[float, float]] = field(default_factory=list)
    _moved: tuple[int, int, int, int] = (0, 0, 0, 0)

    def read(self, now: float) -> HostStatus:
        """Return the loads. Shares and rates are unknown at the first call."""
        cores, moved = self._core_times(), (*self._network(), *self._disks())
        shares = [
            round(min(1.0, max(0.0, (busy - was) / (total - before))), 2) if total > before else 0.0
            for (busy, total), (was, before) in zip(cores, self._cores, strict=False)
        ]
        span_s = 0.0 if self._at is None else now - self._at
        rates = [
            round(max(0, value - was) / span_s) if span_s > 0 else 0
            for value, was in zip(moved, self._moved, strict=True)
        ]
        self._at, self._cores, self._moved = now, cores, (moved[0], moved[1], moved[2], moved[3])
        memory = self._memory()
        total, swap = memory.get("MemTotal", 0), memory.get("SwapTotal", 0)
        return HostStatus(
            cores=shares,
            memory_used=max(0, total - memory.get("MemAvailable", total)),
            memory_total=total,
            swap_used=max(0, swap - memory.get("SwapFree", swap)),
            swap_total=swap,
            net_in_s=rates[0],
            net_out_s=rates[1],
            disk_read_s=rates[2],
            disk_write_s=rates[3],
        )

    def _core_times(self) -> list[tuple[float, float]]:
        """Return (busy, total) clock ticks of each core."""
        ticks_of = []
        for words in self._lines("stat"):
            if words[0].startswith("cpu") and words[0] != "cpu":
                ticks = [float(word) for word in words[1:9]]
                total = sum(ticks)
                ticks_of.append((total - sum(ticks[column] for column in IDLE), total))
        return ticks_of

    def _memory(self) -> dict[str, int]:
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in self._lines("meminfo") if len(words) == 3}

    def _network(self) -> tuple[int, int]:
        """Return the bytes (received, sent) by all interfaces but the loopback."""
        got = sent = 0
        for words in self._lines("net/dev"):
            name, colon, first = words[0].partition(":")
            if colon and name != "lo":
                numbers = [*([first] if first else []), *words[1:]]
                got, sent = got + int(numbers[0]), sent + int(numbers[8])
        return got, sent

    def _disks(self) -> tuple[int, int]:
        """Return the bytes (read, written) of all whole disks."""
        read = written = 0
        for words in self._lines("diskstats"):
            if len(words) > 9 and not NOT_DISKS.fullmatch(words[2]):
                read, written = read + int(words[5]), written + int(words[9])
        return read * SECTOR_BYTES, written * SECTOR_BYTES

    def _lines(self, name: str) -> list[list[str]]:
        with suppress(OSError):
            lines = (self.proc / name).read_text(encoding="ascii", errors="replace").splitlines()
            return [line.split() for line in lines if line.strip()]
        return []
