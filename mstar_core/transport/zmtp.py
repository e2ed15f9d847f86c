"""The bytes of ZMTP 3.0 between a PUSH and a PULL socket without security: greeting, READY, message frames.

Used by `LocalPush` and `LocalPull`, which speak it themselves: between two processes of one host libzmq wakes three
threads for a message (the sender's own, the receiver's own, the receiver), a plain socket only the receiver. Source:
https://rfc.zeromq.org/spec/23/ (ZMTP 3.0, mechanism NULL).
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Final

GREETING: Final = struct.pack(">B8xBBB20sB31x", 0xFF, 0x7F, 3, 0, b"NULL", 0)
"""Signature, version, mechanism, as-server, filler: 64 bytes.

Each side sends it, READY and its messages without waiting for the other's. The PULL socket of libzmq does not take
that: it wants to have said READY before the first message comes.
"""

GREETING_BYTES: Final = 64
LARGEST_BYTES: Final = 128 << 20
"""Frames beyond are no message of ours: twice the largest that a courier sends."""

_LONG: Final = 2
_COMMAND: Final = 4
_SIZE: Final = struct.Struct(">Q")
_HEADER: Final = struct.Struct(">BQ")
_SHORT_BYTES: Final = 255


class NotZmtp(ValueError):
    """A peer sent what this protocol does not allow; its connection is of no more use."""


def ready(kind: bytes) -> bytes:
    """The READY command of a socket of a kind, PUSH or PULL."""
    name = b"Socket-Type"
    body = b"\x05READY" + bytes([len(name)]) + name + struct.pack(">I", len(kind)) + kind
    return bytes([_COMMAND, len(body)]) + body


def header(size: int) -> bytes:
    """What goes before a message of `size` bytes."""
    return bytes((0, size)) if size <= _SHORT_BYTES else _HEADER.pack(_LONG, size)


def check_greeting(greeting: bytes) -> None:
    """Raise NotZmtp for a greeting of another protocol, an older version or a mechanism with keys."""
    if greeting[0] != GREETING[0] or greeting[9] != GREETING[9] or greeting[10] < GREETING[10]:
        raise NotZmtp("the greeting is not of ZMTP 3")
    if greeting[12:32].rstrip(b"\0") != b"NULL":
        raise NotZmtp("the mechanism is not NULL")


def cut(buffer: bytearray, into: deque[bytes]) -> None:
    """Move whole messages from the front of a buffer into a queue; commands are passed over. Raises NotZmtp.

    Frames of one message of several parts are a message each.
    """
    at, end = 0, len(buffer)
    while end - at >= 2:
        flags = buffer[at]
        if flags & _LONG:
            if end - at < _HEADER.size:
                break
            start, size = at + _HEADER.size, _SIZE.unpack_from(buffer, at + 1)[0]
        else:
            start, size = at + 2, buffer[at + 1]
        if flags > 7 or size > LARGEST_BYTES:
            raise NotZmtp(f"a frame with flags {flags} and {size} bytes")
        if end - start < size:
            break
        at = start + size
        if not flags & _COMMAND:
            into.append(bytes(memoryview(buffer)[start:at]))
    if at:
        del buffer[:at]
