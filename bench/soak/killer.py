"""Deaths and restarts during a soak: SIGKILL of one process after another, and rolling restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Final

from bench.serving.deployment import Served

BACK_S: Final = 120.0
"""Limit of the time until every process is ready again."""

KINDS: Final = ("worker", "follower", "conductor", "api")
"""Kinds of processes that can be killed."""


@dataclass(slots=True)
class Killer:
    """Kills processes of some kinds in turn: by default a worker of each deployment, a follower, a conductor, an api.

    deaths, restarts: a record of each. can_roll: whether `mstarctl restart` knows `--rolling`.
    """

    deployments: Sequence[Served]
    kinds: Sequence[str] = KINDS
    deaths: list[dict[str, Any]] = field(default_factory=list)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    can_roll: bool = False
    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    _running: set[asyncio.Task[bool]] = field(default_factory=set)
    _has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    def ask_for_rolling(self) -> None:
        """Find out whether this version restarts deployments without a gap."""
        self.can_roll = "--rolling" in self.deployments[0].mstarctl("restart", "--help").stdout

    async def kill_forever(self, every_s: float, began_s: float) -> None:
        """Kill one process each `every_s` seconds; one that is not back is left out. Ends when cancelled."""
        turn = self._in_turn()
        due = time.monotonic()
        while True:
            due += every_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            for _ in range(len(self.deployments) * len(self.kinds)):
                served, kind = next(turn)
                if await self._by_itself(self._kill, served, kind, began_s):
                    break

    async def roll_forever(self, every_s: float, began_s: float) -> None:
        """Restart the processes of one deployment after another, each `every_s` seconds. Ends when cancelled."""
        for served in cycle(self.deployments):
            await asyncio.sleep(every_s)
            await self._by_itself(self._roll, served, began_s)

    async def settle(self) -> None:
        """Wait for the end of a kill or restart that is in progress."""
        await asyncio.gather(*self._running)

    async def next_end(self) -> None:
        """Wait until the next kill or restart has ended."""
        self._has_ended.clear()
        await self._has_ended.wait()

    async def _by_itself(self, work: Callable[..., bool], *arguments: object) -> bool:
        """Run a kill or a restart on a thread, one at a time and to its end, also if its caller is cancelled."""
        task = asyncio.create_task(self._locked(work, arguments))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _locked(self, work: Callable[..., bool], arguments: tuple[object, ...]) -> bool:
        async with self._alone:
            try:
                return await asyncio.to_thread(work, *arguments)
            finally:
                self._has_ended.set()

    def _roll(self, served: Served, began_s: float) -> bool:
        """Restart the processes of a deployment without a gap, and record how it ended."""
        start = time.monotonic()
        done = served.mstarctl("restart", served.plan.name, "--rolling", "--yes")
        self.restarts.append(
            {
                "deployment": served.plan.name,
                "second": round(start - began_s, 1),
                "took_s": round(time.monotonic() - start, 2),
                "exit": done.returncode,
                "message": done.stderr.strip()[-300:],
            }
        )
        return True

    async def wait_back(self, served: Served) -> float:
        """Wait until every process of a deployment is ready. Returns the seconds, or infinity after `BACK_S`."""
        start = time.monotonic()
        while time.monotonic() - start < BACK_S:
            if (await asyncio.to_thread(served.admin, "/v1"))["state"] == "ready":
                return time.monotonic() - start
            await asyncio.sleep(0.05)
        return float("inf")

    def _in_turn(self) -> Iterator[tuple[Served, str]]:
        while True:
            for kind in self.kinds:
                for served in self.deployments:
                    yield served, kind

    def _kill(self, served: Served, kind: str, began_s: float) -> bool:
        """Kill a process of a kind if its deployment is whole and has one."""
        children = served.snapshot()["children"]
        names = [name for name in children if name.partition("-")[0] == kind]
        if not names or served.admin("/v1")["state"] != "ready":
            return False
        name = names[len(self.deaths) % len(names)]
        pid, at_s = children[name]["pid"], time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        record: dict[str, Any] = {
            "deployment": served.plan.name,
            "process": name,
            "kind": kind,
            "second": round(at_s - began_s, 1),
            "at_s": at_s,
            "back_s": None,
        }
        self.deaths.append(record)
        start = time.monotonic()
        while time.monotonic() - start < BACK_S:
            now = served.snapshot()["children"].get(name, {})
            if now.get("pid") != pid and served.admin("/v1")["state"] == "ready":
                record["back_s"] = round(time.monotonic() - start, 2)
                return True
            time.sleep(0.05)
        return True
