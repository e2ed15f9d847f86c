"""The speech fake for a text that arrives while it is spoken: ids are bytes, a word is certain behind its space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mstar_core.plugin import Text
from mstar_core.plugin.processor import Inputs, PromptRequest
from tests.fakes import speech_model

LIVE = "live"
END = 0
"""Id of the end of a text."""

LONG = "long "
"""A text that begins so is spoken once LEAST of its ids are known."""

LEAST = 20

SPEC = replace(
    speech_model.SPEC,
    inputs=(Text(grows=LIVE),),
    processor="tests.fakes.live_speech:Processor",
)


class Reader:
    """Bytes of whole words."""

    def __init__(self) -> None:
        self._rest = ""

    def push(self, text: str) -> Sequence[int]:
        words, space, self._rest = (self._rest + text).rpartition(" ")
        return list((words + space).encode())

    def end(self) -> Sequence[int]:
        rest, self._rest = self._rest, ""
        return [*rest.encode(), END]


class Processor(speech_model.Processor):
    """Reads the first ids of a text that arrives as its prompt."""

    def process_prompt(self, request: PromptRequest) -> Inputs:
        if not request.is_open:
            return super().process_prompt(request)
        text, ends = bytes(request.ids).decode(), request.ids[-1] == END
        if text.startswith(LONG) and len(text) < LEAST and not ends:
            return Inputs(needs_ids=LEAST)
        return super().process_prompt(replace(request, text=bytes(request.ids).decode()))

    def warm_up(self) -> None:
        """Nothing is loaded lazily."""

    def is_inline(self, request: PromptRequest) -> bool:
        return True

    def text_reader(self) -> Reader:
        return Reader()
