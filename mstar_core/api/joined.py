"""Requests as routes run them: whole, or in parts whose outputs are joined in order. Used by routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mstar_core.api.exchange import Exchange
from mstar_core.api.group import Group, open_parts
from mstar_core.api.output.encode import EncodedChunk, OutputEncoder
from mstar_core.api.parse.params import ParsedRequest
from mstar_core.api.requests.registry import LiveRequest
from mstar_core.api.service import Completion, Session


class JoinedSession:
    """Parts of a request as one: read `chunks` to the end, then call `done`. See Session."""

    def __init__(self, group: Group) -> None:
        """group: its first item has begun."""
        self._group = group

    @property
    def call(self) -> ParsedRequest:
        """Return the request."""
        return self._group.calls[0]

    @property
    def live(self) -> LiveRequest:
        """Return the state of the first part, whose deadline all parts have."""
        return self._group.sessions[0].live

    @property
    def encoder(self) -> OutputEncoder:
        """Return the encoder of the first part."""
        return self._group.sessions[0].encoder

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the distinct warnings of the parts that have begun."""
        return self._group.warnings

    async def chunks(self) -> AsyncIterator[list[EncodedChunk]]:
        """Yield chunks in the order of the parts, and an empty list after each keep-alive interval without one."""
        async for piece in self._group.pieces():
            if piece is None:
                yield []
            elif piece.chunks:
                yield list(piece.chunks)

    def done(self) -> Completion:
        """Return the completion of all parts. Call it once, after all chunks were read."""
        ended = [self._group.done[index] for index in sorted(self._group.done)]
        reasons = [each.finish_reason for each in ended]
        times = {**ended[0].times_ms, "total_ms": max(each.times_ms["total_ms"] for each in ended)}
        return Completion(
            finish_reason="length" if "length" in reasons else reasons[-1],
            usage=self._group.usage,
            warnings=self._group.warnings,
            times_ms=times,
        )


RunningRequest = Session | JoinedSession


@asynccontextmanager
async def open_request(exchange: Exchange, call: ParsedRequest) -> AsyncIterator[RunningRequest]:
    """Run a request for the duration of the block, in parts if its parameters ask for several at once.

    Raises as `Service.open` does. A request with stop strings runs undivided, because one ends all that follows.
    """
    at_once = parts_at_once(exchange.service.model.at_once, call)
    if at_once > 1:
        async with open_parts(exchange, call, at_once) as group:
            yield JoinedSession(group)
        return
    async with exchange.open(call) as session:
        yield session


def parts_at_once(name: str, call: ParsedRequest) -> int:
    """Return how many parts of a request run at once. name: `ModelSpec.at_once`."""
    return 1 if not name or call.stops or call.session else int(getattr(call.params, name))
