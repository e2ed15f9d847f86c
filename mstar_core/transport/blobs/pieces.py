"""Wire format of blobs: a reader requests pieces of a tensor, and the owner answers each request on its own.

A request is one frame, a packed `Piece`. The answer begins with the same frame. The elements follow, or an empty frame
and the reason why there are none. The owner keeps no state, so a request may be repeated.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

PIECE_BYTES: Final = 256 << 10
"""Largest piece. Its encryption takes 0.3 to 1 ms; a small tensor waits for the pieces that are on the way."""

WINDOW: Final = 16
"""Pieces on the way from one owner: 4 MiB cover a round trip of 5 ms at the speed of encryption."""

_FORMAT: Final = struct.Struct("<QQQQI")


class Piece(NamedTuple):
    """A part of a tensor. number: chosen by the reader for a fetch. offset: in the owner's arena. slot: of the loan."""

    number: int
    generation: int
    offset: int
    size_bytes: int
    slot: int

    def pack(self) -> bytes:
        return _FORMAT.pack(*self)


def unpack(data: bytes) -> Piece | None:
    """Return the piece of a request or an answer, None if it is malformed."""
    return Piece(*_FORMAT.unpack(data)) if len(data) == _FORMAT.size else None
