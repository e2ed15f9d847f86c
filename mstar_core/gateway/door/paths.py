"""Paths of requests: the model that a path names, the ids in it, and the routes that make ids."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

PREFIX: Final = "/m/"
"""Path form that names the model: `/m/MODEL/generate`."""

ID_ROUTES: Final = (
    "/v1/responses/",
    "/v1/videos/",
    "/v1/sessions/",
    "/v1/requests/",
    "/v1/realtime/calls/",
    "/v1/audio/voices/",
    "/console/trace/",
)
"""Routes whose next part is an id that one replica has made or keeps."""

MAKERS: Final = (
    "/v1/responses",
    "/v1/videos",
    "/v1/audio/voices",
    "/v1/realtime/calls",
    "/v1/realtime/client_secrets",
)
"""Routes whose answer holds an id that later requests name."""

VOICES: Final = "/v1/audio/voices"

LISTS: Final = ("/v1/videos", VOICES)
"""Routes that list what was made, of all keys that a deployment knows."""

MADE: Final = {"/v1/videos": "video"}
"""Routes that need no name of a model where only one makes what they are about, an output modality."""

SEARCHED_BYTES: Final = 8192
"""First bytes of an answer in which its id is looked for."""

KNOWN: Final = (
    "/generate",
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/voices",
    "/v1/responses",
    "/v1/videos",
    "/v1/realtime",
    "/v1/robot/policy",
    "/v1/samples",
)
"""Routes that metrics name. Others are counted together, because a path may hold a client's text."""

QUIET: Final = ("/tokenize", "/detokenize", "/v1/audio/voices", "/v1/realtime/client_secrets", "/v1/audio/detect_turns")
"""Routes of POST that run no model."""

EVENT_ROUTES: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes whose streams are server-sent events, in which a comment is allowed before the first event."""

_ID: Final = re.compile(rb'"(?:id|value)"\s*:\s*"((?:resp|video|ek|rtc)[_-][A-Za-z0-9_.\-]{1,120})"')
_VOICE: Final = re.compile(rb'"id"\s*:\s*"([^"\\]{1,120})"')


@dataclass(frozen=True, slots=True)
class PathParts:
    """A path without the form that names its model. model: None if it names none. id: empty without one.

    raw: path and query as the deployment gets them, still escaped.
    """

    path: str
    raw: str
    model: str | None = None
    id: str = ""

    @property
    def prefix(self) -> str:
        """The part of the path that names the model, escaped; empty without one."""
        return "" if self.model is None else PREFIX + quote(self.model, safe="")

    @property
    def is_native(self) -> bool:
        """Whether errors have the native form too."""
        return not self.path.startswith("/v1/")

    @property
    def label(self) -> str:
        """The route as metrics name it."""
        if self.path in KNOWN:
            return self.path
        base = next((route for route in ID_ROUTES if self.path.startswith(route)), None)
        return f"{base}{{id}}" if base else "other"


def parts_of(raw: str) -> PathParts:
    """Split a raw path with its query. A model's name in it may be escaped."""
    model = None
    if raw.startswith(PREFIX):
        name, _, rest = raw[len(PREFIX) :].partition("?")[0].partition("/")
        model, raw = unquote(name), raw[len(PREFIX) + len(name) :] or "/"
        raw = raw if raw.startswith("/") else f"/{raw}"
        del rest
    path = unquote(raw.partition("?")[0])
    base = next((route for route in ID_ROUTES if path.startswith(route)), None)
    found = path[len(base) :].partition("/")[0] if base else ""
    return PathParts(path, raw, model, found)


def is_unguessable(name: str) -> bool:
    """Return whether an id was drawn at random by a deployment, so that knowing it is a right to it."""
    return name.startswith(("resp_", "video_", "rtc_"))


def voice_key(key: str | None, voice: str) -> str:
    """Return the name under which an uploaded voice is remembered. Clients choose names, so they belong to a key."""
    return f"voice {key or ''} {voice}"


def made_ids(path: str, piece: bytes, location: str = "", key: str | None = None) -> list[str]:
    """Return the ids that an answer makes: in its first bytes, or in its Location header. key: of the client."""
    if path == VOICES:
        return [voice_key(key, found.decode("utf-8", "replace")) for found in _VOICE.findall(piece[:SEARCHED_BYTES])]
    ids = [found.decode() for found in _ID.findall(piece[:SEARCHED_BYTES])]
    if location:
        ids.append(location.rstrip("/").rpartition("/")[2])
    return ids
