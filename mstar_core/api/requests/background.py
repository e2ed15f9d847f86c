"""Responses that are generated without their clients. Owned by the service, filled and read by /v1/responses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import msgspec

from mstar_core.api.output.kept_events import EventLog
from mstar_core.api.requests.registry import Registry
from mstar_core.api.requests.response_store import StoredResponse

CLOSE_S: Final = 5.0
"""Longest wait for the ends of runs whose requests have failed."""


@dataclass(slots=True, eq=False, kw_only=True)
class BackgroundRun:
    """A response that is generated. response: as it is now. entry: what is stored of it. key: of its client.

    request_id: of the request that generates it. held_bytes: of the body, reserved in the memory budget. is_deleted:
    its client does not want it any more.
    """

    response: msgspec.Struct
    entry: StoredResponse
    key: str
    request_id: str
    events: EventLog
    task: asyncio.Task[None] | None = None
    held_bytes: int = 0
    is_deleted: bool = False

    async def cancel(self, registry: Registry) -> None:
        """End the run, and wait until its response says so."""
        assert self.task is not None
        requests = registry.items(self.request_id, self.key)
        for request in requests:
            request.cancel()
        if not requests:
            self.task.cancel()
        await asyncio.wait({self.task})


class BackgroundRuns:
    """Runs by response id and API key."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], BackgroundRun] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: BackgroundRun) -> None:
        """Hold a run until it is removed."""
        self._runs[run.entry.id, run.key] = run

    def find(self, response_id: str, key: str) -> BackgroundRun | None:
        """Return the run that generates a response, if `key` created it."""
        return self._runs.get((response_id, key))

    def remove(self, run: BackgroundRun) -> None:
        """Forget a run that has ended."""
        del self._runs[run.entry.id, run.key]

    async def close(self) -> None:
        """Wait for the ends of all runs, and cancel those that do not end."""
        tasks = {run.task for run in self._runs.values() if run.task is not None}
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
