"""Lanes of models: limit the requests of a model that run at once through this gateway. Owned by the gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from mstar_core.errors import Overloaded
from mstar_core.gateway.tenants.fair_queue import FairQueue, Ticket

RETRY_S: Final = 1


class Lane:
    """Requests of one model. Every request that entered must leave, also if it failed."""

    def __init__(self, model: str, capacity: Callable[[], int | None], limit: int) -> None:
        """capacity: requests that may run at once, None without a limit. limit: of those that wait."""
        self.running = 0
        self._model = model
        self._capacity = capacity
        self._limit = limit
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(limit)

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._queue)

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self.running and not len(self._queue)

    async def enter(self, tenant: str, weight: float, cost: float) -> None:
        """Return when the request may run. Raises Overloaded if the queue is full.

        A request whose caller is cancelled has not entered.
        """
        if not len(self._queue) and self._has_room():
            self.running += 1
            self._queue.serve(tenant, weight, cost)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = Ticket(tenant, weight, cost, turn)
        dropped = self._queue.push(ticket)
        if dropped is not None and not dropped.item.done():
            dropped.item.set_exception(self._full())
        self.admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not self._queue.remove(ticket) and turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave()  # its turn came at the same moment
            raise

    def leave(self) -> None:
        """Note the end of a request that had entered, and let the next one run."""
        self.running -= 1
        self.admit()
        if not self.running:
            self._queue.rest()

    def admit(self) -> None:
        """Let waiting requests run while there is room. Called again when the capacity may have grown."""
        while self._has_room() and (ticket := self._queue.peek()) is not None:
            if ticket.item.done():  # its request was cancelled at this moment, so it is not served
                self._queue.remove(ticket)
                continue
            self._queue.pop()
            self.running += 1
            ticket.item.set_result(None)

    def _has_room(self) -> bool:
        capacity = self._capacity()
        return capacity is None or self.running < capacity

    def _full(self) -> Overloaded:
        return Overloaded(
            f"{self._limit} requests wait for model {self._model!r}, as many as may",
            hint=f"retry in {RETRY_S} s",
            retry_after_s=RETRY_S,
        )
