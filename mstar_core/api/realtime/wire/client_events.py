"""Events of clients, by name, with the types of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mstar_core.api.http.strict_json import parse_object
from mstar_core.api.realtime.wire.audio_fields import WireFields
from mstar_core.api.realtime.wire.checked import checked, missing
from mstar_core.errors import RequestError


class ClientEvent(WireFields):
    """Fields of every event. event_id: of the client, returned in errors."""

    type: str
    event_id: str | None = None


class SessionUpdate(ClientEvent, kw_only=True):
    """session: fields that change."""

    session: dict[str, Any]


class BufferAppend(ClientEvent, kw_only=True):
    """audio: base64."""

    audio: str


class BufferCommit(ClientEvent, kw_only=True):
    """Make the buffered sound an item."""


class BufferClear(ClientEvent, kw_only=True):
    """Drop the buffered sound."""


class PlaybackClear(ClientEvent, kw_only=True):
    """Stop the active response."""


class ItemCreate(ClientEvent, kw_only=True):
    """previous_item_id: of the item before it; absent: the last one."""

    item: dict[str, Any]
    previous_item_id: str | None = None


class ItemRetrieve(ClientEvent, kw_only=True):
    """Send an item with its sound."""

    item_id: str


class ItemTruncate(ClientEvent, kw_only=True):
    """Cut speech of the model where it was played to."""

    item_id: str
    content_index: int
    audio_end_ms: int


class ItemDelete(ClientEvent, kw_only=True):
    """Remove an item."""

    item_id: str


class ResponseCreate(ClientEvent, kw_only=True):
    """response: settings in place of the session's."""

    response: dict[str, Any] | None = None


class ResponseCancel(ClientEvent, kw_only=True):
    """response_id: absent: the active response."""

    response_id: str | None = None


CLIENT_EVENTS: Final[Mapping[str, type[ClientEvent]]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": BufferAppend,
    "input_audio_buffer.commit": BufferCommit,
    "input_audio_buffer.clear": BufferClear,
    "output_audio_buffer.clear": PlaybackClear,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.truncate": ItemTruncate,
    "conversation.item.delete": ItemDelete,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}


def raw_event(message: bytes | str) -> dict[str, Any]:
    """Return the JSON of a message. Raises RequestError."""
    if isinstance(message, bytes):
        raise RequestError("the message is binary", hint="send JSON as text", code="invalid_json")
    return parse_object(message.encode())


def event_id_of(raw: Mapping[str, Any]) -> str | None:
    """Return the id that errors about an event return."""
    event_id = raw.get("event_id")
    return event_id[:128] if isinstance(event_id, str) else None


def client_event(raw: Mapping[str, Any]) -> ClientEvent:
    """Return an event with its types checked. Raises RequestError, which names the field."""
    kind = raw.get("type")
    if not isinstance(kind, str) or kind not in CLIENT_EVENTS:
        raise missing("type", CLIENT_EVENTS, kind)
    return checked({name: value for name, value in raw.items() if value is not None}, CLIENT_EVENTS[kind])
