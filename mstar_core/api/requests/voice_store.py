"""Uploaded voices: a recording and its text by name, in a folder of the run directory. Used by /v1/audio routes.

A voice belongs to the API key that uploaded it. Each is one file, written whole and renamed, so that any process that
dies leaves either all of it or nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from mstar_core.errors import Duplicate, NotFound, Overloaded

MOST: Final = 256
"""Voices of one key."""

SUFFIX: Final = ".voice"


class StoredVoice(msgspec.Struct, frozen=True, kw_only=True):
    """A voice. recording: the uploaded file; text: what it says, empty if unknown; created: Unix time."""

    name: str
    recording: bytes
    text: str = ""
    created: int = 0


class VoiceStore:
    """The voices of all keys. Owned by the service."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def voices(self, owner: bytes) -> list[StoredVoice]:
        """Return the voices of a key, by name."""
        found = [voice for path in self._of(owner).glob(f"*{SUFFIX}") if (voice := _read(path)) is not None]
        return sorted(found, key=lambda voice: voice.name)

    def get(self, owner: bytes, name: str) -> StoredVoice | None:
        """Return a voice of a key by its name in any case, None if there is none."""
        return _read(self._path(owner, name))

    def put(self, owner: bytes, voice: StoredVoice) -> None:
        """Store a voice. Raises Duplicate for a known name, Overloaded for too many voices."""
        path = self._path(owner, voice.name)
        if path.exists():
            hint = "choose another name, or delete the voice"
            raise Duplicate(f"there is a voice {voice.name!r}", hint=hint, field="name", code="voice_exists")
        if len(list(path.parent.glob(f"*{SUFFIX}"))) >= MOST:
            raise Overloaded(f"there are {MOST} voices", hint="delete one")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.msgpack.encode(voice))
        part.rename(path)

    def delete(self, owner: bytes, name: str) -> None:
        """Delete a voice of a key. Raises NotFound."""
        try:
            self._path(owner, name).unlink()
        except FileNotFoundError:
            raise NotFound(f"there is no voice {name[:40]!r}", hint="GET /v1/audio/voices lists them") from None

    def _of(self, owner: bytes) -> Path:
        return self._folder / owner.hex()

    def _path(self, owner: bytes, name: str) -> Path:
        digest = hashlib.blake2b(name.strip().lower().encode(), digest_size=16).hexdigest()
        return self._of(owner) / f"{digest}{SUFFIX}"


def _read(path: Path) -> StoredVoice | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=StoredVoice)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
