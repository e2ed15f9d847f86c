"""The n answers of one request: each runs as a request of its own, and the first that fails ends them all.

Made by routes with `n`. Item 0 carries the client's id; the others carry it with a slash and their number behind, which
no client can send.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.api.http.exchange import Exchange
from mstar_core.api.output.encode import OutputChunk
from mstar_core.api.parse.params import ParsedRequest
from mstar_core.api.preprocess.shared_inputs import SharedInputs
from mstar_core.api.requests import MAX_SEED
from mstar_core.api.service import Completion, Service, Session

PIECES: Final = 4
"""Pieces of an item that may wait between its outbox and the writer; what is more waits in the outbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPart:
    """Outputs of one item. done: its end; nothing of the item follows."""

    index: int
    chunks: Sequence[OutputChunk] = ()
    done: Completion | None = None


class Group:
    """Items that run side by side. Read `pieces` to its end; then `done` holds how each one ended."""

    def __init__(self, service: Service, calls: Sequence[ParsedRequest], exchange: Exchange) -> None:
        self.calls = calls
        self.sessions: dict[int, Session] = {}
        self.done: dict[int, Completion] = {}
        self._service = service
        self._exchange = exchange
        self._shared = SharedInputs()
        self._queue: asyncio.Queue[GroupPart | Exception] = asyncio.Queue(PIECES * len(calls))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the client should be told, each thing once."""
        told = [w for s in self.sessions.values() for w in s.warnings]
        told += [w for done in self.done.values() for w in done.warnings]
        return tuple(dict.fromkeys(told))

    @property
    def left_s(self) -> float:
        """Seconds to the deadline, which all items share."""
        return self._exchange.started + self.calls[0].timeout_s - self._service.clock()

    @property
    def usage(self) -> dict[str, Any]:
        """Of all items: the prompt counts once, what was made counts for each."""
        first, *others = [self.done[index].usage for index in sorted(self.done)]
        total = _copied(first)
        for each in others:
            total["completion_tokens"] += each["completion_tokens"]
            for name, value in each["completion_tokens_details"].items():
                total["completion_tokens_details"][name] += value
        total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
        return total

    async def pieces(self) -> AsyncIterator[GroupPart | None]:
        """What comes, as it comes; None each time that nothing came for a while. Raises what ended an item."""
        while len(self.done) < len(self.calls):
            try:
                async with asyncio.timeout(self._service.keepalive_s):
                    found = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(found, Exception):
                raise found
            if found.done is not None:
                self.done[found.index] = found.done
            yield found

    async def run(self, index: int) -> None:
        """Run one item to its end. Its failure goes into the queue, like everything else of it."""
        try:
            await self._run(index)
        except Exception as error:  # noqa: BLE001  isolation boundary: one item; `pieces` raises it
            await self._queue.put(error)

    def close(self) -> None:
        """No item runs any more."""
        self._shared.close()

    async def _run(self, index: int) -> None:
        exchange = self._exchange
        async with self._service.open(
            self.calls[index], key=exchange.key, started=exchange.started, shared=self._shared
        ) as session:
            self.sessions[index] = session
            async for chunks in session.chunks():
                if chunks:
                    await self._queue.put(GroupPart(index=index, chunks=chunks))
            done = session.done()
            session.count(done)
        await self._queue.put(GroupPart(index=index, done=done))


@asynccontextmanager
async def open_group(exchange: Exchange, call: ParsedRequest, count: int) -> AsyncIterator[Group]:
    """Run `count` items of a call for the length of the block; its end, however it comes, ends those that still run.

    Raises Overloaded when they cannot all be taken; before anything runs.
    """
    service = exchange.service
    service.check_open(exchange.key, count)
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
    """The call of item `index`: seed + index, and for all but the first an id that nobody else can have."""
    if not index:
        return call
    seed = (call.seed + index) % (MAX_SEED + 1)
    params = dataclasses.replace(call.params, seed=seed) if hasattr(call.params, "seed") else call.params
    return dataclasses.replace(
        call, request_id=f"{call.request_id}/{index}", group=call.request_id, seed=seed, params=params
    )


def _copied(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in usage.items()}
