"""Prompts of models that read a plain text: ids with limits and errors, output limits, spelled ids. For processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mstar_core.errors import RequestError, WeightsError
from mstar_core.families.tokenizer import TextTokenizer
from mstar_core.plugin.params import lowered_warnings
from mstar_core.plugin.plain_text import ByteDetokenizer
from mstar_core.plugin.processor import Detokenizer, Inputs, PromptRequest


class TextPrompts:
    """Texts and ids of one checkpoint. longest: tokens of its context. model: name, for errors.

    A client's control tokens are read as letters, unless the prompt is raw.
    """

    def __init__(self, folder: Path | None, longest: int, model: str) -> None:
        if folder is None:
            raise WeightsError(f"{model} has no checkpoint folder", hint=f"use --weights DIR, or start {model}:tiny")
        self._folder = folder
        self._longest = longest

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer, read at first use."""
        return TextTokenizer(self._folder)

    def ids(self, request: PromptRequest, *, adds_special: bool = True, least_room: int = 0) -> list[int]:
        """Return the ids of a prompt. least_room: tokens that must be left in the context.

        Raises RequestError for an empty text, an unknown id and a prompt that is too long, with its field.
        """
        field = "ids" if request.ids else "text"
        if request.ids:
            ids = list(request.ids)
            wrong = next((token for token in ids if not 0 <= token < self.tokenizer.size), None)
            if wrong is not None:
                raise RequestError(f"ids contains {wrong}", f"allowed are 0 to {self.tokenizer.size - 1}", field="ids")
        elif request.text:
            text = request.text if request.is_raw else self.tokenizer.guarded(request.text)
            ids = self.tokenizer.encode(text, adds_special=adds_special)
        else:
            raise RequestError("the request has no text", hint="send one", field="text", code="missing_field")
        limit = self.limit(request) - least_room
        if len(ids) > limit:
            title = f"the prompt has {len(ids)} tokens, and the context {limit + least_room}"
            hint = "shorten the prompt"
            raise RequestError(title, hint=hint, field=field, allowed=f"<= {limit}", code="context_length_exceeded")
        return ids

    def limit(self, request: PromptRequest) -> int:
        """Return the tokens of the context: of the checkpoint, or of the deployment if it has fewer."""
        return min(request.max_seq_len or self._longest, self._longest)

    def generation(
        self,
        request: PromptRequest,
        arrays: Mapping[str, np.ndarray],
        *,
        prompt_tokens: int,
        room: int,
        facts: Mapping[str, Any] | None = None,
    ) -> Inputs:
        """Return the inputs of a request that writes ids. room: ids that the context leaves for them.

        A larger `max_output_tokens` is lowered to the room with a warning.
        """
        params = request.params
        limited = replace(params, max_output_tokens=min(params.max_output_tokens, room))
        return Inputs(
            arrays=arrays,
            facts=facts or {},
            prompt_tokens=prompt_tokens,
            max_output_tokens=limited.max_output_tokens,
            params=limited,
            warnings=lowered_warnings(params, "max_output_tokens", room),
        )

    def spell(self, ids: Sequence[int]) -> list[bytes]:
        """Return the UTF-8 text of each id, control tokens included. Raises RequestError for an unknown id."""
        size, tokenizer = self.tokenizer.size, self.tokenizer
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise RequestError(f"ids contains {wrong}", f"allowed are 0 to {size - 1}", field="ids")
        return [tokenizer.bytes_of(token) or tokenizer.control.get(token, "").encode() for token in ids]

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        return ByteDetokenizer(self.tokenizer.bytes_of, strips_space=self.tokenizer.strips_space)
