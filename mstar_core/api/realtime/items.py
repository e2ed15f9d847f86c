"""Items of a realtime conversation: messages with their parts, calls of functions and the results of calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mstar_core.api.realtime.sound.formats import Pcm
from mstar_core.api.realtime.sound.spoken import SpokenText
from mstar_core.codec import WAV_HEADER_BYTES, wav_header

Role = Literal["system", "user", "assistant"]
Status = Literal["in_progress", "completed", "incomplete"]


@dataclass(slots=True)
class WrittenPart:
    """Written text, of any role."""

    text: str


@dataclass(slots=True)
class HeardPart:
    """Sound of the user. file: a WAV file, which all requests share. transcript: None until it is known."""

    file: bytes
    rate: int
    transcript: str | None = None

    @classmethod
    def of(cls, samples: Pcm, rate: int) -> HeardPart:
        """Return the sound of some samples, [n] at `rate`."""
        pcm = samples.astype("<i2", copy=False)
        return cls(b"".join((wav_header(rate, 1, pcm.nbytes), pcm.data)), rate)

    @property
    def samples(self) -> Pcm:
        """Return the samples [n] inside of the file."""
        return np.frombuffer(self.file, "<i2", offset=WAV_HEADER_BYTES).astype(np.int16, copy=False)

    def drop(self) -> None:
        """Forget the sound, which no request reads any more."""
        self.file = wav_header(self.rate, 1, 0)


@dataclass(slots=True)
class PicturePart:
    """Image of the user. url: a `data:` URL, or an address that the deployment may fetch from.

    fetched: the file behind an address, once a request has fetched it.
    """

    url: str
    fetched: bytes | None = None

    def remember(self, file: bytes) -> None:
        """Keep a file that was fetched, so that later responses see the same image without its host."""
        if self.url[:5].lower() != "data:":
            self.fetched = file


@dataclass(slots=True)
class SpokenPart:
    """Speech of the model with its text. The sound itself is not kept."""

    spoken: SpokenText


ItemPart = WrittenPart | HeardPart | PicturePart | SpokenPart


@dataclass(slots=True, kw_only=True)
class MessageEntry:
    """A message of one role."""

    id: str
    role: Role
    parts: list[ItemPart] = field(default_factory=list)
    status: Status = "completed"


@dataclass(slots=True, kw_only=True)
class CallEntry:
    """A call of a function by the model. arguments: JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "completed"


@dataclass(slots=True, kw_only=True)
class ResultEntry:
    """The result of a call, from the client."""

    id: str
    call_id: str
    output: str
    status: Status = "completed"


Entry = MessageEntry | CallEntry | ResultEntry


def text_of(entry: MessageEntry) -> str:
    """Return the words of a message: written ones, transcripts of speech, and those of sound where they are known."""
    return " ".join(text for text in map(_words, entry.parts) if text)


def _words(part: ItemPart) -> str:
    match part:
        case WrittenPart():
            return part.text
        case SpokenPart():
            return part.spoken.text
        case HeardPart():
            return part.transcript or ""
        case PicturePart():
            return ""


def size_of(entry: Entry) -> int:
    """Return the characters of an item's texts and images, without its sound."""
    match entry:
        case MessageEntry():
            return sum(map(_size, entry.parts))
        case CallEntry():
            return len(entry.name) + len(entry.arguments)
        case ResultEntry():
            return len(entry.output)


def _size(part: ItemPart) -> int:
    match part:
        case PicturePart():
            return len(part.url) + len(part.fetched or b"")
        case WrittenPart() | SpokenPart() | HeardPart():
            return len(_words(part))


def sounds_of(entries: Iterable[Entry]) -> list[HeardPart]:
    """Return the sounds of the user in some items."""
    parts = (part for entry in entries if isinstance(entry, MessageEntry) for part in entry.parts)
    return [part for part in parts if isinstance(part, HeardPart)]
