"""Readings of processes and of out-of-memory kills from /proc. Used by the supervisor and by agents."""

from __future__ import annotations

import os
import resource
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

OOM_WINDOW_S: Final = 3.0
_TICKS_S: Final = os.sysconf("SC_CLK_TCK")


class ProcessLoad(NamedTuple):
    """core: share of one CPU core since the last reading, None at the first. resident_bytes: memory."""

    core: float | None
    resident_bytes: int | None


NO_LOAD: Final = ProcessLoad(None, None)


def host_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the memory available to processes: that of the host, or the limit of the container."""
    built_in = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(built_in, int(cgroup.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return built_in


def is_suspended(pid: int | None) -> bool:
    """Return whether a process is stopped by a signal or a debugger, so that it cannot run."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def main_thread_s(pid: int | None) -> float | None:
    """Return the CPU seconds of a process's main thread, None if it has ended."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_S
    except (OSError, ValueError, IndexError):
        return None


@dataclass(slots=True)
class ProcessLoads:
    """Reads the load of processes by id."""

    _before: dict[int, tuple[float, float]] = field(default_factory=dict)

    def read(self, pid: int | None, now: float) -> ProcessLoad:
        """Return the load of a process, NO_LOAD if it has ended."""
        if pid is None:
            return NO_LOAD
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                # The name in brackets may contain blanks and brackets: the fields follow the last bracket.
                fields = file.read().rpartition(")")[2].split()
            used_s = (int(fields[11]) + int(fields[12])) / _TICKS_S
            resident = int(fields[21]) * resource.getpagesize()
        except (OSError, ValueError, IndexError):
            self._before.pop(pid, None)
            return NO_LOAD
        before = self._before.get(pid)
        self._before[pid] = (now, used_s)
        if before is None or now <= before[0]:
            return ProcessLoad(None, resident)
        return ProcessLoad(round(max(0.0, used_s - before[1]) / (now - before[0]), 3), resident)


@dataclass(slots=True)
class OomKills:
    """Recent out-of-memory kills of the host, from /proc/vmstat."""

    path: Path = Path("/proc/vmstat")
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def sample(self, now: float) -> None:
        """Note the count. Called once or twice in `OOM_WINDOW_S`."""
        count = self._count()
        if count is None:
            return
        while len(self._seen) > 1 and self._seen[1][0] <= now - OOM_WINDOW_S:
            self._seen.popleft()
        self._seen.append((now, count))

    def recent(self) -> int | None:
        """Return the kills since the sample of about three seconds ago, None if the kernel does not count them."""
        count = self._count()
        return None if count is None or not self._seen else count - self._seen[0][1]

    def _count(self) -> int | None:
        with suppress(OSError, ValueError, IndexError):
            for line in self.path.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return None


def process_name(pid: int) -> str:
    """Return the name of a process; empty if it is in another namespace or has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""
