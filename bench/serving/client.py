"""Cheap client of `/generate`: HTTP/1.1 on a plain connection, one line of JSON at a time.

Used by the loads in `load.py`. The receiving callback takes the time of each chunk. An overloaded client would take it
late, so reports contain the client's CPU time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

SAMPLE_BYTES: Final = 2
BOUNDARY: Final = "bench-form"
CHUNKED: Final = b"transfer-encoding: chunked"


class Line(msgspec.Struct):
    """One line of the response. data: JSON text of a base64 string, not decoded because only its length is needed."""

    modality: str
    data: msgspec.Raw = msgspec.Raw(b'""')
    metadata: dict[str, Any] = {}

    @property
    def size_bytes(self) -> int:
        """Number of decoded bytes."""
        text = bytes(self.data)
        return (len(text) - 2) // 4 * 3 - text[-3:-1].count(b"=")


@dataclass(slots=True)
class Heard:
    """Result of one request. marks[i]: arrival time of chunk i in monotonic seconds; samples[i]: its length.

    text_marks: arrival times of pieces of text.
    code: empty if the stream completed, else the error's code, `http_N`, `cut`, or `left` if the client disconnected.
    usage: the server's own figures in its last line (queue_ms, ttft_ms, total_ms and counts).
    """

    sent_s: float = 0.0
    ended_s: float = 0.0
    marks: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    text_marks: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    code: str = ""


class Answer(asyncio.Protocol):
    """Protocol that reads one chunked response. Owned by `ask`; `over` is set at its end."""

    def __init__(self, request: bytes, heard: Heard, on_chunk: Callable[[Heard], bool] | None) -> None:
        self.heard = heard
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_chunk = on_chunk
        self._decoder = msgspec.json.Decoder(Line)
        self._wire = bytearray()
        self._lines = bytearray()
        self._status = 0
        self._is_chunked = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._wire += data
        if self._status or self._read_head():
            if not self._is_chunked:
                return  # an error: its body is read when the connection ends
            while not self.over.done() and self._take_chunk(now):
                pass

    def connection_lost(self, exc: Exception | None) -> None:
        if self.over.done():
            return
        if self._status and self._status != 200:
            self._refused()
        self.end(self.heard.code or "cut")

    def leave(self) -> None:
        """Disconnect without reading further, like a closed browser window."""
        if self._transport is not None:
            self._transport.abort()
        self.end("left")

    def end(self, code: str) -> None:
        """Close the connection and record the outcome."""
        if not self.over.done():
            self.heard.code = code
            self.heard.ended_s = time.monotonic()
            self.over.set_result(None)
        if self._transport is not None:
            self._transport.close()

    def _read_head(self) -> bool:
        at = self._wire.find(b"\r\n\r\n")
        if at < 0:
            return False
        head = bytes(self._wire[:at]).lower()
        del self._wire[: at + 4]
        self._status = int(head.split(b" ", 2)[1])
        self._is_chunked = CHUNKED in head and self._status == 200
        return True

    def _take_chunk(self, now: float) -> bool:
        """Parse one chunk of the transfer coding. Return whether another may follow."""
        at = self._wire.find(b"\r\n")
        if at < 0:
            return False
        size = int(self._wire[:at].split(b";")[0], 16)
        if len(self._wire) < at + size + 4:
            return False
        if size == 0:
            self.end("" if self.heard.is_done else self.heard.code or "cut")
            return False
        self._lines += self._wire[at + 2 : at + 2 + size]
        del self._wire[: at + size + 4]
        self._read_lines(now)
        return True

    def _read_lines(self, now: float) -> None:
        *whole, rest = bytes(self._lines).split(b"\n")
        self._lines = bytearray(rest)
        for text in whole:
            if text.strip() and not self.over.done():
                self._sort(self._decoder.decode(text), now)

    def _sort(self, line: Line, now: float) -> None:
        match line.modality:
            case "audio":
                self.heard.marks.append(now)
                self.heard.samples.append(line.size_bytes // SAMPLE_BYTES)
                if self._on_chunk is not None and self._on_chunk(self.heard):
                    self.leave()
            case "text":
                self.heard.text_marks.append(now)
            case "done":
                self.heard.is_done = True
                self.heard.usage = line.metadata.get("usage", {})
            case "error":
                self.end(str(line.metadata.get("code", "error")))

    def _refused(self) -> None:
        try:
            self.heard.code = str(json.loads(self._wire)["error"]["code"])
        except (ValueError, KeyError, TypeError):
            self.heard.code = f"http_{self._status}"


def request_bytes(port: int, body: dict[str, Any], files: Mapping[str, bytes] | None = None) -> bytes:
    """Return the bytes of a POST to `/generate`. The server closes the connection after its response.

    files: name -> content; with files the request is a multipart form.
    """
    payload, kind = (_form(body, files), f"multipart/form-data; boundary={BOUNDARY}") if files else (
        json.dumps(body).encode(), "application/json"
    )  # fmt: skip
    head = (
        f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + payload


def _form(body: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    lines = []
    for name, value in body.items():
        text = value if isinstance(value, str) else json.dumps(value)
        lines += [f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'.encode()]
    for name, content in files.items():
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        lines += [head.encode(), content, b"\r\n"]
    return b"".join([*lines, f"--{BOUNDARY}--\r\n".encode()])


async def ask(
    port: int,
    body: dict[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
    leave_after_s: float | None = None,
    on_chunk: Callable[[Heard], bool] | None = None,
    limit_s: float = 300.0,
) -> Heard:
    """Send one request and read its response. Disconnects after `leave_after_s`, or if `on_chunk` returns true.

    Time starts before the connection is made. Raises TimeoutError after `limit_s`, OSError if the port is closed.
    """
    heard = Heard(sent_s=time.monotonic())
    loop = asyncio.get_running_loop()
    content = request_bytes(port, body, files)
    _, answer = await loop.create_connection(lambda: Answer(content, heard, on_chunk), "127.0.0.1", port)
    timer = loop.call_later(leave_after_s, answer.leave) if leave_after_s is not None else None
    try:
        async with asyncio.timeout(limit_s):
            await answer.over
    finally:
        if timer is not None:
            timer.cancel()
        answer.end(heard.code or "cut")
    return heard
