"""Plain HTTP on a port that speaks TLS: recognised by its first byte, and answered with 400 as web servers do.

Used by the listeners of the api and of the gateway before the TLS handshake.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Final

from mstar_core.errors import RequestError

LINGER_S: Final = 30.0
"""Time in which the rest of a refused request is read. A close with unread bytes would discard the answer."""

PIECE: Final = 1 << 16


class HttpsRequired(RequestError):
    """A plain HTTP request on a port with a certificate."""

    status = 400
    code = "https_required"


async def speaks_http(client: socket.socket, limit_s: float) -> bool:
    """Return whether the first byte of a new connection begins a plain HTTP request. No byte is taken from it.

    A TLS record of a handshake begins with the byte 22 (RFC 8446, section 5.1), a method with a letter.
    Raises TimeoutError without a byte in `limit_s` seconds, and OSError if the client is gone.
    """
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(client, lambda: None if readable.done() else readable.set_result(None))
    try:
        async with asyncio.timeout(limit_s):
            await readable
    finally:
        loop.remove_reader(client)
    return client.recv(1, socket.MSG_PEEK).isalpha()


async def refuse(client: socket.socket) -> None:
    """Answer a plain HTTP request with 400 and close the connection. Raises nothing."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LINGER_S):
            await loop.sock_sendall(client, answer(is_head=client.recv(5, socket.MSG_PEEK) == b"HEAD "))
            client.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(client, PIECE):
                pass
    except OSError:  # the client is gone, or goes on sending (TimeoutError)
        pass
    finally:
        client.close()


def answer(*, is_head: bool = False) -> bytes:
    """Return the whole response. Its body is the error of native and of OpenAI routes."""
    error = HttpsRequired("this port speaks HTTPS", hint="use an address that begins with https:// or wss://")
    kind = {"message": error.public, "type": "invalid_request_error", "param": None, "code": error.code}
    body = json.dumps({"detail": error.public, "error": kind}).encode()
    head = (
        f"HTTP/1.1 {error.status} Bad Request\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if is_head else body)
