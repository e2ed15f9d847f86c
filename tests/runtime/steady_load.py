"""Constant load of short requests, each on a connection of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType
from typing import Any, Final, Self

from tests.runtime.client import SURE, Heard, new_client, request, speak

PAUSE_S: Final = 0.05
SHORT: Final = request(**SURE, max_output_tokens=12)


class SteadyLoad:
    """Sends requests from a number of clients while the block runs. outcomes: of those that have ended."""

    def __init__(self, url: str, clients: int = 4, body: dict[str, Any] = SHORT) -> None:
        self.heard: list[Heard] = []
        self._url = url
        self._clients = clients
        self._body = body
        self._is_over = False
        self._ended = asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._send()) for _ in range(self._clients)]
        await self.some_more(self._clients)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def some_more(self, count: int) -> None:
        """Wait until this many requests have ended since the last call for which no caller has waited."""
        for _ in range(count):
            await self._ended.acquire()

    @property
    def outcomes(self) -> Counter[str]:
        """Count of requests by outcome: `whole`, or what went wrong."""
        return Counter(map(outcome, self.heard))

    async def _send(self) -> None:
        async with new_client(self._url) as client:
            while not self._is_over:
                self.heard.append(await speak(client, self._body))
                self._ended.release()
                await asyncio.sleep(PAUSE_S)


def outcome(heard: Heard) -> str:
    """Return how a request ended."""
    if heard.is_whole:
        return "whole"
    if heard.cut and heard.status == 0:
        return "refused connection"
    return "cut" if heard.cut else f"{heard.status} {heard.code}: {heard.message}"
