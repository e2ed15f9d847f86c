"""Numbers of the messages between hosts, by which a receiver notices that some were lost.

ZMQ connects again after a broken connection, but what was on the way is lost. A receiver takes nothing behind a gap:
what it has of a sender is then the same as if that one had died at the gap, and the supervisor makes that true.
"""

from __future__ import annotations

import secrets
import struct
from typing import Final, NamedTuple

from mstar_core.errors import TransportError

HEAD: Final = struct.Struct(">QQI")
"""Link, number of the message, sender's incarnation. The sender's name and a zero byte follow."""

END: Final = b"\0"


class LinkBreak(NamedTuple):
    """Loss of messages of a sender. lost: how many until it was noticed."""

    sender: str
    incarnation: int
    lost: int


class NumberedLink:
    """Sender's end: one connection to one receiver. Its messages are numbered from 0."""

    def __init__(self, sender: str, incarnation: int) -> None:
        self._link = secrets.randbits(64)
        self._incarnation = incarnation
        self._name = sender.encode() + END
        self._number = self._marked = self._at_tick = 0

    @property
    def mark(self) -> bytes:
        """A frame without a message. It shows the receiver what was lost although no message follows."""
        return HEAD.pack(self._link, self._number, self._incarnation) + self._name

    def frame(self, message: bytes) -> bytes:
        """Return a message with the next number, which it has once it is `sent`."""
        return b"".join((self.mark, message))

    def sent(self) -> None:
        """Note that the last frame is in the queue."""
        self._number += 1

    def is_mark_due(self, *, is_idle_tick: bool) -> bool:
        """Return whether to send a mark at this tick of the sender: once no message has followed for a tick.

        is_idle_tick: whether links that have sent nothing since their last mark repeat it.
        """
        is_quiet, self._at_tick = self._at_tick == self._number, self._number
        if not is_quiet or (self._marked == self._number and not is_idle_tick):
            return False
        self._marked = self._number
        return True


class NumberedLinks:
    """Receiver's end of all links. breaks: those not taken yet, one for each broken link."""

    def __init__(self) -> None:
        self.breaks: list[LinkBreak] = []
        self._next: dict[int, int] = {}
        self._senders: dict[int, tuple[str, int]] = {}
        self._heard: set[int] = set()
        self._broken: set[int] = set()

    def heard(self) -> set[tuple[str, int]]:
        """Return (sender, incarnation) of each message received since the last call. Broken links do not count."""
        heard, self._heard = self._heard, set()
        return {self._senders[link] for link in heard}

    def take(self, frame: bytes) -> memoryview | None:
        """Return the message of a frame; None for a mark, and for anything of a broken link.

        Raises TransportError for a frame that is none.
        """
        end = frame.find(END, HEAD.size)
        if end < 0:
            raise TransportError("a message of another host has no number", f"{len(frame)} bytes")
        link, number, incarnation = HEAD.unpack_from(frame)
        if link in self._broken:
            return None
        expected = self._next.get(link, 0)
        if number != expected:
            self._broken.add(link)
            self._next.pop(link, None)
            self._senders.pop(link, None)
            self._heard.discard(link)
            self.breaks.append(LinkBreak(_name(frame, end), incarnation, max(0, number - expected)))
            return None
        if link not in self._senders:
            self._senders[link] = _name(frame, end), incarnation
        self._heard.add(link)
        if end + 1 == len(frame):
            return None
        self._next[link] = number + 1
        return memoryview(frame)[end + 1 :]


def _name(frame: bytes, end: int) -> str:
    """Return the sender's name. end: where it ends."""
    return frame[HEAD.size : end].decode("utf-8", "replace")
