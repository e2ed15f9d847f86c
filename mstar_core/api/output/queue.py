"""Output queue of one request: outputs of workers in order, and one end. Filled by the link, read by the handler.

Memory is bounded: a backlog of more than a few megabytes spills to a file, up to a limit that fails the request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from mstar_core.api.errors import Stalled, lost
from mstar_core.api.output.spool import SPOOL_BYTES, Spool
from mstar_core.api.output.units import Array, Delivered, NewUnits, OutputItem
from mstar_core.errors import EngineError, MstarError, Unavailable
from mstar_core.messages.life import PeerDown
from mstar_core.messages.requests import RequestFinished

QUEUE_BYTES: Final = 4 << 20
QUEUE_ITEMS: Final = 256
NOTHING: Final[Array] = np.zeros(0, dtype=np.uint8)
MOST_EARLY: Final = 1024
"""Most outputs of a worker that wait for an earlier one. Its messages arrive in order, so that one is lost."""
LOST_GRACE_S: Final = 0.25
"""Grace period for outputs that a worker sent before it died."""


class _Sender:
    """Outputs of one worker: the next number, and those that arrived out of order, with the units left out before.

    early_bytes: size of those that arrived out of order. coming: numbers of those that are being fetched.
    """

    __slots__ = ("coming", "early", "early_bytes", "next")

    def __init__(self) -> None:
        self.next = 0
        self.coming: set[int] = set()
        self.early: dict[int, tuple[OutputItem, int]] = {}
        self.early_bytes = 0

    @property
    def has_gap(self) -> bool:
        """Whether so many outputs wait for an earlier one that it must be lost."""
        return (len(self.early) > MOST_EARLY and self.next not in self.coming) or self.early_bytes > SPOOL_BYTES


class OutputQueue:
    """Outputs of one request, in order. Ends exactly once, by `finish` after all outputs have arrived, or by `fail`.

    A new attempt of the request begins with `renew`. delivered: units of all attempts that have entered the queue;
    no unit enters twice. on_lost: called if outputs were lost with their worker; by default the request fails.
    """

    def __init__(
        self,
        spool: Spool[OutputItem],
        *,
        delivered: Delivered | None = None,
        queue_bytes: int = QUEUE_BYTES,
        queue_items: int = QUEUE_ITEMS,
    ) -> None:
        """delivered: by attempts before the first one here; None without any."""
        self.doubled = 0
        self.delivered = Delivered() if delivered is None else delivered
        self.on_lost: Callable[[PeerDown], None] = lambda death: self.fail(lost(death.public))
        self._units = NewUnits(self.delivered, is_first=delivered is None)
        self._on_news: Callable[[], None] | None = None
        self._spool = spool
        self._limits = (queue_bytes, queue_items)
        self._queue: deque[OutputItem] = deque()
        self._queue_bytes = 0
        self._senders: dict[str, _Sender] = {}
        self._ending: RequestFinished | None = None
        self._error: MstarError | None = None
        self._wake: asyncio.Future[None] | None = None
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None

    @property
    def ending(self) -> RequestFinished | None:
        """Return how the request ended, once all outputs were taken; None before, and after a failure."""
        done = self._error is None and not self.waits and self._is_complete()
        return self._ending if done else None

    @property
    def waits(self) -> int:
        """Return the number of outputs not yet taken."""
        return len(self._queue) + len(self._spool)

    def renew(self, on_news: Callable[[], None]) -> None:
        """Begin with the outputs of a new attempt. on_news: called at its first new output, or its end without one."""
        self._senders.clear()
        self._ending, self._on_news = None, on_news
        self._units = NewUnits(self.delivered, is_first=False)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def put(self, worker: str, seq: int, item: OutputItem, skipped: int = 0) -> None:
        """Add output number `seq` of `worker`; duplicates are dropped. skipped: units left out before it."""
        if self._error is not None:
            return  # nothing follows an error
        sender = self._senders.setdefault(worker, _Sender())
        sender.coming.discard(seq)
        if seq < sender.next or seq in sender.early:
            self.doubled += 1
            return
        sender.early[seq] = item, skipped
        sender.early_bytes += item.array.nbytes
        while sender.next in sender.early:
            arrived, left_out = sender.early.pop(sender.next)
            sender.early_bytes -= arrived.array.nbytes
            self._take(arrived, left_out)
            sender.next += 1
        if sender.has_gap:
            sender.early.clear()
            self.fail(EngineError("an output was lost", f"number {sender.next}", node=worker))
        self._notify()

    def expect(self, worker: str, seq: int) -> None:
        """Note that output number `seq` of `worker` is being fetched: any number of later ones may wait for it."""
        self._senders.setdefault(worker, _Sender()).coming.add(seq)

    def finish(self, ending: RequestFinished) -> None:
        """End the request successfully. The end is visible after all outputs that it counts have arrived."""
        if self._ending is None and self._error is None:
            self._ending = ending
            self._tell_news()
            self._notify()

    def fail(self, error: MstarError) -> None:
        """Fail the request: outputs not yet taken come first, then the error. Only the first end counts."""
        if self._error is None and not (self._ending is not None and self._is_complete()):
            self._error = error
            self._notify()

    def worker_down(self, death: PeerDown) -> None:
        """Handle the death of a worker: its missing outputs are lost after a short grace period."""
        if self._ending is None or self._is_complete() or self._grace is not None:
            return  # the conductor decides about requests that it has not finished
        if death.name in self._ending.emitted:
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(LOST_GRACE_S, self._lose, death)

    def _lose(self, death: PeerDown) -> None:
        if not self._is_complete():
            self.on_lost(death)

    async def take(self, timeout_s: float, limit_bytes: int = 256 * 1024) -> list[OutputItem]:
        """Return ready outputs, at least one unless none arrives within `timeout_s`; empty: timeout, or the end.

        Raises the error of the request after all outputs before it were taken.
        """
        if self.waits:
            await asyncio.sleep(0)  # a reader that never waits would starve other streams
        # A wake-up without news, such as an end whose outputs are still in transit, does not end the wait.
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while not self.waits and self._error is None and self.ending is None:
            if loop.time() >= until:
                break
            await self._wait(loop, until)
        taken: list[OutputItem] = []
        size = 0
        while self.waits and size < limit_bytes:
            try:
                item = await self._pop()
            except Unavailable as error:  # it cannot be read back
                self._error = self._error or error
                break
            size += item.array.nbytes
            taken.append(item)
        if not taken and self._error is not None:
            raise self._error
        return taken

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        for timer in (self._grace, self._timer):
            if timer is not None:
                timer.cancel()
        self.on_lost = lambda death: None  # its cycle would hold the request, with inputs, until a full collection
        self._queue.clear()
        self._spool.close()

    def _take(self, item: OutputItem, skipped: int) -> None:
        try:
            part = self._units.take(item, skipped)
        except MstarError as error:
            self._error = self._error or error
            return
        if part is not None:
            self._tell_news()
            self._append(part)

    def _tell_news(self) -> None:
        if self._on_news is not None:
            tell, self._on_news = self._on_news, None
            tell()

    def _append(self, item: OutputItem) -> None:
        bytes_limit, items_limit = self._limits
        is_full = self._queue_bytes + item.array.nbytes > bytes_limit or len(self._queue) >= items_limit
        if self._spool or (self._queue and is_full):
            try:
                self._spool.add(replace(item, array=NOTHING), item.array)
            except (Stalled, Unavailable) as error:
                self._error = self._error or error
            return
        self._queue.append(item)
        self._queue_bytes += item.array.nbytes

    async def _pop(self) -> OutputItem:
        """Return the oldest output. Those of the spool are younger than those in memory."""
        if self._queue:
            item = self._queue.popleft()
            self._queue_bytes -= item.array.nbytes
            return item
        item, array = await self._spool.pop()
        return replace(item, array=array)

    def _is_complete(self) -> bool:
        if self._ending is None:
            return False
        senders = self._senders
        return all(
            count <= (senders[name].next if name in senders else 0) for name, count in self._ending.emitted.items()
        )

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _wait(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        self._wake, self._until = loop.create_future(), until
        # One timer serves many waits: creating and cancelling one per chunk costs more than the wait.
        if self._timer is None or self._timer.when() > until:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(until, self._ring, loop)
        try:
            await self._wake
        finally:
            self._wake = None

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._wake is None:
            return  # no reader waits; the next wait starts the timer again
        if loop.time() >= self._until:
            self._notify()
        else:
            self._timer = loop.call_at(self._until, self._ring, loop)
