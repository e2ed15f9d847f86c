"""Memory of a deployment's processes during a load. Read from its admin socket in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import MstarError

if TYPE_CHECKING:
    from mstarctl.client import AdminClient

EVERY_S: Final = 10.0
TAIL: Final = 0.1
"""Share of the run over which a place of it, such as its middle, is averaged."""


@dataclass(slots=True)
class MemoryReadings:
    """Resident bytes of each process over time. seconds: since the begin. Filled while the load runs."""

    seconds: list[float] = field(default_factory=list)
    processes: list[dict[str, int]] = field(default_factory=list)

    def read(self, admin: AdminClient, now_s: float) -> None:
        """Add a reading. One that fails is left out."""
        try:
            children = admin.snapshot(("children",))["children"]
        except MstarError:
            return
        self.seconds.append(round(now_s, 1))
        self.processes.append({name: int(child.get("resident_bytes") or 0) for name, child in children.items()})

    @property
    def growth(self) -> float | None:
        """Return the growth of all processes from the middle to the end, as a share; None with too few readings."""
        totals = [sum(reading.values()) for reading in self.processes]
        width = max(1, round(len(totals) * TAIL))
        if len(totals) < 2 * width + 1:
            return None
        middle = len(totals) // 2
        before = _mean(totals[middle - width // 2 : middle - width // 2 + width])
        return round(_mean(totals[-width:]) / before - 1, 4) if before else None

    def facts(self) -> list[dict[str, Any]]:
        """Return all readings."""
        return [
            {"t_s": at, "resident_bytes": reading} for at, reading in zip(self.seconds, self.processes, strict=True)
        ]


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


@contextmanager
def reading_memory(admin: AdminClient | None) -> Iterator[MemoryReadings]:
    """Read the memory of all processes at once, each 10 s, and at the end. Without an admin socket nothing is read."""
    readings = MemoryReadings()
    if admin is None:
        yield readings
        return
    began, stop = time.monotonic(), threading.Event()

    def watch() -> None:
        while True:
            readings.read(admin, time.monotonic() - began)
            if stop.wait(EVERY_S):
                readings.read(admin, time.monotonic() - began)
                return

    thread = threading.Thread(target=watch, name="memory of the deployment")
    thread.start()
    try:
        yield readings
    finally:
        stop.set()
        thread.join()
