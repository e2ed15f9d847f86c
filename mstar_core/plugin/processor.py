"""Processor contract: a model's preprocessing of requests and postprocessing of outputs.

Processors run in the api's process pool. An `InlineProcessor` also runs in the api process. No torch, no weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mstar_core.errors import RequestError
from mstar_core.plugin.chat.turns import Tool, ToolChoice, Turn
from mstar_core.plugin.media.limits import MediaLimits

if TYPE_CHECKING:
    import numpy as np

    from mstar_core.constraints.vocabulary import TokenTable


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMedia:
    """Decoded form of a file, which later requests of its session get back. Only its processor reads it.

    content: key of the file and of the options that it was read with, made by `content_key`. arrays: by name.
    """

    content: bytes
    arrays: Mapping[str, np.ndarray]

    @property
    def size_bytes(self) -> int:
        """Return the size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """An uploaded file whose type was detected. data: content; name: the client's label, never a path.

    kept: what an earlier request of the session returned for this file (`Inputs.kept`), perhaps of other options.
    """

    modality: str
    data: bytes
    name: str = ""
    kept: KeptMedia | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """Input of a processor: text and media in the order given, and validated parameters.

    order: (modality, index) pairs; `("text", i)` is `text_at(i)`, `("image", i)` the i-th image among `media`.
    text: all texts, joined by empty lines. texts: each text.
    turns: chat messages, in order; their parts together are `order`. Models with a chat template format the turns;
    models without roles read the parts of `order` as segments. Empty on routes without messages.
    tools: functions that the answer may call; the template shows them, unless the mode of `tool_choice` is `none`.
    template: variables of the chat template for the requested effort of thinking.
    is_raw: the text is the whole prompt and is tokenized as it is, without a template (completions, embeddings).
    Control tokens that it spells out are control tokens, because its client writes the template.
    ids: a raw prompt as token ids, in place of its text; they may be any numbers. Errors name the field `ids`.
    is_open: more text comes while the request runs (`TextStreamProcessor`); `ids` are those of the text so far.
    observation: the raw message of the robot policy socket, in place of text and media; decode it with `unpacked` of
    `mstar_core.plugin.observation`. None on all other routes.
    seed: the final seed; for `n` answers the seed of the first, because the prompt is processed once.
    limits: media limits for the decoders in `mstar_core.plugin.media`.
    reads_windows: other requests read beginnings of the sounds, so each window is a segment, see `Audio.window_s`.
    keeps_media: later requests of the session may have the same images, so `Inputs.kept` is of use.
    """

    text: str | None
    texts: Sequence[str] = ()
    turns: Sequence[Turn] = ()
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    template: Mapping[str, Any] = field(default_factory=dict)
    is_raw: bool = False
    is_open: bool = False
    ids: Sequence[int] = ()
    media: Sequence[MediaPart] = ()
    order: Sequence[tuple[str, int]] = ()
    observation: bytes | None = None
    params: Any = None
    outputs: frozenset[str] = frozenset()
    seed: int = 0
    max_seq_len: int = 0
    limits: MediaLimits = field(default_factory=MediaLimits)
    reads_windows: bool = False
    keeps_media: bool = False

    @property
    def size_bytes(self) -> int:
        """Return the approximate size: media, observation, texts, ids, and what a template writes beside them."""
        kept = sum(part.kept.size_bytes for part in self.media if part.kept is not None)
        beside = (*self.tools, *(call for turn in self.turns for call in turn.calls))
        texts = (
            len(self.text or "") + sum(len(turn.reasoning) for turn in self.turns) + sum(map(len, map(repr, beside)))
        )
        media = sum(len(part.data) for part in self.media)
        return media + kept + len(self.observation or b"") + texts + 8 * len(self.ids)

    def text_at(self, index: int) -> str:
        """Return the text of the pair `("text", index)` of `order`."""
        return self.texts[index] if self.texts else self.text or ""

    def media_at(self, modality: str, index: int) -> MediaPart:
        """Return the file of a pair of `order`."""
        return self.media[self.number_of(modality, index)]

    def number_of(self, modality: str, index: int) -> int:
        """Return the number in `media` of the file of a pair of `order`."""
        return [number for number, part in enumerate(self.media) if part.modality == modality][index]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInputs:
    """Arrays of one prompt segment, by walk input name. length: its tokens.

    counts: its tokens by modality, if the segment holds more than the one modality that `kind` names.
    content: key of everything that determines these arrays, made by `content_key` from the file and the options that
    it was read with. Equal keys let stateless nodes reuse earlier outputs; empty: they never do.
    """

    kind: str
    arrays: Mapping[str, np.ndarray]
    length: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    content: bytes = b""


