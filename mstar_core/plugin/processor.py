"""The processor contract: what a model does to a request before it enters the graph and to what comes out.

Runs in the api's process pool, and in the api itself what a `QuickProcessor` says. No torch, no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from mstar_core.plugin.media.limits import MediaLimits

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """One uploaded file after its type was sniffed. data: its bytes; name: the client's label only."""

    modality: str
    data: bytes
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of a chat. order: its pieces, as in PromptRequest.order."""

    role: Literal["system", "user", "assistant"]
    order: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """What the api hands to a processor: text and media in the order given, and the checked parameters.

    order: (modality, index) pairs; `("text", i)` is `text_at(i)`, `("image", i)` the i-th image among `media`.
    text: the text; of several texts all of them, with an empty line between. texts: each of them.
    turns: the messages of a chat, in order; together their pieces are `order`. A model with a template of its own lays
    them out; one without roles reads the pieces of `order` as segments. Empty on routes without messages.
    observation: a message of the robot policy socket as it came, in place of text and media; `unpacked` of
    `mstar_core.plugin.observation` reads it. None on all other routes.
    seed: already chosen; of several answers to one request (`n`) that of the first: the prompt is read once for all.
    limits: of media, for the readers in `mstar_core.plugin.media`.
    """

    text: str | None
    texts: Sequence[str] = ()
    turns: Sequence[Turn] = ()
    media: Sequence[MediaPart] = ()
    order: Sequence[tuple[str, int]] = ()
    observation: bytes | None = None
    params: Any = None
    outputs: frozenset[str] = frozenset()
    seed: int = 0
    max_seq_len: int = 0
    limits: MediaLimits = field(default_factory=MediaLimits)

    @property
    def size_bytes(self) -> int:
        """About how much it is: media, a robot's message and the text."""
        return sum(len(part.data) for part in self.media) + len(self.observation or b"") + len(self.text or "")

    def text_at(self, index: int) -> str:
        """The text that a pair `("text", index)` of `order` means."""
        return self.texts[index] if self.texts else self.text or ""

    def media_at(self, modality: str, index: int) -> MediaPart:
        """The file that a pair of `order` means."""
        return [part for part in self.media if part.modality == modality][index]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInputs:
    """One prompt segment's arrays under walk input names."""

    kind: str
    arrays: Mapping[str, np.ndarray]
    length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a processor returns. arrays: walk input name -> array. prompt_tokens: what the language model reads.

    metadata: output modality -> what a client is told of each output of it, beside shape and dtype.
    usage: what the answer's usage tells beside tokens of prompt and answer, such as tokens of an encoder or steps.
    params: the parameters to go on with (for instance with a limit lowered to the context), None = unchanged.
    """

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    segments: Sequence[SegmentInputs] = ()
    prompt_tokens: int = 0
    max_output_tokens: int | None = None
    params: Any = None
    metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    usage: Mapping[str, int] = field(default_factory=dict)
    warnings: Sequence[str] = ()


class Detokenizer(Protocol):
    """Turns ids into text piece by piece; never gives half a character."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Processor(Protocol):
    """Made once per pool process: `Processor(folder, model_kwargs)`."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None: ...

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Turn a request into arrays. Raises RequestError naming the field for the user's mistakes."""

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        """One chunk for the client and its metadata; the same code for stream and whole."""


@runtime_checkable
class QuickProcessor(Processor, Protocol):
    """A processor that the api makes for itself too, for requests that it prepares sooner than a process can be asked.

    Optional. The api keeps such requests on its event loop: everybody else waits meanwhile, and nothing there ends a
    job that takes too long or crashes. So what is quick is a millisecond or two at worst, whatever the bytes are, and
    goes through no decoder of media.

    It may name `quick_bytes`, the most that a request may have, in place of one MiB: where arrays are taken as they lie
    in the upload, without a pass over them, their size does not matter here.
    """

    def warm_up(self) -> None:
        """Read what `process_prompt` reads at first use. Called once, on a thread, before `is_quick`."""

    def is_quick(self, request: PromptRequest) -> bool:
        """Whether `process_prompt` may run on the loop, by sizes and first bytes alone. Asked only for small requests
        whose uploads, if any, are tensors.
        """


@runtime_checkable
class ApartProcessor(QuickProcessor, Protocol):
    """A quick processor some of whose files may be read apart from the rest of their request.

    Optional. Where several pool processes are free they read one file or more each, at the same time, and make tensors
    of them; `process_prompt` then gets the request with these in their places, in the api itself if that is quick.
    """

    def apart(self, request: PromptRequest) -> Sequence[int]:
        """Which of the request's media, by their places in it. On the loop: by sizes, first bytes and parameters."""

    def read_apart(self, part: MediaPart, number: int) -> MediaPart:
        """A file as a tensor that `process_prompt` takes for the same. number: which of its modality, from 0.

        In a pool process. Raises what `process_prompt` raises for that file.
        """
