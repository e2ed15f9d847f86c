"""The life-cycle feed of a deployment: numbered, in memory for clients, in a file for later."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

RING: Final = 2000
log = logging.getLogger(__name__)


class Events:
    """Owned by the supervisor; read by the admin socket's streams, which wait for the next. on_event: the hub's ear."""

    def __init__(self, path: Path | None, on_event: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.ring: deque[dict[str, Any]] = deque(maxlen=RING)
        self.number = 0
        self._path = path
        self._on_event = on_event
        self._changed = asyncio.Event()

    def add(self, kind: str, **facts: Any) -> None:
        """Record one event: its type and plain facts."""
        self.number += 1
        event = {"n": self.number, "time": round(time.time(), 3), "type": kind, **facts}
        self.ring.append(event)
        if self._on_event is not None:
            self._on_event(event)
        said = (f"{key}={_plain(value)}" for key, value in facts.items() if value not in (None, "", 0))
        log.info("%s", " ".join((kind, *said)))
        if self._path is not None:
            with suppress(OSError), self._path.open("a") as file:
                file.write(json.dumps(event, default=str) + "\n")
        self._changed.set()
        self._changed = asyncio.Event()

    def since(self, number: int) -> list[dict[str, Any]]:
        """Events after `number`, oldest first."""
        return [event for event in self.ring if event["n"] > number]

    async def wait(self) -> None:
        """Return when another event came."""
        await self._changed.wait()


def _plain(value: Any) -> str:
    """A fact for a line of the log: the parts of one that has parts, without brackets."""
    if isinstance(value, dict):
        return ",".join(f"{key}:{part}" for key, part in value.items())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
