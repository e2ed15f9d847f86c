"""Prompts that the api prepares on its own loop: asking a pool process takes longer than they do. Used by the pool."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from mstar_core.api.preprocess.child import answer, load_processor
from mstar_core.plugin.processor import InlineProcessor, Inputs, ParallelDecodeProcessor, PromptRequest

INLINE_BYTES: Final = 1 << 20
"""Most that a request has, unless its processor says otherwise: so much is copied in about 0.1 ms."""

INLINE_FILES: Final = 8

log = logging.getLogger("mstar.api.pool")


class InlineProcessing:
    """The processor of the api itself. Owned by the pool."""

    def __init__(self, processor: InlineProcessor) -> None:
        self._processor = processor
        self._most_bytes = int(getattr(processor, "inline_bytes", INLINE_BYTES))

    @classmethod
    def load(cls, target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> Self | None:
        """Make and warm it up; takes long. None where that fails: pool processes do without it."""
        try:
            processor = load_processor(target, folder, model_kwargs)
            assert isinstance(processor, InlineProcessor)
            processor.warm_up()
        except Exception:  # isolation boundary: a plugin's code, and what it lacks each request is told by the pool
            log.exception("the api has no processor of its own: every prompt goes to a pool process")
            return None
        return cls(processor)

    def takes(self, request: PromptRequest) -> bool:
        """Whether it is one for here. Its media have to be tensors: decoders may crash, or never end."""
        if len(request.media) > INLINE_FILES or any(part.modality != "tensor" for part in request.media):
            return False
        if request.size_bytes > self._most_bytes:
            return False
        try:
            return self._processor.is_inline(request)
        except Exception:  # isolation boundary: a plugin's code, and a pool process may well do what was asked
            log.exception("the processor cannot say whether a request is quick: it goes to a pool process")
            return False

    def parallel_files(self, request: PromptRequest) -> Sequence[int]:
        """Which files of a request other processes may read at the same time, by their places among its media."""
        if not isinstance(self._processor, ParallelDecodeProcessor) or len(request.media) > INLINE_FILES:
            return ()
        try:
            return [number for number in self._processor.parallel_files(request) if 0 <= number < len(request.media)]
        except Exception:  # isolation boundary: a plugin's code, and one pool process may well do it all
            log.exception("the processor cannot say which files are read apart: one pool process reads them all")
            return ()

    def prompt(self, request: PromptRequest) -> Inputs:
        """Do what a pool process does. Raises the same."""
        is_done, value = answer(self._processor, ("prompt", (request,)))
        if not is_done:
            raise value
        inputs: Inputs = value
        return inputs
