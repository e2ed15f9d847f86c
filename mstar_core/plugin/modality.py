"""Modalities that a model reads and writes, with the facts a client needs (rate, channels, sizes)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """Base of all modalities; `kind` is the word used on the wire."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Modality):
    kind: ClassVar[str] = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image(Modality):
    kind: ClassVar[str] = "image"
    max_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio(Modality):
    """rate: samples per second."""

    kind: ClassVar[str] = "audio"
    rate: int = 24000
    channels: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Video(Modality):
    kind: ClassVar[str] = "video"


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


MODALITIES: tuple[type[Modality], ...] = (Text, Image, Audio, Video, Action, Scalar, TensorData)
MODALITY_NAMES: tuple[str, ...] = tuple(m.kind for m in MODALITIES)
