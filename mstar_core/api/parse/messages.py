"""Chat messages as texts, media and turns, in order. Used by the chat route."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from mstar_core.api.errors import UnsupportedType
from mstar_core.api.parse.media import ByteAllowance, Fetcher, part_of_base64, part_of_url
from mstar_core.api.parse.params import check_images
from mstar_core.api.parse.tool_turns import CallOrder, texts_of
from mstar_core.api.schema import (
    AudioUrlPart,
    ChatMessage,
    ContentPart,
    ImagePart,
    InputAudioPart,
    MediaUrl,
    TextPart,
    VideoPart,
)
from mstar_core.config.resolved import ApiConfig
from mstar_core.errors import RequestError, TooLarge
from mstar_core.plugin.chat.turns import Role, Turn
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.spec import ModelSpec

ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaReference:
    """A file referenced by a message part. field: its position. source: a URL, base64 data, or the file itself."""

    field: str
    modality: str
    source: str | bytes
    is_base64: bool = False


@dataclass(slots=True)
class Conversation:
    """Parsed chat. order: all parts; each turn has its own order."""

    texts: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    references: list[MediaReference] = field(default_factory=list)
    media: Sequence[MediaPart] = ()

    @property
    def order(self) -> list[tuple[str, int]]:
        """Return (modality, index within it) of all parts."""
        return [piece for turn in self.turns for piece in turn.order]

    @property
    def size_bytes(self) -> int:
        """Return the size of all texts, those of calls and of thinking included."""
        hidden = (text for turn in self.turns for text in (turn.reasoning, *texts_of(turn.calls)))
        return sum(len(text.encode()) for text in (*self.texts, *hidden))

    @property
    def text(self) -> str | None:
        """Return all texts joined, for models that read one text."""
        return "\n\n".join(self.texts) if self.texts else None


async def read_messages(
    messages: Sequence[ChatMessage],
    spec: ModelSpec,
    limits: ApiConfig,
    fetcher: Fetcher,
    *,
    most_files: int | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Conversation:
    """Parse messages and fetch their media. most_files: in place of the limit of a request.

    files: known files in place of the data of `input_audio` and the URL of `image_url` parts, by the position of the
    part.

    Raises RequestError, TooLarge, UnsupportedType, BadMedia.
    """
    conversation = collected(messages, spec, files or {})
    if not conversation.order:
        raise RequestError(
            "the request has no input", hint="send a message with content", field="messages", code="missing_field"
        )
    if conversation.size_bytes > limits.max_text_bytes:
        raise TooLarge(
            f"the messages have more than {limits.max_text_bytes} bytes of text",
            field="messages",
            code="body_too_large",
        )
    most = limits.max_files if most_files is None else most_files
    if len(conversation.references) > most:
        raise TooLarge(f"the request has more than {most} files", field="messages", code="too_many_files")
    check_images(spec, sum(reference.modality == "image" for reference in conversation.references), "messages")
    allowance = ByteAllowance(limits.max_body_bytes)
    tasks = [asyncio.ensure_future(_part(reference, fetcher, allowance)) for reference in conversation.references]
    try:
        conversation.media = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return conversation


def collected(
    messages: Sequence[ChatMessage], spec: ModelSpec, files: Mapping[str, bytes] | None = None
) -> Conversation:
    """Parse messages without fetching media. files: see `read_messages`. Raises RequestError, UnsupportedType."""
    conversation = Conversation()
    counts: dict[str, int] = {}
    calls = CallOrder(spec)
    for number, message in enumerate(messages):
        turn = _turn(message, f"messages[{number}]", calls, spec)
        order: list[tuple[str, int]] = []
        for place, part in _parts(message, f"messages[{number}].content"):
            modality = _add(conversation, part, place, spec, files or {})
            if modality is not None:
                order.append((modality, counts.get(modality, 0)))
                counts[modality] = counts.get(modality, 0) + 1
        conversation.turns.append(replace(turn, order=tuple(order)))
    calls.end()
    return conversation


def _turn(message: ChatMessage, place: str, calls: CallOrder, spec: ModelSpec) -> Turn:
    """Return a turn without its parts."""
    if message.role == "tool":
        call_id, name = calls.result(message, place)
        return Turn(role="tool", call_id=call_id, name=name)
    made = calls.calls(message, place)
    # A model that does not think may go on with a conversation of one that does.
    thought = message.reasoning_content if message.role == "assistant" and spec.chat.reasoning is not None else None
    return Turn(role=ROLES[message.role], reasoning=thought or "", calls=made)


def _parts(message: ChatMessage, place: str) -> list[tuple[str, ContentPart]]:
    content = message.content
    if content is None:
        return []
    if isinstance(content, str):
        return [(place, TextPart(text=content))]
    return [(f"{place}[{index}]", part) for index, part in enumerate(content)]


def _add(
    conversation: Conversation, part: ContentPart, place: str, spec: ModelSpec, files: Mapping[str, bytes]
) -> str | None:
    match part:
        case TextPart():
            if not part.text:
                return None
            conversation.texts.append(part.text)
            return "text"
        case ImagePart():
            source = files.get(place, _url(part.image_url))
            reference = MediaReference(field=f"{place}.image_url", modality="image", source=source)
        case VideoPart():
            reference = MediaReference(field=f"{place}.video_url", modality="video", source=_url(part.video_url))
        case AudioUrlPart():
            reference = MediaReference(field=f"{place}.audio_url", modality="audio", source=_url(part.audio_url))
        case InputAudioPart():
            reference = MediaReference(
                field=f"{place}.input_audio",
                modality="audio",
                source=files.get(place, part.input_audio.data),
                is_base64=True,
            )
    if spec.input(reference.modality) is None:
        raise UnsupportedType(
            f"the model does not accept {reference.modality}",
            field=reference.field,
            code="unsupported_media_type",
            hint=f"accepted: {', '.join(sorted(modality.kind for modality in spec.inputs))}",
        )
    conversation.references.append(reference)
    return reference.modality


def _url(reference: MediaUrl | str) -> str:
    return reference if isinstance(reference, str) else reference.url


async def _part(reference: MediaReference, fetcher: Fetcher, allowance: ByteAllowance) -> MediaPart:
    if isinstance(reference.source, bytes):
        return MediaPart(modality=reference.modality, data=reference.source)
    if reference.is_base64:
        return await part_of_base64(reference.field, reference.source, reference.modality)
    return await part_of_url(reference.field, reference.source, reference.modality, fetcher, allowance)
