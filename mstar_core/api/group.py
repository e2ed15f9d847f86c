"""The `n` answers of one request: each runs as its own request, and the first failure cancels all of them.

Created by routes with `n`. Item 0 has the client's id. The other ids end in a slash and their number, which clients
cannot send.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.api.exchange import Exchange
from mstar_core.api.handover.delivery import DONE
from mstar_core.api.handover.recording import Units
from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.parse.params import ParsedRequest
from mstar_core.api.preprocess.pool import SharedInputs
from mstar_core.api.requests.registry import MAX_SEED
from mstar_core.api.service import Completion, Service, Session

PIECES: Final = 4
"""Parts of an item that may wait between its output queue and the writer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPart:
    """Outputs of one item. units: all that the item has produced so far. done: set in the last part of the item."""

    index: int
    chunks: Sequence[EncodedChunk] = ()
    units: Units = field(default_factory=dict)
    done: Completion | None = None


class Group:
    """Items that run concurrently. Read `pieces` to the end; `done` then holds the completion of each item."""

    def __init__(self, service: Service, calls: Sequence[ParsedRequest], exchange: Exchange) -> None:
        self.calls = calls
        self.sessions: dict[int, Session] = {}
        self.done: dict[int, Completion] = {}
        self._service = service
        self._exchange = exchange
        self._delivery = exchange.delivery
        self._shared = SharedInputs()
        self._queue: asyncio.Queue[GroupPart | Exception] = asyncio.Queue(PIECES * len(calls))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the distinct warnings of all items."""
        warnings = [w for s in self.sessions.values() for w in s.warnings]
        warnings += [w for done in self.done.values() for w in done.warnings]
        return tuple(dict.fromkeys(warnings))

    @property
    def left_s(self) -> float:
        """Return the seconds to the common deadline."""
        return self._exchange.started + self.calls[0].timeout_s - self._service.clock()

    @property
    def usage(self) -> dict[str, Any]:
        """Return the total usage: the prompt counts once, completions count for each item."""
        first, *others = [self.done[index].usage for index in sorted(self.done)]
        total = _copied(first)
        for other in others:
            total["completion_tokens"] += other["completion_tokens"]
            for name, value in other["completion_tokens_details"].items():
                total["completion_tokens_details"][name] += value
        total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
        return total

    async def pieces(self) -> AsyncIterator[GroupPart | None]:
        """Yield parts as they arrive, and None after each keep-alive interval without one. Raises an item's error."""
        while len(self.done) < len(self.calls):
            try:
                async with asyncio.timeout(self._service.keepalive_s):
                    piece = await self._queue.get()
            except TimeoutError:
                yield None
                self._written()
                continue
            if isinstance(piece, Exception):
                if self._delivery is not None:
                    self._delivery.fail()
                raise piece
            if piece.done is not None:
                self.done[piece.index] = piece.done
            if self._delivery is not None:
                self._delivery.sends(piece.index, piece.units)
            yield piece
            self._written()

    def _written(self) -> None:
        if self._delivery is not None:
            self._delivery.sent()

    async def run(self, index: int) -> None:
        """Run one item to its end. Failures go through the queue as well."""
        try:
            await self._run(index)
        except Exception as error:  # noqa: BLE001 isolation boundary: one item; `pieces` raises it
            await self._queue.put(error)

    def close(self) -> None:
        """Free the shared inputs after all items have ended."""
        self._shared.close()

    async def _run(self, index: int) -> None:
        exchange = self._exchange
        async with self._service.open(
            self.calls[index],
            key=exchange.key,
            started=exchange.started,
            shared=self._shared,
            delivery=exchange.delivery,
            item=index,
            adapter=exchange.adapter,
        ) as session:
            self.sessions[index] = session
            async for chunks in session.chunks():
                if chunks:
                    await self._queue.put(GroupPart(index=index, chunks=chunks, units=session.units))
            done = session.done()
            units = {**session.units, DONE: 1}
        await self._queue.put(GroupPart(index=index, units=units, done=done))


@asynccontextmanager
async def open_group(exchange: Exchange, call: ParsedRequest, count: int) -> AsyncIterator[Group]:
    """Run `count` items of a request for the duration of the block; its end cancels the items that still run.

    Raises Overloaded before anything runs if not all items can be admitted.
    """
    service = exchange.service
    exchange.check_open(count)
    group = Group(service, [item_of(call, index) for index in range(count)], exchange)
    tasks = [asyncio.create_task(group.run(index)) for index in range(count)]
    try:
        yield group
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        group.close()


def item_of(call: ParsedRequest, index: int) -> ParsedRequest:
    """Return the request of item `index`: seed + index, and a unique id unless it is the first."""
    if not index:
        return call
    seed = (call.seed + index) % (MAX_SEED + 1)
    params = dataclasses.replace(call.params, seed=seed) if hasattr(call.params, "seed") else call.params
    return dataclasses.replace(
        call, request_id=f"{call.request_id}/{index}", group=call.request_id, seed=seed, params=params
    )


def _copied(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in usage.items()}
