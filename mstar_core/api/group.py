"""The answers of one request: each runs as its own request, and the first failure cancels all of them.

Created by routes with `n`, several prompts, text that arrives while it is spoken, or a request in parts. Item 0 has the
client's id. The other ids end in a slash and their number, which clients cannot send.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.api.admission import Place
from mstar_core.api.exchange import Exchange
from mstar_core.api.handover.delivery import DONE
from mstar_core.api.handover.recording import Units
from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.parse.params import ParsedRequest
from mstar_core.api.preprocess.parts import PartInputs
from mstar_core.api.preprocess.pool import InputSource, SharedInputs
from mstar_core.api.requests.registry import MAX_SEED
from mstar_core.api.service import Completion, Service, Session
from mstar_core.errors import Overloaded

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
    """Items that run concurrently. Read `pieces` to the end; `done` then holds the completion of each item.

    begun: result is None once the first item runs, or the error that ended it before.
    """

    def __init__(
        self,
        service: Service,
        calls: Sequence[ParsedRequest],
        exchange: Exchange,
        count: int,
        workers: int,
        *,
        is_growing: bool = False,
        parts: PartInputs | None = None,
    ) -> None:
        """calls: one for each item, `count` for each prompt. workers: items that run at once.

        is_growing: more calls come with `run_arriving` or `run_parts`. parts: inputs of the items, which are the parts
        of one request: their outputs come in order, and a text goes on from item to item.
        """
        self.calls = list(calls)
        self._count = count
        self.sessions: dict[int, Session] = {}
        self.done: dict[int, Completion] = {}
        self._service = service
        self._exchange = exchange
        self._delivery = exchange.delivery
        self._shared: dict[int, SharedInputs] = {}
        self._queue: asyncio.Queue[GroupPart | Exception | None] = asyncio.Queue(PIECES * workers)
        self._left: Iterator[int] = iter(range(len(calls)))
        self._parts = parts
        self._held: dict[int, list[GroupPart]] = {}
        self._turn = 0
        self._grown = asyncio.Event()
        self.begun: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._is_growing = is_growing

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the distinct warnings of all items."""
        warnings = [w for s in self.sessions.values() for w in s.warnings]
        warnings += [w for done in self.done.values() for w in done.warnings]
        return tuple(dict.fromkeys(warnings))

    @property
    def is_done(self) -> bool:
        """Return whether every item has ended, and no other one can come."""
        return not self._is_growing and len(self.done) == len(self.calls)

    @property
    def left_s(self) -> float:
        """Return the seconds to the common deadline."""
        return self._exchange.started + self.calls[0].timeout_s - self._service.clock()

    @property
    def usage(self) -> dict[str, Any]:
        """Return the total usage: each prompt counts once, completions count for each item."""
        first, *others = sorted(self.done)
        total = _copied(self.done[first].usage)
        for index in others:
            for kind in ("completion_tokens", *(() if index % self._count else ("prompt_tokens",))):
                _add(total, self.done[index].usage, kind)
        total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
        return total

    async def pieces(self) -> AsyncIterator[GroupPart | None]:
        """Yield parts as they arrive, and None after each keep-alive interval without one. Raises an item's error."""
        while not self.is_done:
            try:
                async with asyncio.timeout(self._service.keepalive_s):
                    piece = await self._queue.get()
            except TimeoutError:
                yield None
                self._written()
                continue
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                self._is_growing = False
                continue
            for ready in self._ready(piece):
                if ready.done is not None:
                    self.done[ready.index] = ready.done
                if self._delivery is not None:
                    self._delivery.sends(ready.index, ready.units)
                yield ready
                self._written()

    def _ready(self, piece: GroupPart) -> list[GroupPart]:
        """Return what may go out once a part has arrived. In order, a part waits for the ends of earlier items."""
        if self._parts is None:
            return [piece]
        ready = list[GroupPart]()
        self._held.setdefault(piece.index, []).append(piece)
        while held := self._held.pop(self._turn, []):
            ready += held
            if held[-1].done is None:
                break
            self._turn += 1
        return ready

    def _written(self) -> None:
        if self._delivery is not None:
            self._delivery.sent()

    async def run(self) -> None:
        """Run items that no other worker has taken, one after the other, in a place of its own each."""
        for index in self._left:
            if not await self._has_run(index, None):
                return

    async def run_in_place(self) -> None:
        """Run items as `run` does, all in one place, so that none is refused once the first has begun."""
        try:
            with self._service.admission.place(self._exchange.key) as place:
                for index in self._left:
                    if not await self._has_run(index, place):
                        return
        except Overloaded as error:
            await self._queue.put(error)

    async def run_arriving(self, calls: AsyncIterator[ParsedRequest]) -> None:
        """Run requests one after the other as they arrive, all in one place. A failure of `calls` is raised as theirs.

        The deadline of each begins with its arrival.
        """
        try:
            with self._service.admission.place(self._exchange.key) as place:
                async for call in calls:
                    index = len(self.calls)
                    self.calls.append(item_of(call, index, index))
                    if not await self._has_run(index, place, self._service.clock()):
                        return
        except Exception as error:  # noqa: BLE001 isolation boundary, as in `_has_run`
            await self._queue.put(error)
        else:
            await self._queue.put(None)

    async def run_parts(self, at_once: int) -> None:
        """Run the parts of the request as items. Others than the first run while there are places for them.

        The first has a place, in which all the others would run one after the other.
        """
        assert self._parts is not None
        first = asyncio.create_task(self._run_first())
        try:
            count = await self._parts.count
            self.calls += [item_of(self.calls[0], index, 0) for index in range(1, count)]
            self._left = iter(range(1, count))
            self._grown.set()
            await self._queue.put(None)
            await asyncio.gather(first, *(self._run_beside() for _ in range(min(at_once, count) - 1)))
        finally:
            first.cancel()
            await asyncio.wait({first})

    async def _run_first(self) -> None:
        try:
            with self._service.admission.place(self._exchange.key) as place:
                if await self._has_run(0, place):
                    await self._grown.wait()
                    await self._run_further(place)
        except Overloaded as error:
            self._begins(error)
            await self._queue.put(error)

    def _begins(self, error: Exception | None) -> None:
        """Tell once that the first item runs, or what ended it before."""
        if not self.begun.done():
            self.begun.set_result(error)

    async def _run_beside(self) -> None:
        """Run parts once there is a place, none if the deployment has no more."""
        with suppress(Overloaded), self._service.admission.place(self._exchange.key) as place:
            await place.run()
            await self._run_further(place)

    async def _run_further(self, place: Place) -> None:
        for index in self._left:
            if not await self._has_run(index, place):
                return

    async def _has_run(self, index: int, place: Place | None, started: float | None = None) -> bool:
        """Run one item to its end. A failure goes through the queue as well, and `pieces` raises it."""
        try:
            await self._run(index, place, self._exchange.started if started is None else started)
        except Exception as error:  # noqa: BLE001 isolation boundary: one item
            self._begins(error)
            raw = self.calls[index].raw
            await self._queue.put(error if raw is None else raw.renamed(error))
            return False
        return True

    def close(self) -> None:
        """Free the shared inputs after all items have ended."""
        for shared in self._shared.values():
            shared.close()
        if self._parts is not None:
            self._parts.close()

    async def _run(self, index: int, place: Place | None, started: float) -> None:
        exchange = self._exchange
        shared: InputSource
        if self._parts is not None:
            shared = self._parts.item(index)
        else:
            shared = self._shared.setdefault(index // self._count, SharedInputs())
        async with self._service.open(
            self.calls[index],
            key=exchange.key,
            scope=exchange.scope,
            started=started,
            shared=shared,
            delivery=exchange.delivery,
            item=index,
            adapter=exchange.adapter,
            place=place,
            goes_on=self._parts is not None and index > 0,
        ) as session:
            self.sessions[index] = session
            self._begins(None)
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
    exchange.check_open(count)
    group = Group(exchange.service, [item_of(call, index, index) for index in range(count)], exchange, count, count)
    async with _working(group, [group.run() for _ in range(count)]):
        yield group


@asynccontextmanager
async def open_prompts(exchange: Exchange, calls: Sequence[ParsedRequest], count: int) -> AsyncIterator[Group]:
    """Run `count` items for each of several prompts, as `open_group` does for one.

    Item i is number i % count of prompt i // count. As many run at once as the deployment has slots for; the others
    wait here, not in the queue. Raises Overloaded.
    """
    admission, total = exchange.service.admission, len(calls) * count
    workers = min(total, admission.max_concurrent_requests, admission.per_key or total)
    exchange.check_open(workers)
    items = [item_of(calls[index // count], index, index % count) for index in range(total)]
    group = Group(exchange.service, items, exchange, count, workers)
    async with _working(group, [group.run_in_place() for _ in range(workers)]):
        yield group


@asynccontextmanager
async def open_arriving(exchange: Exchange, calls: AsyncIterator[ParsedRequest]) -> AsyncIterator[Group]:
    """Run requests that arrive during the response, one after the other, as items of one group.

    `calls` is read while the items run. Raises Overloaded before anything runs if no request would be admitted.
    """
    exchange.check_open()
    group = Group(exchange.service, [], exchange, 1, 1, is_growing=True)
    async with _working(group, [group.run_arriving(calls)]):
        yield group


@asynccontextmanager
async def open_parts(exchange: Exchange, call: ParsedRequest, at_once: int) -> AsyncIterator[Group]:
    """Run the parts into which the processor divides a request, up to `at_once` side by side, in order.

    Raises Overloaded before anything runs if no part can be admitted, and errors of processing.
    """
    exchange.check_open()
    group = Group(exchange.service, [call], exchange, 1, at_once, is_growing=True, parts=PartInputs())
    async with _working(group, [group.run_parts(at_once)]):
        error = await group.begun
        if error is not None:
            raise error
        yield group


@asynccontextmanager
async def _working(group: Group, work: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(worker) for worker in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        group.close()


def item_of(call: ParsedRequest, index: int, number: int) -> ParsedRequest:
    """Return the request of item `index`: seed + its number among the answers of a prompt, and a unique id."""
    if not index:
        return call
    seed = (call.seed + number) % (MAX_SEED + 1)
    params = dataclasses.replace(call.params, seed=seed) if hasattr(call.params, "seed") else call.params
    return dataclasses.replace(
        call, request_id=f"{call.request_id}/{index}", group=call.request_id, seed=seed, params=params
    )


def _add(total: dict[str, Any], other: Mapping[str, Any], kind: str) -> None:
    """Add the tokens of a kind, and their details."""
    total[kind] += other[kind]
    for name, value in other[f"{kind}_details"].items():
        total[f"{kind}_details"][name] += value


def _copied(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in usage.items()}
