"""Calls of a supervisor's admin socket on an event loop. One connection per call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import msgspec

from mstar_core.errors import MstarError, StartError, StateConflict, Unavailable, Unreachable

ANSWER_S: Final = 6.0
ROOM_CODES: Final = ("gpu_memory_short", "gpu_memory_never", "gpu_in_use", "no_memory")


async def call(
    admin_socket: Path, method: str, path: str, body: dict[str, Any] | None = None, limit_s: float = ANSWER_S
) -> dict[str, Any]:
    """Return the JSON object that a supervisor answers. Raises Unreachable, or the error that it reports."""
    try:
        async with asyncio.timeout(limit_s):
            status, content = await _exchange(
                admin_socket, method, path, b"" if body is None else msgspec.json.encode(body)
            )
        answer = msgspec.json.decode(content) if content else {}
    except (OSError, TimeoutError, EOFError, msgspec.DecodeError) as error:
        name = admin_socket.parent.name
        raise Unreachable(f"deployment {name!r} does not answer", str(error), f"mstarctl logs {name}") from error
    if not isinstance(answer, dict):
        raise Unreachable(f"deployment {admin_socket.parent.name!r} does not answer", "its answer is not an object")
    if status >= 400:
        raise _error(status, answer)
    return answer


async def _exchange(admin_socket: Path, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_unix_connection(str(admin_socket), limit=1 << 20)
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: mstar\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status_line, _, _ = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
        content = await reader.read()
    finally:
        writer.close()
    words = status_line.split()
    if len(words) < 2 or not words[1].isdigit():
        raise EOFError("the answer is not HTTP")
    return int(words[1]), content


def _error(status: int, facts: dict[str, Any]) -> MstarError:
    code = facts.get("code")
    kind: type[MstarError] = MstarError
    if code in ROOM_CODES:
        kind = StartError
    elif status == 409:
        kind = StateConflict
    elif status == 503:
        kind = Unavailable
    return kind(str(facts.get("title", "")), str(facts.get("detail", "")), str(facts.get("hint", "")), code=code)
