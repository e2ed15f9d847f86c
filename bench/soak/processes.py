"""Resources of processes, read from /proc: memory, descriptors, threads and memory files; and slopes over time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
MEMORY_FILES: Final = ("/memfd:", "/dev/shm/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Resources of one process at one moment. minute: since the start of the soak. age_s: of the process."""

    name: str
    pid: int
    minute: float
    age_s: float
    resident_bytes: int
    descriptors: int
    threads: int
    memory_files: int


def held_by(name: str, pid: int, minute: float, now_s: float) -> Held | None:
    """Return the resources of a process; None if it has ended. now_s: seconds since boot."""
    base = Path("/proc") / str(pid)
    try:
        links = [_target(path) for path in (base / "fd").iterdir()]
        began_s = int((base / "stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        resident_pages = int((base / "statm").read_text().split()[1])
        if resident_pages == 0:
            return None  # a process that has ended and waits for its parent
        return Held(
            name=name,
            pid=pid,
            minute=round(minute, 3),
            age_s=round(now_s - began_s, 1),
            resident_bytes=resident_pages * PAGE_BYTES,
            descriptors=len(links),
            threads=len(list((base / "task").iterdir())),
            memory_files=sum(link.startswith(MEMORY_FILES) for link in links),
        )
    except (FileNotFoundError, ProcessLookupError):
        return None


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Growth per minute by least squares, with its standard error and the number of samples."""

    per_minute: float
    error: float
    samples: int


Point = tuple[int, float, float]
"""Process id, minute, value."""


def slope(points: Iterable[Point]) -> Slope | None:
    """Return the common slope of the samples of one process's lives; None if they do not determine one.

    Each life has its own level, because a process that starts again begins with less. Source: least squares with one
    intercept for each group.
    """
    lives: dict[int, list[tuple[float, float]]] = {}
    for pid, minute, value in points:
        lives.setdefault(pid, []).append((minute, value))
    centred = [pair for life in lives.values() for pair in _centred(life)]
    spread = sum(x * x for x, _ in centred)
    free = len(centred) - len(lives) - 1
    if spread == 0 or free < 1:
        return None
    found = sum(x * y for x, y in centred) / spread
    rest = sum((y - found * x) ** 2 for x, y in centred)
    return Slope(per_minute=found, error=math.sqrt(rest / free / spread), samples=len(centred))


def _centred(life: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    x_mean = sum(x for x, _ in life) / len(life)
    y_mean = sum(y for _, y in life) / len(life)
    return [(x - x_mean, y - y_mean) for x, y in life]
