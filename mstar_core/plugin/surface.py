"""Modalities of a model, and how the model serves the api's routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """Base of all modalities. kind: name on the wire."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Modality):
    """grows: of an input, the growing input (`Receive`) that gets the ids of a text which arrives while it is read.

    The processor is then a `TextStreamProcessor`. Empty: a text is whole before its request begins.
    """

    kind: ClassVar[str] = "text"
    grows: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image(Modality):
    kind: ClassVar[str] = "image"
    max_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio(Modality):
    """rate: samples per second.

    window_s: of an input, the seconds that the model reads apart from what follows, counted from the begin of a sound.
    A processor that gets `PromptRequest.reads_windows` makes a segment of each, so that those of a growing sound can be
    read ahead. 0: a sound is read as a whole.
    token_loop: of an output beside text, the loop whose iterations are its tokens in the usage object. Empty: all
    sampled ids that are not text.
    """

    kind: ClassVar[str] = "audio"
    rate: int = 24000
    channels: int = 1
    token_loop: str = ""
    window_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Video(Modality):
    """max_frames: of a clip, if every frame of it is used."""

    kind: ClassVar[str] = "video"
    max_frames: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action(Modality):
    """horizon x dim float32 values."""

    kind: ClassVar[str] = "action"
    horizon: int | None = None
    dim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar(Modality):
    kind: ClassVar[str] = "scalar"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorData(Modality):
    kind: ClassVar[str] = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding(Modality):
    """One float32 vector [dim] of length 1, for the whole input."""

    kind: ClassVar[str] = "embedding"
    dim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments(Modality):
    """A part of a transcript with its times, as JSON: `language`, `segments` and `words`, see docs/http-api.md.

    Routes ask for it where a client wants timestamps. The processor makes it of what the model emits.
    """

    kind: ClassVar[str] = "segments"


MODALITIES: tuple[type[Modality], ...] = (Text, Image, Audio, Video, Action, Scalar, TensorData, Embedding, Segments)
MODALITY_NAMES: tuple[str, ...] = tuple(m.kind for m in MODALITIES)

PROGRESS: Final = "progress"
"""Modality of progress events: int64 [2], steps done and all steps. Sent only to requests that ask for events."""

PARTIAL_IMAGE: Final = "partial_image"
"""Modality of images in the making, of the form of an image. Sent only to requests that ask for them."""

LOGPROBS: Final = "logprobs"
"""Modality of log-probabilities, directly before the ids of a text output, for requests that ask: float64 [n, 1 + 2k].

Of each id: its own, then pairs of one of the k most likely ids and its log-probability.
"""

EVENTS: Final = (PROGRESS, PARTIAL_IMAGE)
"""Modalities sent only to requests that ask for them. They are not outputs of a model."""

SERIES: Final = frozenset(("text", "audio", LOGPROBS))
"""Modalities whose outputs are cut anywhere: a unit is an id, a sample or the numbers of an id.

Other outputs are one unit each.
"""


def units_of(modality: str, shape: Sequence[int]) -> int:
    """Return the units of an output: ids, samples ([n] or [n, channels]), else one, such as an image."""
    if modality not in SERIES:
        return 1
    return prod(shape) if modality == "text" or not shape else shape[0]


ROUTES: Final = (
    "chat",
    "completion",
    "embedding",
    "tokenize",
    "speech",
    "image",
    "image_edit",
    "transcription",
    "video",
    "translation",
    "robot_policy",
)
"""Api routes that a model may map. `completion`, `embedding` and `tokenize` need a `TokenizingProcessor`."""

ROUTE_OUTPUTS: Final[Mapping[str, str]] = {
    "chat": "text",
    "completion": "text",
    "embedding": "embedding",
    "speech": "audio",
    "image": "image",
    "image_edit": "image",
    "transcription": "text",
    "video": "video",
    "translation": "text",
    "robot_policy": "action",
}
"""Output modality of each route that has one. A model that maps a route must produce it."""

ROUTE_INPUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "chat": ("text",),
    "completion": ("text",),
    "embedding": ("text",),
    "tokenize": ("text",),
    "speech": ("text",),
    "image": ("text",),
    "image_edit": ("image", "text"),
    "transcription": ("audio",),
    "video": ("text",),
    "translation": ("audio",),
    "robot_policy": ("image",),
}
"""Input modalities of each route. A model that maps a route must read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Details of one route of a model.

    params: default parameter values on this route. beside: further output modalities to request, shown if the route
    has a field for them (a thought beside an image). instruction: text that is sent with the audio of a
    `transcription`; `{language}` is replaced by the language. instruction_without_language: text used if the request
    names no language. metadata: sent to a `robot_policy` client when it connects: texts, numbers, lists and maps.
    state, cameras: of a `robot_policy`, the number of values of a robot's state, None if it may vary, and the names of
    its cameras in upload order.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    instruction: str = ""
    instruction_without_language: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    state: int | None = None
    cameras: tuple[str, ...] = ()
