"""ChatML layout of a conversation as ids, with the pads of its media (specification section 8)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from mstar_core.errors import RequestError
from mstar_core.plugin.chat.turns import Tool, ToolCall, Turn, generated_ids
from mstar_qwen3omni.checkpoint.config import TextIds
from mstar_qwen3omni.request.media import Media

SPOKEN_SYSTEM: Final = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
"""System text of spoken answers without a system turn. The model was trained to speak with it."""


TOOLS_BEFORE: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_BEHIND: Final = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
"""Text around the tools. Source: the chat template of the checkpoint, which has that of Qwen3."""


@dataclass(slots=True)
class Prompt:
    """A prompt under construction. ids: all ids, pads included; media: in order."""

    ids: list[int] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)


Encode = Callable[[str], Sequence[int]]
"""Tokenizes a text without control tokens."""

ReadPart = Callable[[str, int, int], Media]
"""Reads the file of (modality, index within it). The last argument is the number of ids before it."""


class ChatLayout:
    """Writes turns as ids. Text between two control tokens is tokenized as one piece."""

    def __init__(self, ids: TextIds, encode: Encode, text_at: Callable[[int], str], read: ReadPart) -> None:
        self._ids, self._encode, self._text_at, self._read = ids, encode, text_at, read

    def write(self, turns: Sequence[Turn], tools: Sequence[Tool] = ()) -> Prompt:
        """Return the prompt of `turns`, with the start of the answer. Raises RequestError.

        tools: shown in the system turn. Consecutive results of calls share a user turn.
        """
        prompt = Prompt()
        first = turns[0] if turns and turns[0].role == "system" else None
        if tools:
            self._turn(prompt, [first or Turn(role="system")], tail=_tools_text(tools, has_text=first is not None))
        elif first is not None:
            self._turn(prompt, [first])
        others = turns[first is not None :]
        for is_result, group in itertools.groupby(others, key=lambda turn: turn.role == "tool"):
            for together in [list(group)] if is_result else [[turn] for turn in group]:
                self._turn(prompt, together)
        prompt.ids += [self._ids.im_start, self._ids.assistant, *self._encode("\n")]
        return prompt

    def _turn(self, prompt: Prompt, turns: Sequence[Turn], tail: str = "") -> None:
        """Write one turn, or several results of calls as one. tail: text behind it."""
        ids = self._ids
        role = turns[0].role
        roles = {"system": ids.system, "user": ids.user, "assistant": ids.assistant, "tool": ids.user}
        prompt.ids += [ids.im_start, roles[role]]
        text = "\n"
        for number, turn in enumerate(turns):
            if role == "tool":
                text += "\n<tool_response>\n" if number else "<tool_response>\n"
            if answer := generated_ids(turn, self._ids.control):
                prompt.ids += [*self._encode(text), *answer]
                text = ""
            else:
                text = self._parts(prompt, turn, text)
            text += "\n</tool_response>" if role == "tool" else _calls_text(turn.calls, has_text=bool(turn.order))
        text += tail
        prompt.ids += self._encode(text) if text else ()
        prompt.ids += [ids.im_end, *self._encode("\n")]

    def _parts(self, prompt: Prompt, turn: Turn, text: str) -> str:
        """Write the parts of a turn behind `text`. Returns the text that is not tokenized yet."""
        for modality, index in turn.order:
            if modality == "text":
                text += self._text_at(index)
                continue
            if turn.role != "user":
                raise RequestError(
                    f"a {turn.role} message contains {modality}",
                    "the model reads media in user messages only",
                    "move it to a user message",
                    field="messages",
                    code="unsupported_media_type",
                )
            prompt.ids += self._encode(text) if text else ()
            text = ""
            self._medium(prompt, self._read(modality, index, len(prompt.ids)))
        return text

    def _medium(self, prompt: Prompt, media: Media) -> None:
        ids = self._ids
        starts, ends = {
            "audio": ([ids.audio_start], [ids.audio_end]),
            "image": ([ids.vision_start], [ids.vision_end]),
            "video": ([ids.vision_start], [ids.vision_end]),
            "audio_video": ([ids.vision_start, ids.audio_start], [ids.audio_end, ids.vision_end]),
        }[media.kind]
        prompt.ids += [*starts, *media.tokens.tolist(), *ends]
        prompt.media.append(media)


def _tools_text(tools: Iterable[Tool], *, has_text: bool) -> str:
    """Return the tools as the system turn shows them. has_text: behind a text."""
    lines = "".join(f"\n{json.dumps(_signature(tool), ensure_ascii=False)}" for tool in tools)
    return ("\n\n" if has_text else "") + TOOLS_BEFORE + lines + TOOLS_BEHIND


def _signature(tool: Tool) -> dict[str, object]:
    described = {"description": tool.description} if tool.description else {}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": dict(tool.parameters)}}


def _calls_text(calls: Iterable[ToolCall], *, has_text: bool) -> str:
    """Return calls as the model writes them. has_text: behind a text."""
    texts = [f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>' for call in calls]
    return "\n".join(["", *texts] if texts and has_text else texts)
