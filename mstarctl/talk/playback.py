"""Playback of one answer in real time, which knows how much has been heard and ends at once."""

from __future__ import annotations

import asyncio
import math
from typing import Final

from mstarctl.call.player import Player
from mstarctl.client.realtime import RATE

LEAD_S: Final = 0.15
"""Sound that the player holds ahead of its clock. More would be heard after an interrupt on slow pipes."""

PIECE_BYTES: Final = 2 * RATE // 10


class Playback:
    """Plays one answer. Owned by the session, which calls `end` after the last sound, or `stop`.

    Sound is passed on shortly before it is due, so the player's pipe holds little of it.
    """

    def __init__(self, command: tuple[str, ...]) -> None:
        self._player = Player(command)
        self._waiting = bytearray()
        self._more = asyncio.Event()
        self._is_ended = False
        self._written_s = 0.0
        # Time at which everything written has been heard. A player of complete files has not begun.
        self._until = math.inf if self._player.is_whole else 0.0
        self._task = asyncio.get_running_loop().create_task(self._play())

    def add(self, pcm: bytes) -> None:
        """Play samples after those before."""
        self._waiting += pcm
        self._more.set()

    def end(self) -> None:
        """Note that no sound follows."""
        self._is_ended = True
        self._more.set()

    @property
    def is_over(self) -> bool:
        """Whether everything has been heard, or the playback was stopped."""
        return self._task.done()

    @property
    def is_broken(self) -> bool:
        """Whether the player ended early, such as by its own error."""
        return self._player.is_broken

    @property
    def heard_s(self) -> float:
        """Seconds that have been heard. The player's own delay is not known, and counts as heard."""
        return max(0.0, self._written_s - max(0.0, self._until - asyncio.get_running_loop().time()))

    async def wait(self) -> None:
        """Wait until everything has been heard, or `stop`."""
        await asyncio.wait([self._task])

    def stop(self) -> None:
        """End the sound at once. Safe to call twice."""
        self._task.cancel()
        self._player.stop()

    async def _play(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting or not self._is_ended:
            if not self._waiting:
                self._more.clear()
                await self._more.wait()
                continue
            piece = bytes(self._waiting[:PIECE_BYTES])
            del self._waiting[:PIECE_BYTES]
            await asyncio.to_thread(self._player.write, piece, RATE, 1)
            self._written_s += len(piece) / 2 / RATE
            if not self._player.is_whole:
                self._until = max(self._until, loop.time()) + len(piece) / 2 / RATE
                await asyncio.sleep(self._until - loop.time() - LEAD_S)
        if self._player.is_whole:
            self._until = loop.time() + self._written_s
        await asyncio.to_thread(self._player.close)
