"""One request as the door handles it: its body as far as it was read, and the facts that route it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from mstar_core.errors import MstarError, TooLarge, Unavailable
from mstar_core.gateway.door.look import LOOK_BYTES, NOTHING, BodyFacts, facts_of
from mstar_core.gateway.door.paths import QUIET, PathParts
from mstar_core.gateway.door.replies import SlowBody

LOOK_S: Final = 30.0
"""Time in which the first bytes of a body must arrive, which name its model."""

PIECE_S: Final = 60.0
"""Longest pause between two pieces of a body."""

HELD_BYTES: Final = 512 << 20
"""Bytes of bodies that the gateway holds at once because their model stands behind the first bytes."""

REPLAY_BYTES: Final = 1 << 20
"""Largest body that is kept so that it can be sent to another replica."""

SLICE_BYTES: Final = 256 << 10
"""Size of one write of a body that is held in memory."""


@dataclass(slots=True)
class HeldBytes:
    """Budget of the bodies that are held in memory. Owned by the door."""

    now: int = 0

    def take(self, count: int) -> None:
        """Count bytes. Raises Unavailable beyond the budget."""
        if self.now + count > HELD_BYTES:
            hint = "name the model in the first 64 KiB of the body, in the header X-Mstar-Model, or in the path"
            raise Unavailable("the gateway holds too many bodies", hint=hint, code="bodies_held")
        self.now += count


@dataclass(slots=True)
class Ask:
    """One request. Owned by the door's handler.

    key: of the client, None without one. peer: its address. read: pieces of the body that have been read. is_whole:
    they are all of it. arrived: on the monotonic clock. fault: error of the upload, found while the body was sent on.
    tenant: to which it was admitted, empty before.
    """

    request: web.BaseRequest
    parts: PathParts
    request_id: str
    key: str | None
    peer: str
    arrived: float
    limit: int
    facts: BodyFacts = NOTHING
    read: list[bytes] = field(default_factory=list)
    is_whole: bool = True
    fault: MstarError | None = None
    tenant: str = ""
    _held: int = field(default=0)

    @property
    def is_replayable(self) -> bool:
        """Whether the request can be sent again, because no part of its body is gone."""
        return self.is_whole and self._read_bytes <= REPLAY_BYTES

    @property
    def _read_bytes(self) -> int:
        return sum(map(len, self.read))

    @property
    def is_upgrade(self) -> bool:
        """Whether the client asks for a WebSocket."""
        upgrade: str = self.request.headers.get("Upgrade", "")
        return upgrade.lower() == "websocket"

    @property
    def is_generation(self) -> bool:
        """Whether the request runs the model."""
        is_made = self.request.method == "POST" and not self.parts.id and self.parts.path not in QUIET
        return is_made or self.is_upgrade

    async def look(self, held: HeldBytes, *, needs_model: bool) -> None:
        """Read the body until its routing fields are known, or all of it if they stand at its end.

        needs_model: nothing else names the model. Raises TooLarge, SlowBody, Unavailable.
        """
        request = self.request
        length = request.content_length
        if length is not None and length > self.limit:
            raise self._too_large()
        if not request.body_exists or length == 0:
            return
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        content_type = request.headers.get("Content-Type", "")
        pieces = self.read
        size, checked = 0, LOOK_BYTES
        try:
            async with asyncio.timeout(LOOK_S):
                while piece := await request.content.readany():
                    pieces.append(piece)
                    size += len(piece)
                    if size < checked:
                        continue
                    if size > self.limit:
                        raise self._too_large()
                    if checked == LOOK_BYTES:
                        self.facts = facts_of(content_type, _beginning(pieces), is_whole=False)
                        if needs_model and self.facts.model is None:  # more than that may have arrived at once
                            self.facts = facts_of(content_type, b"".join(pieces), is_whole=False)
                        if self.facts.model is not None or not needs_model:
                            self.is_whole = False
                            return
                    held.take(size - self._held)
                    self._held = size
                    checked = size + 1
        except TimeoutError as error:
            raise SlowBody("the body arrives too slowly", hint="send it without pauses") from error
        pieces[:] = [b"".join(pieces)]
        self.facts = facts_of(content_type, pieces[0], is_whole=True)

    def release(self, held: HeldBytes) -> None:
        """Give the held bytes back."""
        held.now -= self._held
        self._held = 0

    def body(self) -> bytes | AsyncIterator[bytes] | None:
        """Return the body as it is sent on: whole, or in pieces as they arrive; None without one."""
        if not self.is_whole:
            return self._pieces()
        whole = b"".join(self.read)
        if len(whole) > REPLAY_BYTES:  # a large write would block the loop
            return self._slices(whole)
        return whole or (b"" if self.request.body_exists else None)

    async def _slices(self, whole: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(whole), SLICE_BYTES):
            yield whole[start : start + SLICE_BYTES]

    async def _pieces(self) -> AsyncIterator[bytes]:
        size = self._read_bytes
        read, self.read = self.read, []
        for piece in read:
            yield piece
        try:
            while True:
                async with asyncio.timeout(PIECE_S):
                    piece = await self.request.content.readany()
                if not piece:
                    return
                size += len(piece)
                if size > self.limit:
                    raise self._too_large()
                yield piece
        except TimeoutError:
            self.fault = SlowBody("the body arrives too slowly", hint="send it without pauses")
            raise self.fault from None
        except TooLarge as error:
            self.fault = error
            raise

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body has more than {self.limit} bytes", hint="send less, or raise max_body_bytes")


def _beginning(pieces: Sequence[bytes]) -> bytes:
    """Return the first bytes of a body of which at least `LOOK_BYTES` have been read, without a copy of the others."""
    before = sum(map(len, pieces[:-1]))
    return b"".join((*pieces[:-1], pieces[-1][: LOOK_BYTES - before]))
