"""Decoded images of sessions, so that a request decodes only those that are new to its session. Owned by `Sessions`."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from mstar_core.api.preprocess.pool import Read
from mstar_core.plugin.processor import Inputs, KeptMedia, PromptRequest

KEPT: Final = "image"
"""Modality whose files are kept. Sounds need no decoding worth it, and a decoded video is large."""

LOOP_BYTES: Final = 1 << 20
"""Files up to this size are hashed on the event loop, in about a millisecond."""

Place = tuple[str, bytes]
"""Session, and digest of the file."""


class SessionMedia:
    """Decoded images (`Inputs.kept`) by session and file. At most `most_bytes` of all sessions.

    Beyond it, the entries that were used least recently leave. A session sees only its own entries.
    """

    def __init__(self, most_bytes: int, is_open: Callable[[str], bool]) -> None:
        """is_open: whether a session has not ended; a request may end after its session."""
        self.size_bytes = 0
        self.on_read: Callable[[str, int], object] = lambda how, count: None  # `kept` or `decoded`, and how many
        self._most_bytes = most_bytes
        self._is_open = is_open
        self._entries: OrderedDict[Place, KeptMedia] = OrderedDict()

    async def read(self, session: str, prompt: PromptRequest, read: Read) -> Inputs:
        """Process a prompt with what its session keeps of its files, and keep what it decodes. Raises as `read`."""
        numbers = [number for number, part in enumerate(prompt.media) if part.modality == KEPT]
        if not numbers or not self._most_bytes:
            return await read(prompt)
        media = list(prompt.media)
        places: dict[int, Place] = {}
        for number in numbers:
            place = places[number] = session, await _digest(media[number].data)
            media[number] = replace(media[number], kept=self._find(place))
        inputs = await read(replace(prompt, media=media, keeps_media=True))
        for number, kept in inputs.kept.items():
            if number in places:
                self._keep(places[number], kept)
        used = sum(media[number].kept is not None and number not in inputs.kept for number in numbers)
        self.on_read("kept", used)
        self.on_read("decoded", len(numbers) - used)
        return replace(inputs, kept={})

    def end(self, session: str) -> None:
        """Forget what a session keeps."""
        for place in [place for place in self._entries if place[0] == session]:
            self._drop(place)

    def _find(self, place: Place) -> KeptMedia | None:
        kept = self._entries.get(place)
        if kept is not None:
            self._entries.move_to_end(place)
        return kept

    def _keep(self, place: Place, kept: KeptMedia) -> None:
        if place in self._entries:
            self._drop(place)
        if kept.size_bytes > self._most_bytes or not self._is_open(place[0]):
            return
        self._entries[place] = kept
        self.size_bytes += kept.size_bytes
        while self.size_bytes > self._most_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, place: Place) -> None:
        self.size_bytes -= self._entries.pop(place).size_bytes


async def _digest(data: bytes) -> bytes:
    made = hashlib.blake2b(data, digest_size=16) if len(data) <= LOOP_BYTES else None
    if made is None:
        made = await asyncio.to_thread(hashlib.blake2b, data, digest_size=16)
    return made.digest()
