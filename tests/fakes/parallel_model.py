"""The inline model with images decoded in parallel: each becomes a tensor with its decoder's pid and its number."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence
from typing import Final

from mstar_core.errors import BadMedia
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest
from tests.fakes.inline_model import WRONG
from tests.fakes.inline_model import Processor as InlineProcessor

BROKEN: Final = "broken"
KILLS: Final = "kills"
"""Names of files: one that cannot be decoded, one whose decoding ends the process."""

UNSURE: Final = "unsure"
"""For this text the processor fails to select the files to decode in parallel."""


class Processor(InlineProcessor):
    """`Inputs.metadata["audio"]["read"]` contains (decoding process, number) of each file."""

    def parallel_files(self, request: PromptRequest) -> Sequence[int]:
        assert request.text not in (WRONG, UNSURE)
        return [number for number, part in enumerate(request.media) if part.modality == "image"]

    def decode_file(self, part: MediaPart, number: int) -> MediaPart:
        if part.name == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        if part.name == BROKEN:
            raise BadMedia(f"image {number} is broken")
        return dataclasses.replace(part, modality="tensor", data=f"{os.getpid()} {number}".encode())

    def process_prompt(self, request: PromptRequest) -> Inputs:
        made = super().process_prompt(request)
        read = [tuple(map(int, part.data.split())) for part in request.media if part.modality == "tensor"]
        return dataclasses.replace(made, metadata={"audio": {**made.metadata["audio"], "read": read}})
