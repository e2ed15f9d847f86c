"""Items as clients send and get them, and the entries of the conversation that they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import pybase64
from msgspec import Meta

from mstar_core.api.parse.media import decoded
from mstar_core.api.realtime.conversation import RealtimeConversation
from mstar_core.api.realtime.history import ID_CHARS, new_id
from mstar_core.api.realtime.items import (
    CallEntry,
    Entry,
    HeardPart,
    ItemPart,
    MessageEntry,
    PicturePart,
    ResultEntry,
    SpokenPart,
    WrittenPart,
)
from mstar_core.api.realtime.sound.formats import PCM_RATE
from mstar_core.api.realtime.sound.resampling import resampled_whole
from mstar_core.api.realtime.sound.spoken import SpokenText
from mstar_core.api.realtime.wire.audio_fields import WireFields
from mstar_core.api.realtime.wire.checked import checked, missing
from mstar_core.errors import RequestError

ItemId = Annotated[str, Meta(min_length=1, max_length=ID_CHARS)]


class ContentFields(WireFields):
    """A part of a message, of any type."""

    type: str
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None
    image_url: str | None = None
    detail: str | None = None


class ItemFields(WireFields):
    """Fields that every item has. status, object: accepted, without effect."""

    type: str
    id: ItemId | None = None
    status: str | None = None
    object: str | None = None


class MessageFields(ItemFields, kw_only=True):
    """A message."""

    role: Literal["system", "user", "assistant"]
    content: list[ContentFields]


class FunctionCallFields(ItemFields, kw_only=True):
    """A call that the model is said to have made."""

    name: str
    arguments: str
    call_id: ItemId | None = None


class FunctionResultFields(ItemFields, kw_only=True):
    """The result of a call."""

    call_id: str
    output: str


class ReferenceFields(WireFields):
    """An item of the conversation, in the input of a response."""

    id: str
    type: Literal["item_reference"] = "item_reference"


KINDS: Final[Mapping[str, type[ItemFields]]] = {
    "message": MessageFields,
    "function_call": FunctionCallFields,
    "function_call_output": FunctionResultFields,
}
PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "system": ("input_text",),
    "user": ("input_text", "input_audio", "input_image"),
    "assistant": ("output_text", "output_audio"),
}
"""Types of content by role."""


async def entry_of(sent: Mapping[str, Any], conversation: RealtimeConversation, place: str) -> Entry:
    """Return an item that a client sends. Raises RequestError."""
    kind = sent.get("type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise missing(f"{place}.type", KINDS, kind)
    known = {name: value for name, value in sent.items() if value is not None}
    match checked(known, KINDS[kind], place):
        case MessageFields() as item:
            parts = [
                await _part(part, item.role, conversation, f"{place}.content[{number}]")
                for number, part in enumerate(item.content)
            ]
            return MessageEntry(id=item.id or new_id("item"), role=item.role, parts=parts)
        case FunctionCallFields() as item:
            call_id = item.call_id or new_id("call")
            return CallEntry(id=item.id or new_id("item"), call_id=call_id, name=item.name, arguments=item.arguments)
        case FunctionResultFields() as item:
            return ResultEntry(id=item.id or new_id("item"), call_id=item.call_id, output=item.output)
    raise AssertionError(kind)


async def entries_of(sent: list[dict[str, Any]], conversation: RealtimeConversation) -> list[Entry]:
    """Return the input of a response: new items, and those of the conversation by reference."""
    entries = []
    for number, item in enumerate(sent):
        place = f"response.input[{number}]"
        if item.get("type") == "item_reference":
            entries.append(conversation.history.find(checked(item, ReferenceFields, place).id))
        else:
            entries.append(await entry_of(item, conversation, place))
    return entries


async def _part(part: ContentFields, role: str, conversation: RealtimeConversation, place: str) -> ItemPart:
    if part.type not in PARTS[role]:
        allowed = ", ".join(PARTS[role])
        raise RequestError(
            f"{place}.type is {part.type[:80]!r}", hint=f"allowed: {allowed}", field=f"{place}.type", allowed=allowed
        )
    match part.type:
        case "input_text" | "output_text":
            return WrittenPart(_given(part.text, f"{place}.text"))
        case "input_image":
            return PicturePart(_given(part.image_url, f"{place}.image_url"))
        case "input_audio":
            data = await decoded(f"{place}.audio", _given(part.audio, f"{place}.audio"))
            heard = conversation.heard_part(data, conversation.settings.heard, f"{place}.audio")
            heard.transcript = part.transcript
            return heard
        case _:
            return SpokenPart(SpokenText(PCM_RATE, _given(part.transcript, f"{place}.transcript"), is_whole=True))


def _given(value: str | None, field: str) -> str:
    if value is None:
        raise RequestError(f"{field} is missing", field=field, code="missing_field")
    return value


def shown_item(entry: Entry, *, has_audio: bool = False, is_empty: bool = False) -> dict[str, Any]:
    """Return an item as clients get it. has_audio: with the sound of the user. is_empty: without its content yet."""
    common = {"id": entry.id, "object": "realtime.item", "status": entry.status}
    match entry:
        case MessageEntry():
            content = [] if is_empty else [_shown_part(part, has_audio=has_audio) for part in entry.parts]
            return {**common, "type": "message", "role": entry.role, "content": _typed(content, entry.role)}
        case CallEntry():
            fields = {"call_id": entry.call_id, "name": entry.name, "arguments": entry.arguments}
            return {**common, "type": "function_call", **fields}
        case ResultEntry():
            return {**common, "type": "function_call_output", "call_id": entry.call_id, "output": entry.output}


def _typed(content: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    text = "output_text" if role == "assistant" else "input_text"
    return [{**part, "type": text} if part["type"] == "text" else part for part in content]


def _shown_part(part: ItemPart, *, has_audio: bool) -> dict[str, Any]:
    match part:
        case WrittenPart():
            return {"type": "text", "text": part.text}
        case SpokenPart():
            return {"type": "output_audio", "transcript": part.spoken.text}
        case PicturePart():
            return {"type": "input_image", "image_url": part.url}
        case HeardPart():
            audio = {"audio": sound_of(part)} if has_audio else {}
            return {"type": "input_audio", "transcript": part.transcript, **audio}


def sound_of(part: HeardPart) -> str:
    """Return sound of the user as PCM16 at 24 kHz in base64."""
    return pybase64.b64encode_as_string(resampled_whole(part.samples, part.rate, PCM_RATE).astype("<i2").tobytes())
