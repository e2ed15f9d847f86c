"""Test client: sends a request, reads its lines as they arrive, and records the outcome."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import httpx

from tests.fakes.tls import NO_AUTHORITIES

LIMIT_S: Final = 120.0
SURE: Final = {
    "temperature": 0,
    "repetition_penalty": 1,
    "noise": "off",
    "ignore_eos": True,
    "first_window_frames": 4,
}
"""Parameters with which the audio depends on the prompt only, and has the windows of the reference."""


@dataclass(slots=True)
class Heard:
    """Result of a client's request. cut: the connection ended before the stream. Times are monotonic seconds."""

    status: int = 0
    chunks: list[bytes] = field(default_factory=list)
    done: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    first: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pcm(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def is_whole(self) -> bool:
        """Whether the stream ended well: a done line, no error, not cut."""
        return self.status == 200 and self.done is not None and not self.errors and not self.cut

    @property
    def code(self) -> str:
        """The error's code, from the body or from the stream's error line; empty when there was none."""
        if self.errors:
            return str(self.errors[0]["code"])
        error = self.body.get("error")
        return str(error["code"]) if isinstance(error, dict) else ""

    @property
    def message(self) -> str:
        error = self.body.get("error")
        return str(error["message"]) if isinstance(error, dict) else ""


def request(**params: Any) -> dict[str, Any]:
    """Return a body for /generate: text unless ids are given, every event in the stream."""
    text = {} if "prompt_token_ids" in params else {"text": "hello there"}
    return {**text, "output_modalities": ["audio"], "stream_events": "full", **params}


def new_client(url: str) -> httpx.AsyncClient:
    """Return a client with a time-out, without a limit on connections, and without certificates, which take 17 ms."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits, verify=NO_AUTHORITIES)


async def speak(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    heard: Heard | None = None,
    leave: Callable[[Heard], bool] | None = None,
) -> Heard:
    """Send one request to /generate and read its response, until the end or until `leave` returns true for a line."""
    heard = heard if heard is not None else Heard()
    heard.sent_s = time.monotonic()
    try:
        async with client.stream("POST", "/generate", json=body) as answer:
            heard.status, heard.headers = answer.status_code, dict(answer.headers)
            if answer.status_code != 200:
                heard.body = json.loads(await answer.aread())
            else:
                async for line in answer.aiter_lines():
                    take(heard, line)
                    if leave is not None and leave(heard):
                        break
    except httpx.TransportError:
        heard.cut = True
    finally:
        heard.ended_s = time.monotonic()
        heard.first.set()
    return heard


def take(heard: Heard, line: str) -> None:
    """Sort one line of a stream."""
    if not line.strip():
        return
    item = json.loads(line)
    match item["modality"]:
        case "audio":
            heard.chunks.append(base64.b64decode(item["data"]))
            heard.chunk_s.append(time.monotonic())
            heard.first.set()
        case "done":
            heard.done = item["metadata"]
        case "error":
            heard.errors.append({"message": base64.b64decode(item["data"]).decode(), **item["metadata"]})
        case "start":
            pass
        case other:
            raise AssertionError(f"an unexpected line of modality {other}")


class Streams:
    """Concurrent requests. Leaving the block cancels those that still run."""

    def __init__(self, url: str, bodies: list[dict[str, Any]]) -> None:
        self.heard = [Heard() for _ in bodies]
        self._client = new_client(url)
        self._bodies = bodies
        self._tasks: list[asyncio.Task[Heard]] = []

    async def __aenter__(self) -> Streams:
        self._tasks = [
            asyncio.create_task(speak(self._client, body, heard))
            for body, heard in zip(self._bodies, self.heard, strict=True)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        await self._client.aclose()

    async def all_begun(self) -> None:
        """Wait until each request has produced audio or has ended."""
        async with asyncio.timeout(LIMIT_S):
            for heard in self.heard:
                await heard.first.wait()

    @property
    def have_ended(self) -> bool:
        """Whether each request has ended, with any outcome."""
        return all(task.done() for task in self._tasks)

    async def some_ended(self, count: int) -> None:
        """Wait until `count` requests have ended, with any outcome."""
        async with asyncio.timeout(LIMIT_S):
            for task in islice(asyncio.as_completed(self._tasks), count):
                await task

    async def all_ended(self) -> list[Heard]:
        """Wait until each request has ended, with any outcome."""
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*self._tasks)
        return self.heard
