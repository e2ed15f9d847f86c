"""Client of `/generate` for the loads in `load.py`: one request on a connection of its own.

Connections, decoding and times are those of `mstarctl bench`. An overloaded client would take times late, so reports
contain the client's CPU time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mstarctl.bench.client.answers import SAMPLE_BYTES, decode
from mstarctl.bench.client.connection import ConnectionPool, Exchange
from mstarctl.bench.client.protocols import BOUNDARY, form
from mstarctl.bench.client.wire import Record, ServerAddress

LEFT: Final = "left"


@dataclass(slots=True)
class Heard:
    """Result of one request. marks[i]: arrival time of chunk i in monotonic seconds; samples[i]: its length.

    sound: all samples, 16 bits each, if they were asked for.
    text_marks: arrival times of pieces of text.
    code: empty if the stream completed, else the error's code, `http_N`, `cut`, or `left` if the client disconnected.
    usage: the server's own figures in its last line (queue_ms, ttft_ms, total_ms and counts).
    """

    sent_s: float = 0.0
    ended_s: float = 0.0
    marks: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    sound: bytes = b""
    text_marks: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    code: str = ""


async def ask(
    port: int,
    body: dict[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
    leave_after_s: float | None = None,
    limit_s: float = 300.0,
    keeps_sound: bool = False,
) -> Heard:
    """Send one request to `/generate` and read its response. See `ask_encoded`."""
    parts = request_parts(port, body, files)
    return await ask_encoded(port, parts, leave_after_s=leave_after_s, limit_s=limit_s, keeps_sound=keeps_sound)


async def ask_encoded(
    port: int,
    parts: tuple[bytes, bytes],
    *,
    leave_after_s: float | None = None,
    limit_s: float = 300.0,
    keeps_sound: bool = False,
) -> Heard:
    """Send head and body of one request and read its response. Disconnects after `leave_after_s`, as a browser does.

    Time starts before the connection is made. Raises TimeoutError after `limit_s`, OSError if the port is closed.
    """
    loop = asyncio.get_running_loop()
    exchange = Exchange(over=loop.create_future(), sent_ns=time.monotonic_ns())
    pool = ConnectionPool(ServerAddress(address="127.0.0.1", port=port, host=f"127.0.0.1:{port}"))
    timer = None if leave_after_s is None else loop.call_later(leave_after_s, exchange.end, LEFT)
    try:
        async with asyncio.timeout(limit_s):
            connection = await pool.send_fresh(exchange, *parts)
            try:
                await exchange.over
            finally:
                connection.abort()
    finally:
        if timer is not None:
            timer.cancel()
    return heard_of(exchange, keeps_sound=keeps_sound)


def request_parts(
    port: int, body: Mapping[str, Any], files: Mapping[str, bytes] | None, path: str = "/generate"
) -> tuple[bytes, bytes]:
    """Return head and body of a POST. files: name -> content; with files it is a multipart form."""
    if files:
        payload, kind = form(dict(body), tuple(files.items())), f"multipart/form-data; boundary={BOUNDARY}"
    else:
        payload, kind = json.dumps(body).encode(), "application/json"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode(), payload


def heard_of(exchange: Exchange, *, keeps_sound: bool = False) -> Heard:
    """Return the result of an exchange that has ended."""
    error = "cancelled" if exchange.error == LEFT else exchange.error
    record = Record(
        0,
        0,
        0,
        exchange.sent_ns,
        exchange.sent_ns,
        exchange.headers_ns,
        exchange.end_ns,
        exchange.status,
        error,
        exchange.detail,
        False,
        exchange.content_type,
        exchange.marks,
        bytes(exchange.body),
    )
    answer = decode(record, keeps_data=keeps_sound)
    sound = [chunk for chunk in answer.chunks if chunk.kind == "audio"]
    return Heard(
        sent_s=exchange.sent_ns / 1e9,
        ended_s=exchange.end_ns / 1e9,
        marks=[chunk.at_ns / 1e9 for chunk in sound],
        samples=[chunk.size_bytes // SAMPLE_BYTES for chunk in sound],
        sound=b"".join(chunk.data for chunk in sound),
        text_marks=[chunk.at_ns / 1e9 for chunk in answer.chunks if chunk.kind == "text"],
        usage=answer.usage,
        is_done=answer.is_done,
        code=code_of(exchange, answer.error, answer.code),
    )


def code_of(exchange: Exchange, error: str, code: str) -> str:
    """Return the code of a result: empty, the server's own, `http_N`, `cut` or `left`."""
    if exchange.error == LEFT:
        return LEFT
    if not error:
        return ""
    return code or (f"http_{exchange.status}" if exchange.status not in (0, 200) else "cut")
