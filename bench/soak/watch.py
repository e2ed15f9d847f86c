"""Watch of a soak: resources of each process over time, resources that are left in lulls, and counts of the runtime."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from bench.soak.crowd import Crowd
from bench.soak.killer import BACK_S, Killer
from bench.soak.processes import Held, held_by, slope

QUANTITIES: Final = {"resident_bytes": 1 << 20, "descriptors": 0.2, "threads": 0.1, "memory_files": 0.1}
"""Quantity of a process -> the growth per minute above which it counts as a leak."""

IN_USE: Final = {"pages": (".pages_used",), "loans": (".shm_live", ".peer_live")}
"""Quantity of a deployment -> endings of the telemetry values that it is the sum of."""

GROWN_UP_S: Final = 60.0
"""Age from which a process is judged: allocators, caches and connections of a young one still grow."""

LEAST_MINUTES, LEAST_SAMPLES = 15.0, 12
"""A shorter series shows a slope and gives no verdict."""

SURE: Final = 3.0
"""Standard errors by which a slope must be above its limit."""


@dataclass(slots=True)
class Watch:
    """The readings of one soak. began_s: its start by the monotonic clock.

    left: resources held in lulls, when no request runs; there must be none.
    """

    crowds: Sequence[Crowd]
    killer: Killer
    began_s: float
    processes: list[tuple[str, Held]] = field(default_factory=list)
    in_use: list[dict[str, Any]] = field(default_factory=list)
    left: list[dict[str, Any]] = field(default_factory=list)

    async def sample_forever(self, every_s: float) -> None:
        """Read the resources of processes, each `every_s` seconds. Ends when cancelled."""
        while True:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(every_s)

    def sample(self) -> None:
        """Read the present resources of every process and every deployment."""
        minute, now_s = (time.monotonic() - self.began_s) / 60, time.clock_gettime(time.CLOCK_BOOTTIME)
        for crowd in self.crowds:
            snapshot = crowd.served.snapshot()
            for name, child in snapshot["children"].items():
                if child.get("pid") and (held := held_by(name, child["pid"], minute, now_s)) is not None:
                    self.processes.append((crowd.name, held))
            values = snapshot["values"].items()
            sums = {what: sum(float(v) for name, v in values if name.endswith(ends)) for what, ends in IN_USE.items()}
            self.in_use.append({"deployment": crowd.name, "minute": round(minute, 3), **sums})

    async def lull(self) -> None:
        """Stop the clients, wait for the end of every request, record what is still held, and go on."""
        for crowd in self.crowds:
            crowd.pause()
        for crowd in self.crowds:
            await crowd.idle()
            await self.killer.wait_back(crowd.served)
            held = await asyncio.to_thread(crowd.served.wait_clean, BACK_S)
            minute = round((time.monotonic() - self.began_s) / 60, 2)
            self.left += [{"deployment": crowd.name, "minute": minute, "held": held}] if held else []
        await asyncio.to_thread(self.sample)
        for crowd in self.crowds:
            crowd.resume()

    async def lull_forever(self, every_s: float) -> None:
        """Make a lull each `every_s` seconds. Ends when cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.lull()

    def slopes(self) -> list[dict[str, Any]]:
        """Return the growth per minute of each process and deployment, with a verdict: steady, grows or too short."""
        found = []
        for deployment, name in dict.fromkeys((deployment, held.name) for deployment, held in self.processes):
            lives = [held for whose, held in self.processes if (whose, held.name) == (deployment, name)]
            grown_up = [held for held in lives if held.age_s >= GROWN_UP_S]
            for quantity, limit in QUANTITIES.items():
                points = [(held.pid, held.minute, float(getattr(held, quantity))) for held in grown_up or lives]
                found.append({"deployment": deployment, "process": name, **judged(quantity, points, limit)})
        for deployment in dict.fromkeys(each["deployment"] for each in self.in_use):
            for quantity in IN_USE:
                points = [
                    (0, each["minute"], each[quantity]) for each in self.in_use if each["deployment"] == deployment
                ]
                found.append({"deployment": deployment, "process": "all", **judged(quantity, points, 0.5)})
        return found

    def samples(self) -> list[dict[str, Any]]:
        """Return all readings of processes."""
        return [{"deployment": deployment, **asdict(held)} for deployment, held in self.processes]

    def reconciled(self) -> dict[str, float | None]:
        """Return by deployment how many requests reconciliation had to close; None if it reports no such number."""
        found: dict[str, float | None] = {}
        for crowd in self.crowds:
            values = crowd.served.values().items()
            counts = [value for name, value in values if name.endswith(".leftovers")]
            found[crowd.name] = sum(counts) if counts else None
        return found


def judged(quantity: str, points: Sequence[tuple[int, float, float]], limit: float) -> dict[str, Any]:
    """Return the slope of a series with its verdict. limit: growth per minute that is allowed."""
    last = points[-1][2] if points else 0.0
    found = {"quantity": quantity, "last": last, "most": max((value for _, _, value in points), default=0.0)}
    line = slope(points)
    if line is None:
        return {**found, "per_minute": None, "verdict": "too short"}
    facts = {**found, "per_minute": round(line.per_minute, 4), "error": round(line.error, 4), "samples": line.samples}
    if line.samples < LEAST_SAMPLES or points[-1][1] - points[0][1] < LEAST_MINUTES:
        return {**facts, "verdict": "too short"}
    return {**facts, "verdict": "grows" if line.per_minute - SURE * line.error > limit else "steady"}
