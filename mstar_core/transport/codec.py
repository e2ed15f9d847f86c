"""What turns messages into bytes and back. Passed in by the process that owns the sockets (`messages.wire`)."""

from __future__ import annotations

from typing import Protocol, TypeVar

Sent_contra = TypeVar("Sent_contra", contravariant=True)
Taken_co = TypeVar("Taken_co", covariant=True)


class Encodes(Protocol[Sent_contra]):
    """The sending half of a codec."""

    def encode(self, message: Sent_contra, /) -> bytes: ...


class Decodes(Protocol[Taken_co]):
    """The receiving half of a codec. Raises on bytes that are no message."""

    def decode(self, data: bytes, /) -> Taken_co: ...
