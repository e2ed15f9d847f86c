"""Items of a conversation as chat messages, and the places in errors of the chat layer as clients know them.

Used to create responses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from mstar_core.api.responses.schema import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputAudioItem,
    InputContent,
    InputImage,
    InputText,
    Item,
    MessageContent,
    MessageItem,
    OutputRefusal,
    OutputText,
    ReasoningItem,
)
from mstar_core.api.schema import (
    CalledFunction,
    ChatMessage,
    ChatToolCall,
    ContentPart,
    ImagePart,
    InputAudioPart,
    TextPart,
)

EARLIER: Final = "previous_response_id"
INSTRUCTIONS: Final = "instructions"

_MESSAGE = re.compile(r"messages\[(?P<number>\d+)\](?P<rest>[\w.\[\]]*)")
_CALL = re.compile(r"\.tool_calls\[(?P<number>\d+)\](?:\.function)?(?P<rest>.*)")


@dataclass(slots=True)
class ItemPlace:
    """Origin of a chat message. path: its item. content: name of its content there. calls: items of its calls."""

    path: str
    content: str = "content"
    calls: list[str] = field(default_factory=list)

    def of(self, rest: str) -> str:
        """Return the path of a part of the message. rest: its path in the chat message."""
        call = _CALL.fullmatch(rest)
        if self.path in (EARLIER, INSTRUCTIONS):
            return self.path
        if call is not None and int(call["number"]) < len(self.calls):
            return self.calls[int(call["number"])] + call["rest"].replace(".id", ".call_id")
        if rest.startswith(".content"):
            return f"{self.path}.{self.content}{rest.removeprefix('.content')}"
        return self.path + rest.replace(".tool_call_id", ".call_id")


@dataclass(slots=True)
class ChatForm:
    """A conversation as chat messages, each with its place."""

    messages: list[ChatMessage] = field(default_factory=list)
    places: list[ItemPlace] = field(default_factory=list)

    def place(self, text: str) -> str:
        """Return a text with the paths of chat messages replaced by those of their items."""
        return _MESSAGE.sub(lambda match: self._place(int(match["number"]), match["rest"]), text)

    def _place(self, number: int, rest: str) -> str:
        return self.places[number].of(rest) if number < len(self.places) else f"input{rest}"

    def add(self, item: Item, path: str) -> None:
        """Append an item. Thinking, text and calls of one answer form one message."""
        match item:
            case MessageItem(role="assistant"):
                self._answer(path, is_new=self._has_text or self._has_calls).content = _parts(item.content)
            case MessageItem():
                self._append(ChatMessage(role=item.role, content=_parts(item.content)), ItemPlace(path))
            case ReasoningItem():
                text = "\n".join(part.text for part in item.content or item.summary)
                if text:
                    self._answer(path, is_new=True).reasoning_content = text
            case FunctionCallItem():
                message = self._answer(path, is_new=False)
                call = ChatToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
                message.tool_calls = [*(message.tool_calls or ()), call]
                self.places[-1].calls.append(path)
            case FunctionCallOutputItem():
                message = ChatMessage(role="tool", tool_call_id=item.call_id, content=_parts(item.output))
                self._append(message, ItemPlace(path, "output"))

    def _append(self, message: ChatMessage, place: ItemPlace) -> ChatMessage:
        self.messages.append(message)
        self.places.append(place)
        return message

    def _answer(self, path: str, *, is_new: bool) -> ChatMessage:
        """Return the message of the answer that goes on, or a new one."""
        if not is_new and self.messages and self.messages[-1].role == "assistant":
            return self.messages[-1]
        return self._append(ChatMessage(role="assistant"), ItemPlace(path))

    @property
    def _has_text(self) -> bool:
        return bool(self.messages) and self.messages[-1].content is not None

    @property
    def _has_calls(self) -> bool:
        return bool(self.messages) and self.messages[-1].tool_calls is not None


def chat_form(instructions: str | None, earlier: Sequence[Item], items: Sequence[Item], *, is_text: bool) -> ChatForm:
    """Return a conversation. earlier: of the responses that it continues. is_text: the input is one text."""
    form = ChatForm()
    if instructions:
        form.messages.append(ChatMessage(role="system", content=instructions))
        form.places.append(ItemPlace(INSTRUCTIONS))
    for item in earlier:
        form.add(item, EARLIER)
    for number, item in enumerate(items):
        form.add(item, "input" if is_text else f"input[{number}]")
    return form


def _parts(content: str | Sequence[InputContent] | Sequence[MessageContent]) -> list[ContentPart]:
    if isinstance(content, str):
        return [TextPart(text=content)]
    return [part for part in map(_part, content) if part is not None]


def _part(part: MessageContent) -> ContentPart | None:
    match part:
        case InputText() | OutputText():
            return TextPart(text=part.text)
        case OutputRefusal():
            return TextPart(text=part.refusal)
        case InputImage(image_url=str(url)):
            return ImagePart(image_url=url)
        case InputAudioItem():
            return InputAudioPart(input_audio=part.input_audio)
        case _:
            return None
