"""Playback of the sound that requests have sent, as their clients hear it. Owned by the executor.

A client plays sound from its first piece on. If it has played everything, it pauses until the next piece comes. The
rank that makes the sound tells the other ranks of the request by `Playing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mstar_core.engine.base import Handle
    from mstar_core.worker.state.stream_inbox import StreamInbox

LOST_S: Final = 1.0
"""Time since a buffer ran dry after which other work no longer yields: the stall has another cause, such as a text
that still arrives."""

FALL: Final = 0.5
RISE: Final = 0.03
"""Weights of a measurement that is below and above the estimate, which so stays near the least ones."""


@dataclass(slots=True)
class Sound:
    """Sound of one request. dry_at: time at which the client has played all of it; None before the first piece.

    inbox: stream whose chunks become sound on this rank, None if there is none. taken: items of it that are taken.
    taken_at: time of the last chunk. done_at: (on other ranks) time at which the next piece is expected.
    """

    dry_at: float | None = None
    inbox: StreamInbox | None = None
    taken: int = 0
    taken_at: float = 0.0
    done_at: float = 0.0


@dataclass(slots=True)
class Playback:
    """Sound of all requests. rate: values of sound per second, 0.0 without sound.

    heard: sound that plays and goes on. item_s: seconds between items of a stream that becomes sound, piece_s: from a
    chunk of it to its sound, both while little else runs. underruns: how often a buffer was empty.
    """

    rate: float
    clock: Callable[[], float]
    heard: dict[Handle, Sound] = field(default_factory=dict)
    item_s: float = 0.0
    piece_s: float = 0.0
    underruns: int = 0

    def took(self, sound: Sound, inbox: StreamInbox, stop: int) -> None:
        """Note that a chunk is being made into sound. stop: number of the item behind it in its stream."""
        now = self.clock()
        if sound.taken and stop > sound.taken:
            self.item_s = undisturbed(self.item_s, (now - sound.taken_at) / (stop - sound.taken))
        sound.inbox, sound.taken, sound.taken_at = inbox, stop, now

    def sent(self, handle: Handle, sound: Sound, values: int, *, is_heard: bool) -> None:
        """Note a piece of sound that leaves for the client. is_heard: a client plays it while it comes."""
        if not self.rate:
            return
        now = self.clock()
        if sound.taken_at:
            self.piece_s = undisturbed(self.piece_s, now - sound.taken_at)
        if sound.dry_at is not None and now > sound.dry_at:
            self.underruns += 1
        sound.dry_at = max(now, sound.dry_at or now) + values / self.rate
        if is_heard:
            self.heard[handle] = sound

    def ended(self, handle: Handle) -> None:
        """Note that no more sound of a request follows for now."""
        self.heard.pop(handle, None)

    def needed_s(self, sound: Sound, now: float) -> float:
        """Return the seconds until the next piece of sound, if nothing delays it."""
        if sound.inbox is None:
            return max(0.0, sound.done_at - now)
        return sound.inbox.missing * self.item_s + self.piece_s

    def least_s(self) -> float:
        """Return the seconds by which the next piece of sound of any request may be delayed; infinite without any."""
        if not self.heard:
            return math.inf
        now, least = self.clock(), math.inf
        for sound in self.heard.values():
            ahead_s = (sound.dry_at or now) - now
            if ahead_s > -LOST_S:
                least = min(least, ahead_s - self.needed_s(sound, now))
        return least


def undisturbed(before: float, new: float) -> float:
    """Return an estimate of a time that other work often prolongs, with a new measurement; 0.0 has none yet."""
    return before + (FALL if new < before else RISE) * (new - before) if before else new
