"""Events of a stream: one chunk per output line, or the error that ended it. Made by StreamReader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mstar_core.client.arrays import array_of

if TYPE_CHECKING:
    from mstar_core.client.arrays import Array


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """One piece of an output. data: the payload. metadata: as docs/http-api.md lists it for the modality."""

    modality: str
    data: bytes
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """Index of the answer that the chunk belongs to; 0 unless the request asked for several answers."""
        return int(self.metadata.get("index") or 0)


@dataclass(frozen=True, slots=True)
class TextChunk(OutputChunk):
    """Whole characters of text."""

    @property
    def text(self) -> str:
        return self.data.decode()


@dataclass(frozen=True, slots=True)
class ImageChunk(OutputChunk):
    """A whole image; `data` is a PNG file."""

    @property
    def width(self) -> int | None:
        return self.metadata.get("width")

    @property
    def height(self) -> int | None:
        return self.metadata.get("height")


@dataclass(frozen=True, slots=True)
class AudioChunk(OutputChunk):
    """Audio: PCM16 little endian, interleaved channels."""

    @property
    def pcm(self) -> bytes:
        return self.data

    @property
    def sample_rate(self) -> int:
        """Samples per second of one channel."""
        return int(self.metadata["sample_rate"])

    @property
    def channels(self) -> int:
        return int(self.metadata.get("num_channels") or 1)

    def to_numpy(self) -> Array:
        """Return int16 [samples], or [samples, channels] for several channels."""
        shape = (-1,) if self.channels == 1 else (-1, self.channels)
        return array_of(self.data, {"dtype": "int16"}).reshape(shape)


@dataclass(frozen=True, slots=True)
class NumbersChunk(OutputChunk):
    """Numbers with a shape and a dtype."""

    @property
    def name(self) -> str:
        """Name of the model's output."""
        return str(self.metadata.get("name") or "")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.metadata.get("shape") or ())

    @property
    def dtype(self) -> str:
        return str(self.metadata.get("dtype") or "")

    def to_numpy(self) -> Array:
        """Return the array of `shape` and `dtype`; bfloat16 as float32. Raises UsageError without numpy."""
        return array_of(self.data, self.metadata)


@dataclass(frozen=True, slots=True)
class VideoChunk(NumbersChunk):
    """A video file; for world models latents with shape and dtype."""


@dataclass(frozen=True, slots=True)
class ActionChunk(NumbersChunk):
    """Actions of a robot, [steps, values] float32."""

    @property
    def is_normalized(self) -> bool:
        """Whether the values are in the model's normalized units instead of the robot's."""
        return bool(self.metadata.get("normalized"))


@dataclass(frozen=True, slots=True)
class TensorChunk(NumbersChunk):
    """A tensor; `metadata["step"]` counts the steps of a rollout. Also an embedding, float32 [dim]."""


@dataclass(frozen=True, slots=True)
class ScalarChunk(NumbersChunk):
    """Whole numbers, int64."""

    @property
    def value(self) -> int:
        """The number. Raises ValueError if there are several; `to_numpy` returns them all."""
        return int(self.to_numpy().item())


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The end of a stream that failed; the last event of a stream with `on_error="event"`."""

    code: str
    status: int
    message: str
    request_id: str | None = None
    param: str | None = None


Chunk = OutputChunk
"""Public name of OutputChunk."""

Event = OutputChunk | ErrorEvent

KINDS: Final[Mapping[str, type[OutputChunk]]] = {
    "text": TextChunk,
    "image": ImageChunk,
    "audio": AudioChunk,
    "video": VideoChunk,
    "action": ActionChunk,
    "tensor": TensorChunk,
    "scalar": ScalarChunk,
    "embedding": TensorChunk,
}


def chunk_of(modality: str, data: bytes, metadata: Mapping[str, Any]) -> OutputChunk:
    """Return the chunk of an output. An unknown modality, of a later server, gives a plain OutputChunk."""
    return KINDS.get(modality, OutputChunk)(modality, data, metadata)
