"""Utterances of a text that arrives in pieces, for a model that reads on while it speaks. Used by the speech route.

One task reads the text, so that a request which ends early leaves the rest of the text to the next one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from mstar_core.api.parse.params import LiveText
from mstar_core.plugin.processor import TextReader

UTTERANCE_CHARS: Final = 400
"""Text after which an utterance ends with its sentence, about half a minute of speech: longer ones drift."""

WAITING_PIECES: Final = 16
"""Pieces of text that may wait for the reader; then the body waits."""

SENTENCE_END: Final = re.compile(r"(?<=[.!?…])\s|(?<=[。！？])|\n")


class Utterances:
    """Divides a text into utterances, and each of them into pieces of ids. reader: of the model."""

    def __init__(self, reader: TextReader, limit: int = UTTERANCE_CHARS) -> None:
        self._reader = reader
        self._limit = limit
        self._pieces: asyncio.Queue[str | Exception | None] = asyncio.Queue(WAITING_PIECES)
        self._rest = ""
        self._before = ""
        self._length = 0
        self._is_cut = False
        self._is_over = False

    @asynccontextmanager
    async def reading(self, texts: AsyncIterator[str]) -> AsyncIterator[AsyncIterator[LiveText]]:
        """Read a text during the block. The iterator yields its utterances, and raises what `texts` raises."""
        task = asyncio.create_task(self._read(texts), name="text that arrives")
        try:
            yield self._utterances()
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _read(self, texts: AsyncIterator[str]) -> None:
        try:
            async for text in texts:
                if text:
                    await self._pieces.put(text)
        except Exception as error:  # noqa: BLE001  handed to the reader of the text
            await self._pieces.put(error)
        else:
            await self._pieces.put(None)

    async def _utterances(self) -> AsyncIterator[LiveText]:
        """The next utterance begins once the one before has been read, or its request has ended."""
        while not self._is_over:
            self._length = 0
            first, is_ended = await self._first()
            if not first:
                return
            is_read = asyncio.Event()
            yield LiveText(first=first, more=self._more(is_read, is_ended=is_ended))
            await is_read.wait()

    async def _first(self) -> tuple[Sequence[int], bool]:
        """Return the first ids, none at the end of the text, and whether they are all."""
        while True:
            text = await self._next()
            if text is None:
                ids = self._reader.end()
                if len(ids) > 1 or self._is_over:
                    return (ids if len(ids) > 1 else ()), True
            elif ids := self._reader.push(text):
                return ids, False

    async def _more(self, is_read: asyncio.Event, *, is_ended: bool) -> AsyncIterator[Sequence[int]]:
        try:
            while not is_ended:
                text = await self._next()
                is_ended = text is None
                ids = self._reader.end() if text is None else self._reader.push(text)
                if ids:
                    yield ids
        finally:
            is_read.set()

    async def _next(self) -> str | None:
        """Return more of an utterance, None at its end. Utterances do not depend on the division into pieces."""
        if self._is_cut:
            self._is_cut = False
            return None
        if not self._rest and not await self._has_more():
            return None
        spare = max(0, self._limit - self._length)
        text, known = self._before + self._rest, len(self._before)
        end = SENTENCE_END.search(text, known + spare) if len(self._rest) > spare else None
        cut = len(self._rest) if end is None else end.end() - known
        taken, self._rest = self._rest[:cut], self._rest[cut:]
        self._before, self._length = text[: known + cut][-1:], self._length + cut
        if not taken:
            return None
        self._is_cut = end is not None
        return taken

    async def _has_more(self) -> bool:
        """Wait for a piece. Returns False at the end of the text."""
        piece = None if self._is_over else await self._pieces.get()
        self._is_over = not isinstance(piece, str)
        if isinstance(piece, Exception):
            raise piece
        self._rest = piece or ""
        return piece is not None
