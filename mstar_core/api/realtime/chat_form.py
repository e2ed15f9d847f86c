"""Items of a conversation as chat messages, so that responses are generated as chats are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

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
from mstar_core.api.schema import (
    CalledFunction,
    ChatMessage,
    ChatToolCall,
    ContentPart,
    ImagePart,
    InputAudio,
    InputAudioPart,
)
from mstar_core.api.schema import TextPart as ChatText
from mstar_core.errors import RequestError

_MESSAGE = re.compile(r"messages\[(?P<number>\d+)\][\w.\[\]]*")


@dataclass(slots=True)
class ChatLayout:
    """Chat messages, and the id of the item behind each; empty for the instructions.

    files: sounds, and images that were fetched, by the position of their part. They are neither encoded nor copied for
    a request. media: the parts that are files, in order.
    """

    messages: list[ChatMessage] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    media: list[HeardPart | PicturePart] = field(default_factory=list)

    def named(self, error: RequestError) -> RequestError:
        """Let an error of the chat layer name items in place of messages."""
        error.title, error.hint = self._named(error.title), self._named(error.hint)
        if error.field is not None:
            error.facts["field"] = self._named(error.field)
        return error

    def _named(self, text: str) -> str:
        return _MESSAGE.sub(lambda match: self._name(int(match["number"])), text)

    def _name(self, number: int) -> str:
        name = self.ids[number] if number < len(self.ids) else ""
        return f"item {name}" if name else "instructions"

    def add_parts(self, entry: MessageEntry) -> None:
        """Append a message of the parts that have content, if there are any."""
        content: list[ContentPart] = []
        for part in entry.parts:
            shown = _part(part)
            if shown is None:
                continue
            if isinstance(part, HeardPart | PicturePart):
                self.media.append(part)
                file = part.file if isinstance(part, HeardPart) else part.fetched
                if file is not None:
                    self.files[f"messages[{len(self.messages)}].content[{len(content)}]"] = file
            content.append(shown)
        if content:
            self.add(entry.id, ChatMessage(role=entry.role, content=content))

    def add(self, item_id: str, message: ChatMessage) -> None:
        """Append a message."""
        self.messages.append(message)
        self.ids.append(item_id)


def chat_layout(instructions: str, entries: Sequence[Entry]) -> ChatLayout:
    """Return a conversation as chat messages.

    The result of a call stands right behind it, as templates require. A call without a result is left out: its client
    has not answered it, and the user went on.
    """
    layout = ChatLayout()
    results = {entry.call_id: entry for entry in entries if isinstance(entry, ResultEntry)}
    if instructions:
        layout.add("", ChatMessage(role="system", content=instructions))
    for entry in entries:
        match entry:
            case MessageEntry():
                layout.add_parts(entry)
            case CallEntry() if entry.call_id in results:
                result = results[entry.call_id]
                function = CalledFunction(name=entry.name, arguments=entry.arguments)
                called = ChatToolCall(id=entry.call_id, function=function)
                layout.add(entry.id, ChatMessage(role="assistant", tool_calls=[called]))
                layout.add(result.id, ChatMessage(role="tool", tool_call_id=entry.call_id, content=result.output))
            case CallEntry() | ResultEntry():
                pass
    return layout


def _part(part: ItemPart) -> ContentPart | None:
    match part:
        case WrittenPart():
            return ChatText(text=part.text) if part.text else None
        case SpokenPart():
            return ChatText(text=part.spoken.text) if part.spoken.text else None
        case PicturePart():
            return ImagePart(image_url=part.url)
        case HeardPart():
            return InputAudioPart(input_audio=InputAudio(data="", format="wav"))
