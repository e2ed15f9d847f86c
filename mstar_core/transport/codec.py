"""What turns messages into bytes and back. Passed in by the process that owns the sockets: `messages.wire.WireCodec`."""

from __future__ import annotations

from typing import Protocol, TypeVar

Sent = TypeVar("Sent", contravariant=True)
Taken = TypeVar("Taken", covariant=True)


class Encodes(Protocol[Sent]):
    """The sending half of a codec."""

    def encode(self, message: Sent, /) -> bytes: ...


class Decodes(Protocol[Taken]):
    """The receiving half of a codec. Raises on bytes that are no message."""

    def decode(self, data: bytes, /) -> Taken: ...
