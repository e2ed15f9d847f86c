"""Mutual proof of the key of a group, made before the first plan on a TCP connection.

The leader sends a nonce. The follower answers with its place, a nonce of its own and a proof of the key over both; the
leader answers with its proof. A connection without the key thus gets a random nonce and nothing else, and a proof is
valid for one connection alone. The connection is neither encrypted nor authenticated after that.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Final

from mstar_core.parallel.groups import GroupPlace

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32

_INDEX: Final = struct.Struct("<I")
ANSWER_BYTES: Final = _INDEX.size + NONCE_BYTES + PROOF_BYTES
"""Bytes that a follower sends: its place, its nonce, its proof."""


def nonce() -> bytes:
    """Return fresh random bytes, which make a proof valid once."""
    return secrets.token_bytes(NONCE_BYTES)


class Proof:
    """The proofs of one connection. Used by both ends."""

    def __init__(self, place: GroupPlace, leader_nonce: bytes) -> None:
        """place: of this process. leader_nonce: that the leader has sent."""
        assert place.meeting is not None
        self._key = place.meeting.key(f"{place.name} plans")
        self._size = place.size
        self._leader_nonce = leader_nonce

    def answer(self, index: int, own_nonce: bytes) -> bytes:
        """Return what the follower at a place of the group sends."""
        return _INDEX.pack(index) + own_nonce + self._of(b"follower", index, own_nonce)

    def verified(self, answer: bytes) -> tuple[int, bytes] | None:
        """Return place and nonce of a follower, None if its answer does not prove the key."""
        (index,) = _INDEX.unpack_from(answer)
        follower_nonce = answer[_INDEX.size : _INDEX.size + NONCE_BYTES]
        expected = self._of(b"follower", index, follower_nonce)
        if not hmac.compare_digest(answer[-PROOF_BYTES:], expected) or not 0 < index < self._size:
            return None
        return index, follower_nonce

    def leader(self, index: int, follower_nonce: bytes) -> bytes:
        """Return what the leader sends to the follower at a place of the group, which compares it."""
        return self._of(b"leader", index, follower_nonce)

    def _of(self, role: bytes, index: int, follower_nonce: bytes) -> bytes:
        return hmac.digest(self._key, role + self._leader_nonce + follower_nonce + _INDEX.pack(index), hashlib.sha256)
