"""Client of /v1/realtime for tests. Every event is parsed strictly by the installed `openai` package."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, get_args

import numpy as np
from openai.types.realtime.realtime_server_event import RealtimeServerEvent
from pydantic import BaseModel, TypeAdapter
from websockets.asyncio.client import ClientConnection, connect

from mstar_core.api.service import Service
from tests.api.conftest import LIMIT_S, Api

PARSER: TypeAdapter[BaseModel] = TypeAdapter(RealtimeServerEvent)
KINDS: dict[str, type[BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(RealtimeServerEvent)[0])
}
"""The event types of the client package by name."""

Event = dict[str, Any]


def parsed(message: str) -> Event:
    """Return an event after the client package has accepted it: its type, all fields, and no field that it lacks."""
    event: Event = json.loads(message)
    kind = KINDS[event["type"]]
    known = kind.model_validate_json(message, strict=True)
    assert not known.model_extra, f"{event['type']} has fields that no client knows: {known.model_extra}"
    return event


class RealtimeClient:
    """One connection. events: all that it has read."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[Event] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def next(self) -> Event:
        message = await asyncio.wait_for(self.socket.recv(), LIMIT_S)
        assert isinstance(message, str)
        self.events.append(parsed(message))
        return self.events[-1]

    async def until(self, kind: str, condition: Callable[[Event], bool] = lambda event: True) -> Event:
        """Read to the next event of a type."""
        while True:
            event = await self.next()
            if event["type"] == kind and condition(event):
                return event
            assert event["type"] != "error" or kind == "error", event

    async def say(self, text: str, **fields: Any) -> str:
        """Create a message of the user. Returns its id."""
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **fields}
        await self.send("conversation.item.create", item=item)
        done = await self.until("conversation.item.done")
        return str(done["item"]["id"])

    async def respond(self, **response: Any) -> Event:
        """Create a response and read to its end."""
        await self.send("response.create", response=response)
        return (await self.until("response.done"))["response"]

    async def refused(self, kind: str, **fields: Any) -> Event:
        """Send an event that is refused. Returns the error, which names the event."""
        await self.send(kind, event_id="mine", **fields)
        error: Event = (await self.until("error"))["error"]
        assert error["event_id"] == "mine"
        return error

    async def hear(self, samples: np.ndarray, piece: int = 4800) -> None:
        """Send PCM16 at 24 kHz, in pieces."""
        for start in range(0, len(samples), piece):
            data = samples[start : start + piece].astype("<i2").tobytes()
            await self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["type"] == kind]


class Reached(Protocol):
    """An api or a deployment."""

    @property
    def url(self) -> str: ...


@asynccontextmanager
async def conversing(api: Reached, path: str = "/v1/realtime", **options: Any) -> AsyncIterator[RealtimeClient]:
    """Connect, and read the session."""
    url = f"{api.url.replace('http', 'ws')}{path}"
    async with connect(url, max_size=None, open_timeout=LIMIT_S, ping_timeout=None, **options) as socket:
        client = RealtimeClient(socket)
        if "resume" not in path:
            assert (await client.next())["type"] == "session.created"
        yield client


def sound_of(client: RealtimeClient) -> bytes:
    """Return all sound that a client has got."""
    return b"".join(base64.b64decode(event["delta"]) for event in client.of("response.output_audio.delta"))


def service_of(api: Api) -> Service:
    """Return the state of an api."""
    service = api.process._service
    assert service is not None
    return service
