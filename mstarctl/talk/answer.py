"""One answer of a conversation: its text, its sound, and how much of it has been heard."""

from __future__ import annotations

from dataclasses import dataclass, field

from mstarctl.client.realtime import RATE
from mstarctl.talk.playback import Playback


@dataclass(slots=True)
class TalkAnswer:
    """An answer so far. Owned by the session.

    response_id: of its response, which may still run. item_id: of its message; empty before it began. part: index of
    the content that is sound. playback: None if no player plays it. is_done: the response has ended. is_cut: it was
    interrupted, and further output is dropped. has_calls: it calls functions.
    """

    response_id: str
    item_id: str = ""
    part: int = 0
    text: str = ""
    sound: bytearray = field(default_factory=bytearray)
    playback: Playback | None = None
    is_done: bool = False
    is_cut: bool = False
    has_calls: bool = False

    @property
    def is_live(self) -> bool:
        """Whether it is still generated or heard."""
        if self.is_cut:
            return False
        return not self.is_done or (self.playback is not None and not self.playback.is_over)

    def add(self, pcm: bytes, player: tuple[str, ...] | None) -> None:
        """Take sound, and play it with the command of a player."""
        self.sound += pcm
        if player is not None:
            self.playback = self.playback or Playback(player)
            self.playback.add(pcm)

    def cut(self) -> int:
        """End the sound at once and forget the part that was not heard. Returns the milliseconds that were heard.

        Without a player, everything that arrived counts as heard.
        """
        self.is_cut = True
        heard = len(self.sound) // 2
        if self.playback is not None:
            heard = min(heard, int(self.playback.heard_s * RATE))
            self.playback.stop()
        heard_ms = heard * 1000 // RATE
        del self.sound[2 * (heard_ms * RATE // 1000) :]
        return heard_ms
