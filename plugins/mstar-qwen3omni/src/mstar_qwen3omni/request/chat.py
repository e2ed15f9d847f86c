"""ChatML layout of a conversation as ids, with the pads of its media (specification section 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from mstar_core.errors import RequestError
from mstar_core.plugin.chat.turns import Turn
from mstar_qwen3omni.checkpoint.config import TextIds
from mstar_qwen3omni.request.media import Media

SPOKEN_SYSTEM: Final = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
"""System text of spoken answers without a system turn. The model was trained to speak with it."""


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

    def write(self, turns: Sequence[Turn]) -> Prompt:
        """Return the prompt of `turns`, with the start of the answer. Raises RequestError."""
        prompt = Prompt()
        for turn in turns:
            self._turn(prompt, turn)
        prompt.ids += [self._ids.im_start, self._ids.assistant, *self._encode("\n")]
        return prompt

    def _turn(self, prompt: Prompt, turn: Turn) -> None:
        ids = self._ids
        role = {"system": ids.system, "user": ids.user, "assistant": ids.assistant}[turn.role]
        prompt.ids += [ids.im_start, role]
        text = "\n"
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
        prompt.ids += self._encode(text) if text else ()
        prompt.ids += [ids.im_end, *self._encode("\n")]

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


def with_system(turns: Sequence[Turn], system: Turn) -> Sequence[Turn]:
    """Return `turns` with `system` before them, unless they have a system turn."""
    return turns if any(turn.role == "system" for turn in turns) else (system, *turns)
