"""Answer of the chat route, collected from the events of its stream."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mstar_core.client import FunctionCall

DATA_URL: Final = re.compile(r"data:image/([\w.+-]+);base64,")


class Delta(NamedTuple):
    """Addition of one event to an answer. kind: `text`, `thinking`, or `sound`, whose data are PCM16 samples."""

    kind: str
    text: str = ""
    data: bytes = b""


class Picture(NamedTuple):
    """An image of an answer. suffix: of its file. url: as it came, for the conversation."""

    suffix: str
    data: bytes
    url: str


@dataclass(slots=True)
class ChatAnswer:
    """One answer so far. Filled by `take` from the events of a stream.

    calls: complete only if `finish_reason` is `tool_calls`. sound: PCM16. is_stopped: the user ended it.
    """

    text: str = ""
    thinking: str = ""
    sound: bytearray = field(default_factory=bytearray)
    pictures: list[Picture] = field(default_factory=list)
    finish_reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""
    is_stopped: bool = False
    _calls: dict[int, FunctionCall] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> Iterator[Delta]:
        """Add one event and yield what is new and can be shown at once."""
        self.request_id = str(event.get("id") or self.request_id)
        self.usage = event.get("usage") or self.usage
        choices = event.get("choices") or []
        if not choices:
            return
        self.finish_reason = str(choices[0].get("finish_reason") or self.finish_reason)
        delta: Mapping[str, Any] = choices[0].get("delta") or {}
        if thought := delta.get("reasoning_content"):
            self.thinking += thought
            yield Delta("thinking", thought)
        content = delta.get("content") or ()
        parts: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part.get("type") == "text" and part.get("text"):
                self.text += part["text"]
                yield Delta("text", part["text"])
            elif part.get("type") == "image_url":
                self.pictures += _pictures(str(part["image_url"]["url"]))
        for call in delta.get("tool_calls") or ():
            self._add_call(call)
        if samples := base64.b64decode((delta.get("audio") or {}).get("data") or ""):
            self.sound += samples
            yield Delta("sound", data=samples)

    def _add_call(self, piece: Mapping[str, Any]) -> None:
        index, function = int(piece.get("index") or 0), piece.get("function") or {}
        before = self._calls.get(index, FunctionCall("", "", ""))
        self._calls[index] = FunctionCall(
            id=piece.get("id") or before.id,
            name=before.name or str(function.get("name") or ""),
            arguments=before.arguments + (function.get("arguments") or ""),
        )

    @property
    def calls(self) -> list[FunctionCall]:
        """The calls of functions, none if the answer was cut off within them."""
        is_whole = self.finish_reason in ("tool_calls", "stop") and not self.is_stopped
        return [self._calls[index] for index in sorted(self._calls)] if is_whole else []

    def message(self, *, has_thinking: bool, has_pictures: bool) -> dict[str, Any] | None:
        """Return the answer as a message of the conversation, None if it has no content and no calls.

        has_thinking, has_pictures: the model reads those of earlier answers.
        """
        content: Any = self.text or ("[a picture]" if self.pictures else "[speech]" if self.sound else "")
        if self.pictures and has_pictures:
            images = [{"type": "image_url", "image_url": {"url": picture.url}} for picture in self.pictures]
            content = [*([{"type": "text", "text": self.text}] if self.text else []), *images]
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        if not content and not calls:
            return None
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if has_thinking and self.thinking:
            message["reasoning_content"] = self.thinking
        return {**message, "tool_calls": calls} if calls else message


def _pictures(url: str) -> Iterator[Picture]:
    head = DATA_URL.match(url)
    if head is None:
        return
    try:
        yield Picture(f".{head[1].partition('+')[0]}", base64.b64decode(url[head.end() :], validate=True), url)
    except binascii.Error:
        return
