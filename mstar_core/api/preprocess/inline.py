"""Inline preprocessing: prompts that are cheaper to process in the api than to send to a pool process. Used by the
pool.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from mstar_core.api.preprocess.child import answer, load_processor
from mstar_core.plugin.processor import InlineProcessor, Inputs, ParallelDecodeProcessor, PromptRequest

INLINE_BYTES: Final = 1 << 20
"""Default size limit of a request; copying this much takes about 0.1 ms."""

INLINE_FILES: Final = 8

log = logging.getLogger("mstar.api.pool")


class InlineProcessing:
    """The api's own instance of the processor. Owned by the pool."""

    def __init__(self, processor: InlineProcessor) -> None:
        self._processor = processor
        self._most_bytes = int(getattr(processor, "inline_bytes", INLINE_BYTES))

    @classmethod
    def load(cls, target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> Self | None:
        """Create the processor and warm it up, which takes long. Returns None on failure: the pool works without it."""
        try:
            processor = load_processor(target, folder, model_kwargs)
            assert isinstance(processor, InlineProcessor)
            processor.warm_up()
        except Exception:  # isolation boundary: a plugin's code; each request reports the problem through the pool
            log.exception("the api could not load the processor: every prompt goes to a pool process")
            return None
        return cls(processor)

    def takes(self, request: PromptRequest) -> bool:
        """Return whether a request can run here. Its media must be tensors, because decoders may crash or hang."""
        if len(request.media) > INLINE_FILES or any(part.modality != "tensor" for part in request.media):
            return False
        if request.size_bytes > self._most_bytes:
            return False
        try:
            return self._processor.is_inline(request)
        except Exception:  # isolation boundary: a plugin's code; a pool process may still succeed
            log.exception("the processor failed to decide whether a request runs inline: it goes to a pool process")
            return False

    def parallel_files(self, request: PromptRequest) -> Sequence[int]:
        """Return the indices of the media that other processes may decode in parallel."""
        if not isinstance(self._processor, ParallelDecodeProcessor) or len(request.media) > INLINE_FILES:
            return ()
        try:
            return [number for number in self._processor.parallel_files(request) if 0 <= number < len(request.media)]
        except Exception:  # isolation boundary: a plugin's code; one pool process can decode everything
            log.exception(
                "the processor failed to select files for parallel decoding: one pool process decodes them all"
            )
            return ()

    def prompt(self, request: PromptRequest) -> Inputs:
        """Run `process_prompt` as a pool process does. Raises the same errors."""
        is_done, value = answer(self._processor, ("prompt", (request,)))
        if not is_done:
            raise value
        inputs: Inputs = value
        return inputs
