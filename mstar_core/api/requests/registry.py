"""Request registry: live requests by handle and id, recent outcomes, ids and seeds. Owned by the service."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mstar_core.errors import Cancelled, Duplicate, MstarError, RequestError, TimedOut

if TYPE_CHECKING:
    from mstar_core.api.output.encode import OutputEncoder
    from mstar_core.api.requests.record import AttemptRecord, Journal, SavedLoops
    from mstar_core.messages.flow import Drawn, Saved
    from mstar_core.messages.telemetry import RequestNews
    from mstar_core.messages.tensors import TensorRef

REMEMBERED: Final = 4096
"""Number of finished requests that GET /v1/requests/{id} remembers."""

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """A request from arrival to end. Owned by its handler; other code only calls `fail`.

    handle: of its current attempt; first_handle: of the first one, which names the request to the supervisor.
    parent: id of the HTTP request of which it is a part, empty for a whole one. heard_s: seconds of audio it read.
    key: the API key that sent it. group: id of the request that it is an item of, by default its own. deadline:
    monotonic time. state: preprocessing, queued, running, resuming. is_sent: the conductor has received it. is_over:
    the conductor has finished it. is_parked: it waits for a conductor, since parked_at. record: of its attempts, once
    its inputs are ready. period_ms, skipped_ticks: of the client's control loop. inputs, outputs: modalities.
    encoder: counts its outputs. prepared, admitted: when its inputs were ready and when it got a slot; 0.0 before.
    reported: the last report; due: when its progress is reported next. drawn_before: ids drawn under an earlier api.
    on_drawn: called with ids that it draws. saved_before: states of loops saved under an earlier api. on_saved: called
    with states that its loops save. lent: saved states that its current attempt begins with. adapter: number of its
    LoRA adapter, 0 without one. scope: of the cache, beside the key.
    """

    handle: int
    request_id: str
    route: str
    key: str
    started: float
    deadline: float
    group: str = ""
    adapter: int = 0
    scope: str = ""
    first_handle: int = 0
    created: float = field(default_factory=time.time)
    state: str = "preprocessing"
    is_sent: bool = False
    is_over: bool = False
    is_parked: bool = False
    parked_at: float = 0.0
    record: AttemptRecord | None = None
    error: MstarError | None = None
    result: dict[str, Any] = field(default_factory=dict)
    on_fail: Callable[[MstarError], None] | None = None
    drawn_before: Journal | None = None
    on_drawn: Callable[[Drawn], None] | None = None
    saved_before: SavedLoops | None = None
    on_saved: Callable[[Saved], None] | None = None
    lent: list[TensorRef] = field(default_factory=list)
    period_ms: float | None = None
    skipped_ticks: int | None = None
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    encoder: OutputEncoder | None = None
    prompt_tokens: int = 0
    parent: str = ""
    heard_s: float = 0.0
    prepared: float = 0.0
    admitted: float = 0.0
    reported: RequestNews | None = None
    due: float = 0.0
    _failed: asyncio.Future[None] | None = None

    def fail(self, error: MstarError) -> None:
        """Fail the request with `error` at whatever its handler waits for. Later errors are ignored."""
        if self.error is not None:
            return
        self.error = error
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(None)
        if self.on_fail is not None:
            self.on_fail(error)

    @property
    def attempts(self) -> dict[str, Any]:
        """The attempts as clients see them; empty before the first loss."""
        record = self.record
        if record is None or not record.lost:
            return {}
        attempts = [
            {
                "attempt": number,
                "cause": attempt.cause or None,
                "pause_s": None if attempt.pause_s is None else round(attempt.pause_s, 3),
            }
            for number, attempt in enumerate(record.attempts, start=1)
        ]
        return {"attempts": attempts}

    def cancel(self) -> None:
        """Fail the request because it was cancelled by its id."""
        self.fail(Cancelled("the request was cancelled by its id"))

    async def until(self, work: Awaitable[T], clock: Callable[[], float] = time.monotonic) -> T:
        """Await `work` until the deadline or `fail`, then cancel it. Raises TimedOut or the error."""
        if self.error is not None:
            raise self.error
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        self._failed = loop.create_future()
        ends: set[asyncio.Future[Any]] = {task, self._failed}
        try:
            await asyncio.wait(ends, timeout=max(0.0, self.deadline - clock()), return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None:
                raise self.error
            if task.done():
                return task.result()
            raise timed_out(self)
        finally:
            self._failed.cancel()
            self._failed = None
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


@dataclass(slots=True, eq=False, kw_only=True)
class ReceivingRequest:
    """A request whose body is being received. task: its handler. is_cancelled: by id, not by a closed connection."""

    request_id: str
    route: str
    key: str
    task: asyncio.Task[Any]
    created: float = field(default_factory=time.time)
    state: str = "preprocessing"
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Cancel the handler."""
        self.is_cancelled = True
        self.task.cancel()