def content_key(*parts: bytes | str | float | bool | None) -> bytes:
    """Return a key of 16 bytes: of a file's bytes, and of the options that decide how it is read, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(f"{type(part).__name__}{len(data)}:".encode())
        digest.update(data)
    return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPart:
    """A part of a request that can run as a request of its own, such as a window of a recording.

    spans: by walk input name, first entry of its array and end, along the first axis; others are whole. facts: in place
    of those of the request.
    """

    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Result of `process_prompt`. arrays: by walk input name. prompt_tokens: tokens that the language model reads.

    metadata: by output modality, extra metadata of each output of that modality, beside shape and dtype.
    usage: extra entries of the response's usage object, such as encoder tokens or steps.
    params: replacement parameters, for instance with a limit lowered to the context; None: unchanged.
    facts: what the programs read as `ProgramRequest.facts`: numbers, texts, and lists of them.
    heard_s: seconds of the request's audio, set by the api.
    kept: decoded forms of images by their number in `media`, for later requests of the session, if the request
    `keeps_media`. Optional: without them each request decodes its images.
    needs_ids: of a text that arrives, the number of ids without which the request cannot begin. The processor is called
    again once so many are known or the text has ended, and the other fields are ignored.
    parts: in order, of a request whose parts may run side by side, see `ModelSpec.at_once`. The other fields describe
    the whole request, which runs undivided on routes that join no answers.
    """

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    segments: Sequence[SegmentInputs] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    max_output_tokens: int | None = None
    params: Any = None
    metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    usage: Mapping[str, int] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    heard_s: float = 0.0
    kept: Mapping[int, KeptMedia] = field(default_factory=dict)
    needs_ids: int = 0
    parts: Sequence[InputPart] = ()

    def part(self, index: int) -> Inputs:
        """Return the inputs of a part, or these if there are none. What the whole request used counts for the first."""
        if not self.parts:
            return self
        part = self.parts[index]
        cut = {name: self.arrays[name][first:end] for name, (first, end) in part.spans.items()}
        own = self if index == 0 else replace(self, usage={}, heard_s=0.0, warnings=())
        return replace(own, arrays={**self.arrays, **cut}, facts={**self.facts, **part.facts}, parts=())

    def plain_params(self, params: Any) -> dict[str, Any]:
        """Return the parameters as sent to the conductor: those returned by the processor, with its output limit.

        params: those of the request. Raises RequestError for a number that no message can hold.
        """
        chosen = params if self.params is None else self.params
        values = {item.name: getattr(chosen, item.name) for item in fields(chosen)}
        if self.max_output_tokens is not None and "max_output_tokens" in values:
            values["max_output_tokens"] = self.max_output_tokens
        for name, value in values.items():
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise RequestError(f"{name} has too many digits", field=name)
        return values


class Detokenizer(Protocol):
    """Incremental detokenizer; never returns an incomplete character."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


@runtime_checkable
class ContinuingDetokenizer(Detokenizer, Protocol):
    """A detokenizer that changes the begin of a text, such as one that strips a space."""

    def go_on(self) -> None:
        """Leave the begin as it is: the text follows another one. Called before the first `push`."""


class Processor(Protocol):
    """A model's processor. Created once per pool process as `Processor(folder, model_kwargs)`."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None: ...

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Turn a request into arrays. Raises RequestError with the field name for invalid input."""

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Encode one output chunk and return it with its metadata; shared by streaming and whole responses."""


