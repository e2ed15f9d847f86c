"""What the kernel says of child processes: their share of a core and their memory, from /proc. Read once a second."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

_TICKS_S: Final = os.sysconf("SC_CLK_TCK")


class ProcessLoad(NamedTuple):
    """core: share of one CPU core since the last look, None at the first. resident_bytes: memory."""

    core: float | None
    resident_bytes: int | None


NO_LOAD: Final = ProcessLoad(None, None)


def host_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Memory that processes of this host can have: what is built in, or the limit of a container."""
    built_in = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(built_in, int(cgroup.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return built_in


@dataclass(slots=True)
class ProcessLoads:
    """Owned by the picture. Looks by process id."""

    _before: dict[int, tuple[float, float]] = field(default_factory=dict)

    def look(self, pid: int | None, now: float) -> ProcessLoad:
        """The load of a process; nothing of one that is gone."""
        if pid is None:
            return NO_LOAD
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                # The name in brackets may hold anything, blanks and brackets too: the fields follow the last bracket.
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