def timed_out(live: LiveRequest) -> TimedOut:
    """Return the error for a passed deadline."""
    allowed = round(live.deadline - live.started, 3)
    return TimedOut(f"the request did not finish within {allowed:g} s", hint="increase timeout_s")


class Registry:
    """Registry of the requests of one incarnation of the api."""

    def __init__(self, incarnation: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._incarnation = incarnation
        self._clock = clock
        self._number = 0
        self._empty: asyncio.Future[None] | None = None
        self._by_handle: dict[int, LiveRequest] = {}
        self._by_id: dict[str, LiveRequest] = {}
        self._arriving: dict[tuple[str, str], ReceivingRequest] = {}
        self._ended: OrderedDict[tuple[str, str], tuple[int | None, dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_handle)

    @property
    def newest(self) -> int:
        """Return the highest handle so far."""
        return make_handle(self._incarnation, self._number)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_handle.values()))

    @contextmanager
    def open(
        self,
        request_id: str,
        *,
        route: str,
        key: str,
        started: float,
        deadline: float,
        group: str = "",
        adapter: int = 0,
        scope: str = "",
    ) -> Iterator[LiveRequest]:
        """Register a request for the duration of the block. Raises Duplicate if its id is in flight."""
        if request_id in self._by_id or any(live.group == request_id for live in self._by_handle.values()):
            raise Duplicate(
                "a request with this id is in flight",
                hint="wait for it, cancel it, or use another id",
                field="request_id",
            )
        handle = self._new_handle()
        live = LiveRequest(
            handle=handle,
            first_handle=handle,
            request_id=request_id,
            route=route,
            key=key,
            started=started,
            deadline=deadline,
            group=group or request_id,
            adapter=adapter,
            scope=scope,
        )
        self._by_handle[handle] = self._by_id[request_id] = live
        self._arriving.pop((request_id, key), None)
        try:
            yield live
        finally:
            del self._by_handle[live.handle], self._by_id[request_id]
            if not self._by_handle and self._empty is not None and not self._empty.done():
                self._empty.set_result(None)

    def renew(self, live: LiveRequest) -> None:
        """Give a live request a new handle for its next attempt. The old one is unknown from now on."""
        del self._by_handle[live.handle]
        live.handle = self._new_handle()
        self._by_handle[live.handle] = live

    def _new_handle(self) -> int:
        self._number += 1
        return make_handle(self._incarnation, self._number)

    @contextmanager
    def arriving(self, request_id: str, *, route: str, key: str) -> Iterator[ReceivingRequest]:
        """Register a request under its header id while its body is received: until it is opened or the block ends.

        Must run in a task. Of two requests with the same id the later one is registered; at most one of them can be
        opened.
        """
        task = asyncio.current_task()
        assert task is not None
        receiving = self._arriving[request_id, key] = ReceivingRequest(
            request_id=request_id, route=route, key=key, task=task
        )
        try:
            yield receiving
        finally:
            if self._arriving.get((request_id, key)) is receiving:
                del self._arriving[request_id, key]
            if receiving.is_cancelled:
                self.remember(receiving, "cancelled", time.time() - receiving.created)

    def arrives(self, request_id: str, key: str) -> ReceivingRequest | None:
        """Return the request with a client id whose body is being received, if `key` sent it."""
        return self._arriving.get((request_id, key))

    async def wait_empty(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until no request is left."""
        if self._by_handle:
            self._empty = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._empty}, timeout=timeout_s)

    def get(self, handle: int) -> LiveRequest | None:
        """Return the live request with an attempt of this handle; None if that attempt has ended."""
        return self._by_handle.get(handle)

    def get_first(self, handle: int) -> LiveRequest | None:
        """Return the live request whose first attempt has this handle, None if it has ended."""
        live = self._by_handle.get(handle)
        if live is not None and live.first_handle == handle:
            return live
        return next((live for live in self._by_handle.values() if live.first_handle == handle), None)

    def find(self, request_id: str, key: str) -> LiveRequest | None:
        """Return the live request of a client id, or its first running item, if `key` sent it."""
        return next(iter(self.items(request_id, key)), None)

    def items(self, request_id: str, key: str) -> list[LiveRequest]:
        """Return all live items of a client id that `key` sent."""
        return [live for live in self._by_handle.values() if live.group == request_id and live.key == key]

    def remember(
        self,
        request: LiveRequest | ReceivingRequest,
        status: str,
        total_s: float,
        *,
        error: dict[str, Any] | None = None,
        result: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Store the outcome of a request and drop the oldest one. status: finished, failed or cancelled."""
        owned = (request.request_id, request.key)  # a request of another key with the same id is another request
        self._ended.pop(owned, None)
        self._ended[owned] = (
            request.first_handle if isinstance(request, LiveRequest) else None,
            {
                "id": request.request_id,
                "object": "request",
                "status": status,
                "route": request.route,
                "created": request.created,
                "total_ms": round(total_s * 1000, 3),
                "error": error,
                **(request.attempts if isinstance(request, LiveRequest) else {}),
                **{name: value for name, value in result.items() if name != "first"},
            },
        )
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def outcome(self, request_id: str, key: str) -> dict[str, Any] | None:
        """Return the outcome of a finished request as clients see it, if `key` sent it."""
        return self._ended.get((request_id, key), (None, None))[1]

    def handle_of(self, request_id: str, key: str) -> int | None:
        """Return the first handle of the live request of a client id, otherwise of the last one, if `key` sent it."""
        live = self.find(request_id, key)
        return live.first_handle if live is not None else self._ended.get((request_id, key), (None, None))[0]


HANDLE_BITS: Final = 40
"""Bits of the request number in a handle; the incarnation is stored above them, so no handle is ever reused."""

MAX_SEED: Final = 2**63 - 1
_CROCKFORD: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_CLIENT_ID: Final = re.compile(r"[\x21-\x2e\x30-\x7e]{1,128}")  # printable ASCII without space and slash


def make_handle(incarnation: int, number: int) -> int:
    """Return the handle of the `number`-th request of an incarnation."""
    return (incarnation << HANDLE_BITS) | number


def new_request_id() -> str:
    """Return `req-` and 26 characters: 48 bits of time, so that ids sort by age, then 80 random bits."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "req-" + "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


def check_request_id(value: str, field: str = "request_id") -> str:
    """Validate a client id. Raises RequestError."""
    if _CLIENT_ID.fullmatch(value) is None:
        allowed = "1 to 128 printable ASCII characters without space and '/'"
        raise RequestError(f"{field} is not a valid id", hint=f"use {allowed}", field=field, allowed=allowed)
    return value


def trace_id_of(parent: str | None) -> str:
    """Return the trace id of a `traceparent` header (W3C Trace Context), or a new one."""
    match = _PARENT.fullmatch(parent or "")
    return match[1] if match is not None else secrets.token_hex(16)


def unescaped(name: str) -> str:
    """Return a path segment with percent escapes decoded; clients may escape characters of an id."""
    return urllib.parse.unquote(name)


def seed_of(request_id: str) -> int:
    """Return the default seed of a request, derived from its id."""
    digest = hashlib.md5(request_id.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "little")


def check_seed(value: Any) -> int:
    """Parse a seed, given as a number or text. Raises RequestError outside 0 to 2^63-1."""
    number = _whole(value)
    if number is None or not 0 <= number <= MAX_SEED:
        allowed = "an integer from 0 to 2^63-1"
        raise RequestError(f"seed must be {allowed}", field="seed", allowed=allowed)
    return number


def _whole(value: Any) -> int | None:
    if isinstance(value, str):
        text = value.strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 32 else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
