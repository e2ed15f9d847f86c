"""Processor: conversations to prompt ids, and ids to text. Runs in the api and its pool, without torch and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.constraints.vocabulary import TokenTable
from mstar_core.errors import RequestError
from mstar_core.families.tokenizer import TextTokenizer
from mstar_core.plugin.chat.marks import encoded_with, with_marks
from mstar_core.plugin.chat.template import ChatTemplate, function_of, message_of
from mstar_core.plugin.chat.template_form import chat_format, named_tokens, read_template
from mstar_core.plugin.chat.turns import Turn, generated_ids
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.plugin.params import lowered_warnings
from mstar_core.plugin.plain_text import ByteDetokenizer
from mstar_core.plugin.processor import Detokenizer, Inputs, PromptRequest
from mstar_llm.checkpoint.config import read_config

if TYPE_CHECKING:
    from mstar_llm.plugin import Params

INLINE_CHARS: Final = 4096
"""Longest text that the api tokenizes itself, in about two milliseconds."""


class Processor:
    """Processor of a language model. Created once per pool process, and in the api. Raises WeightsError."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        folder = checkpoint_folder(folder, "llm")
        self._folder = folder
        self._config = read_config(folder)

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Return the prompt's ids and the output limit that the context leaves. Raises RequestError with the field."""
        params: Params = request.params
        ids = self._prompt(request)
        limit = min(request.max_seq_len or self._config.max_positions, self._config.max_positions)
        room = limit - len(ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, and the context {limit}",
                "at least one must be left for the answer",
                "shorten the prompt",
                field="messages" if request.turns else "text",
                allowed=f"< {limit}",
                code="context_length_exceeded",
            )
        if self._config.is_embedding:
            return _embedded(ids)
        limited = replace(params, max_output_tokens=min(params.max_output_tokens, room))
        return Inputs(
            arrays={"tokens": np.asarray(ids, dtype=np.int64)},
            prompt_tokens=len(ids),
            max_output_tokens=limited.max_output_tokens,
            params=limited,
            warnings=lowered_warnings(params, "max_output_tokens", room),
        )

    def tokenize(self, request: PromptRequest, *, adds_special: bool) -> Sequence[int]:
        """Return the ids that the model reads for a prompt. adds_special: of raw prompts."""
        return self._prompt(request, adds_special=adds_special)

    def spell(self, ids: Sequence[int]) -> Sequence[bytes]:
        """Return the UTF-8 text of each id, control tokens included. Raises RequestError for an unknown id."""
        return [self._spelled(token) for token in (self._checked(ids, "ids") if ids else ())]

    def _spelled(self, token: int) -> bytes:
        return self.tokenizer.bytes_of(token) or self.tokenizer.control.get(token, "").encode()

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Return the bytes of an output that is not text."""
        return np.ascontiguousarray(output).tobytes(), {}

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        # Some tokenizers write a space before the first word, which is not part of the text.
        return ByteDetokenizer(self.tokenizer.bytes_of, strips_space=self.tokenizer.strips_space)

    def token_table(self) -> TokenTable:
        """Return the bytes of all ids, for grammars. Tokens of calls and thinking are text in a grammar."""
        control = self.tokenizer.control
        count = self.tokenizer.size
        tokens = [self._spelled(token) for token in range(count)]
        encode = partial(self.tokenizer.encode, adds_special=False)
        return TokenTable(tokens, special=tuple(control), ends=self._config.stop_ids, encode=encode)

    def warm_up(self) -> None:
        """Load tokenizer and template."""
        self.tokenizer.encode("Hello", adds_special=False)
        assert self._template is not None or not read_template(self._folder)

    def is_inline(self, request: PromptRequest) -> bool:
        """Whether the request is short."""
        size = sum(map(len, request.texts)) if request.texts else len(request.text or "")
        return not request.media and not request.tools and size <= INLINE_CHARS

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The checkpoint's tokenizer, read at first use, because `prompt_token_ids` needs none."""
        return TextTokenizer(self._folder, chat_format(read_template(self._folder)).markers)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        """The chat template; None if the checkpoint has none, as base models."""
        text = read_template(self._folder)
        return ChatTemplate(text, named_tokens(self._folder)) if text else None

    def _prompt(self, request: PromptRequest, *, adds_special: bool = True) -> list[int]:
        if request.params.prompt_token_ids is not None:
            return self._checked(request.params.prompt_token_ids)
        if request.ids:
            return self._checked(request.ids, "ids")
        if not request.turns and not request.text:
            raise RequestError("the request has no text", hint="send one", field="text", code="missing_field")
        is_base = self._template is None or self._config.is_embedding
        if request.is_raw or (is_base and not request.turns):
            # A completion writes the whole prompt itself, control tokens too.
            return self.tokenizer.encode(request.text or "", adds_special=adds_special)
        if self._template is None:
            raise RequestError(
                "this checkpoint has no chat template",
                "it is a base model",
                "send a text instead of messages",
                field="messages",
            )
        turns: Sequence[Turn] = request.turns or (Turn(role="user", order=tuple(request.order)),)
        guard = self.tokenizer.guarded
        shows_tools = request.tool_choice.mode != "none"
        messages = [message_of(turn, _content(request, turn), guard) for turn in turns]
        tools = [function_of(tool, guard) for tool in request.tools] if shows_tools else []
        # The template writes the control tokens itself, such as the first one of a text.
        encode = partial(self.tokenizer.encode, adds_special=False)
        ends = {*self.tokenizer.control, *self._config.stop_ids}
        answers = {place: ids for place, turn in enumerate(turns) if (ids := generated_ids(turn, ends))}
        if answers:
            marked = self._template.render(with_marks(messages, answers), tools, request.template)
            if (repeated := encoded_with(marked, answers, encode)) is not None:
                return repeated
        return encode(self._template.render(messages, tools, request.template))

    def _checked(self, ids: Sequence[int], field: str = "prompt_token_ids") -> list[int]:
        vocab = self._config.vocab
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None or not ids:
            allowed = f"ids from 0 to {vocab - 1}"
            title = f"{field} is empty" if wrong is None else f"{field} contains {wrong}"
            raise RequestError(title, f"allowed are {allowed}", field=field, allowed=allowed)
        return list(ids)


def _embedded(ids: Sequence[int]) -> Inputs:
    """Return the inputs of an embedding: the last token apart from those before it, if there are any."""
    arrays = {"tokens": np.asarray(ids[:-1], dtype=np.int64), "last": np.asarray(ids[-1:], dtype=np.int64)}
    return Inputs(arrays={name: array for name, array in arrays.items() if array.size}, prompt_tokens=len(ids))


def _content(request: PromptRequest, turn: Turn) -> str:
    """Return the text of a turn. A request of one text has no parts."""
    if not turn.order and not request.turns:
        return request.text or ""
    return "".join(request.text_at(index) for _, index in turn.order)
