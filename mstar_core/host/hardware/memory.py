"""Memory of this host, as the kernel counts it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

MEMINFO: Final = Path("/proc/meminfo")


def memory_facts(path: Path = MEMINFO) -> dict[str, int]:
    """Return the fields of /proc/meminfo that are sizes, such as MemAvailable, in bytes; none if it cannot be read."""
    facts: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            with suppress(ValueError, IndexError):
                facts[name] = int(value.split()[0]) << 10
    return facts
