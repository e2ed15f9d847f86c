"""What a stream brings: one chunk per output line, or the error that ended it. Made by StreamReader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mstar_core.client.array import array_of
from mstar_core.client.line import Line

if TYPE_CHECKING:
    from mstar_core.client.array import Array


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of an output. data: the payload's bytes. metadata: as docs/http-api.md says for the modality."""

    modality: str
    data: bytes
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """Which of several answers it belongs to; 0 unless more than one was asked for."""
        return int(self.metadata.get("index") or 0)


@dataclass(frozen=True, slots=True)
class TextChunk(Chunk):
    """Whole characters of text."""

    @property
    def text(self) -> str:
        return self.data.decode()


@dataclass(frozen=True, slots=True)
class ImageChunk(Chunk):
    """A whole image; `data` is a PNG file."""

    @property
    def width(self) -> int | None:
        return self.metadata.get("width")

    @property
    def height(self) -> int | None:
        return self.metadata.get("height")


@dataclass(frozen=True, slots=True)
class AudioChunk(Chunk):
    """Sound: PCM16 little endian, channels interleaved."""

    @property
    def pcm(self) -> bytes:
        return self.data

    @property
    def sample_rate(self) -> int:
        """Samples a second of one channel."""
        return int(self.metadata["sample_rate"])

    @property
    def channels(self) -> int:
        return int(self.metadata.get("num_channels") or 1)

    def to_numpy(self) -> Array:
        """int16 [samples], or [samples, channels] where there are several."""
        shape = (-1,) if self.channels == 1 else (-1, self.channels)
        return array_of(self.data, {"dtype": "int16"}).reshape(shape)


@dataclass(frozen=True, slots=True)
class NumbersChunk(Chunk):
    """Numbers with a shape and a type."""

    @property
    def name(self) -> str:
        """Which output of the model it is."""
        return str(self.metadata.get("name") or "")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.metadata.get("shape") or ())

    @property
    def dtype(self) -> str:
        return str(self.metadata.get("dtype") or "")

    def to_numpy(self) -> Array:
        """The array, of `shape` and `dtype`; bfloat16 as float32. Raises UsageError where numpy is not installed."""
        return array_of(self.data, self.metadata)


@dataclass(frozen=True, slots=True)
class VideoChunk(NumbersChunk):
    """A video file; of world models latents with shape and type."""


@dataclass(frozen=True, slots=True)
class ActionChunk(NumbersChunk):
    """Actions of a robot, [steps, values] float32."""

    @property
    def is_normalized(self) -> bool:
        """Whether the values are in the model's own units, not the robot's."""
        return bool(self.metadata.get("normalized"))


@dataclass(frozen=True, slots=True)
class TensorChunk(NumbersChunk):
    """A tensor; `metadata["step"]` counts the steps of a rollout."""


@dataclass(frozen=True, slots=True)
class ScalarChunk(NumbersChunk):
    """Whole numbers, int64."""

    @property
    def value(self) -> int:
        """The number. Raises ValueError when there are several: `to_numpy` gives them."""
        return int(self.to_numpy().item())


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The end of a stream that failed; in a stream with `on_error="event"` the last event."""

    code: str
    status: int
    message: str
    request_id: str | None = None
    param: str | None = None


Event = Chunk | ErrorEvent

KINDS: Final[Mapping[str, type[Chunk]]] = {
    "text": TextChunk,
    "image": ImageChunk,
    "audio": AudioChunk,
    "video": VideoChunk,
    "action": ActionChunk,
    "tensor": TensorChunk,
    "scalar": ScalarChunk,
}


def chunk_of(line: Line) -> Chunk:
    """The chunk of an output line. A modality that this version does not know gives a plain Chunk."""
    return KINDS.get(line.modality, Chunk)(line.modality, line.data, line.metadata)


def error_of(line: Line) -> ErrorEvent:
    """The event of an error line."""
    facts = line.metadata
    status = facts.get("status")
    return ErrorEvent(
        code=str(facts.get("code") or "internal_error"),
        status=status if isinstance(status, int) else 500,
        message=line.data.decode("utf-8", "replace"),
        request_id=facts.get("request_id"),
        param=facts.get("param"),
    )