@runtime_checkable
class WarmedProcessor(Processor, Protocol):
    """A processor that loads something at its first request, such as a tokenizer, and can load it before."""

    def warm_up(self) -> None:
        """Load whatever `process_prompt` loads lazily.

        Called once in each process that runs it: in the api on a thread and before `is_inline`, and in pool processes.
        """


@runtime_checkable
class InlineProcessor(WarmedProcessor, Protocol):
    """A processor that the api process also loads, for requests that are cheaper to prepare than to send to the pool.

    Optional. Such a request runs on the api's event loop: it delays every other request, and neither a time limit nor a
    process boundary protects the api. Accept only work that takes a millisecond or two for any input, without media
    decoders.

    An attribute `inline_bytes` replaces the default size limit of one MiB. Raise it for processors that use arrays in
    place, without a pass over the data.
    """

    def is_inline(self, request: PromptRequest) -> bool:
        """Return whether `process_prompt` may run on the event loop.

        Called only for requests within the size limit whose uploads, if any, are tensors. Look at sizes and first bytes
        only.
        """


@runtime_checkable
class TokenizingProcessor(Processor, Protocol):
    """A processor that shows clients how it tokenizes, and reads prompts that are token ids.

    Optional. The routes `completion`, `embedding` and `tokenize` need it. Both methods run in a pool process.
    """

    def tokenize(self, request: PromptRequest, *, adds_special: bool) -> Sequence[int]:
        """Return the ids that the model reads for a prompt, of any length. Raises RequestError.

        adds_special: add the tokens that the tokenizer puts around a text, such as one for its beginning. Raw prompts
        of completions have them.
        """

    def spell(self, ids: Sequence[int]) -> Sequence[bytes]:
        """Return the text of each id in UTF-8, control tokens included; it may be a part of a character.

        Raises RequestError, with the field `ids`, for an id that is not in the vocabulary.
        """


@runtime_checkable
class ParallelDecodeProcessor(InlineProcessor, Protocol):
    """An inline processor whose files can be decoded by several pool processes in parallel.

    Optional. Idle pool processes turn files into tensors at the same time. `process_prompt` then receives the request
    with these tensors in place of the files, and runs inline if `is_inline` accepts it.
    """

    def parallel_files(self, request: PromptRequest) -> Sequence[int]:
        """Return the indices in `request.media` to decode in parallel. Runs on the event loop."""

    def decode_file(self, part: MediaPart, number: int) -> MediaPart:
        """Decode a file into an equivalent tensor. number: its index within its modality. Runs in a pool process.

        Raises whatever `process_prompt` raises for that file.
        """


class TextReader(Protocol):
    """Tokenizer of one text that arrives in pieces. All ids together are those of the whole text."""

    def push(self, text: str) -> Sequence[int]:
        """Return the ids that no later text can change."""

    def end(self) -> Sequence[int]:
        """Return the remaining ids, and at last what tells the model that the text has ended. A new text may follow."""


@runtime_checkable
class TextStreamProcessor(InlineProcessor, Protocol):
    """An inline processor of a model that reads a text while it still arrives, see `Text.grows`.

    Optional. Such a request begins with the first ids: `PromptRequest.is_open`, and `ids` in place of the text. The
    others follow as values of the growing input.
    """

    def text_reader(self) -> TextReader:
        """Return a reader for one text. It runs on the api's event loop."""


@runtime_checkable
class ConstrainableProcessor(Processor, Protocol):
    """A processor whose text answers can be held to a grammar: schemas, regular expressions, tool calls.

    Optional. The node that draws the text declares `Sampling(is_text=True)`. The api and each worker of that node load
    the processor for its vocabulary.
    """

    def token_table(self) -> TokenTable:
        """Return the bytes of all ids that the node draws, its control tokens, and the ids that end an answer."""
