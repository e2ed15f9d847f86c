"""Client of the benchmark: one request on a kept connection, with prepared bytes, its times and its sound."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import aiohttp

from bench.gateway.models import Ask
from mstarctl.bench.client.answers import decode
from mstarctl.bench.client.wire import Record
from mstarctl.bench.measure.playback import silences

SAID: Final = 300
"""Characters of an error that a report keeps."""


class Lost(Exception):
    """A request without a whole answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A whole answer. first_s: time to its first byte. took_s: to its last. pieces: reads. gaps: in its sound."""

    first_s: float
    took_s: float
    pieces: int
    audio_s: float = 0.0
    gaps: int = 0


async def send(session: aiohttp.ClientSession, url: str, ask: Ask, limit_s: float) -> Heard:
    """Send a request and read its answer. Raises Lost with the reason if the answer is not whole within the limit."""
    began = time.monotonic_ns()
    marks: list[tuple[int, int]] = []
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            headers = {"Content-Type": ask.content_type}
            async with session.post(f"{url}/generate", data=ask.body, headers=headers) as answer:
                while piece := await answer.content.readany():
                    body += piece
                    marks.append((len(body), time.monotonic_ns()))
                status, kind = answer.status, answer.headers.get("Content-Type", "")
    except TimeoutError as error:
        raise Lost(f"no whole answer within {limit_s:.0f} s, {len(body)} bytes came") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Lost(f"{type(error).__name__}: {error}") from error
    end = time.monotonic_ns()
    record = Record(0, 0, 0, began, began, began, end, status, "", "", True, kind, marks, bytes(body))
    heard = decode(record, keeps_data=False)
    if heard.error or not marks:
        raise Lost(f"{heard.error} {heard.detail}"[:SAID])
    sound = [chunk for chunk in heard.chunks if chunk.kind == "audio"]
    lengths = [chunk.amount for chunk in sound]
    return Heard(
        first_s=(marks[0][1] - began) / 1e9,
        took_s=(end - began) / 1e9,
        pieces=len(marks),
        audio_s=sum(lengths),
        gaps=len(silences([chunk.at_ns / 1e9 for chunk in sound], lengths)),
    )
