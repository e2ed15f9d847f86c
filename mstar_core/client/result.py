"""GenerateResult: a whole answer. Made from the JSON of /generate; the clients' shorter calls take their part of it."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mstar_core.client.event import (
    ActionChunk,
    AudioChunk,
    Chunk,
    ImageChunk,
    ScalarChunk,
    TensorChunk,
    TextChunk,
    VideoChunk,
    chunk_of,
)
from mstar_core.client.failure import MStarError
from mstar_core.client.line import Line
from mstar_core.client.sound import AudioBuffer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole answer. text: empty where there is none. images: PNG files. audio: None where no sound was asked for.

    raw: the server's answer as it came, payloads in base64, or as bytes where numbers were asked for. seed: what makes
    the same answer again.
    """

    request_id: str
    text: str = ""
    images: list[bytes] = field(default_factory=list)
    audio: AudioBuffer | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    actions: list[ActionChunk] = field(default_factory=list)
    tensors: list[TensorChunk] = field(default_factory=list)
    scalars: list[ScalarChunk] = field(default_factory=list)
    video: list[VideoChunk] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    seed: int | None = None
    warnings: list[str] = field(default_factory=list)

    def save_image(self, path: str | os.PathLike[str], index: int = 0) -> Path:
        """Write one image, in place of what is there. Raises MStarError when there are not so many."""
        target = Path(path)
        target.write_bytes(_one(self.images, "image", index, self))
        return target

    def save_audio(self, path: str | os.PathLike[str]) -> Path:
        """Write the sound as a WAV file, in place of what is there. Raises MStarError when there is none."""
        return sound_of(self).to_wav(path)


@dataclass(frozen=True, slots=True)
class LatentResult:
    """What a world model gave: tensors (latents, energies, planned actions), scalars, and latents sent as video."""

    tensors: list[TensorChunk]
    scalars: list[ScalarChunk]
    video: list[VideoChunk]
    result: GenerateResult = field(repr=False)

    def tensor(self, name: str) -> TensorChunk:
        """The tensor of that name, the last where a rollout sent one for each step. Raises MStarError."""
        found = [each for each in self.tensors if each.name == name]
        if not found:
            have = ", ".join(dict.fromkeys(each.name for each in self.tensors)) or "none"
            raise _lacking(f"the answer has no tensor {name!r}", f"it has {have}", self.result)
        return found[-1]


def result_of(body: Mapping[str, Any]) -> GenerateResult:
    """The result of an answer's JSON."""
    chunks = [_chunk(modality, entry) for modality, entries in (body.get("outputs") or {}).items() for entry in entries]
    return _result(chunks, body)


def result_of_chunks(chunks: Sequence[Chunk], facts: Mapping[str, Any]) -> GenerateResult:
    """The result of an answer in frames. facts: what its first and last frame say."""
    outputs: dict[str, list[dict[str, Any]]] = {}
    for chunk in chunks:
        outputs.setdefault(chunk.modality, []).append({"data": chunk.data, "metadata": dict(chunk.metadata)})
    return _result(chunks, {**facts, "outputs": outputs})


def _result(chunks: Sequence[Chunk], body: Mapping[str, Any]) -> GenerateResult:
    sounds = [chunk for chunk in chunks if isinstance(chunk, AudioChunk)]
    return GenerateResult(
        request_id=str(body.get("request_id") or ""),
        text="".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)),
        images=[chunk.data for chunk in chunks if isinstance(chunk, ImageChunk)],
        audio=joined(sounds) if sounds else None,
        raw=body,
        actions=[chunk for chunk in chunks if isinstance(chunk, ActionChunk)],
        tensors=[chunk for chunk in chunks if isinstance(chunk, TensorChunk)],
        scalars=[chunk for chunk in chunks if isinstance(chunk, ScalarChunk)],
        video=[chunk for chunk in chunks if isinstance(chunk, VideoChunk)],
        finish_reason=body.get("finish_reason"),
        usage=body.get("usage"),
        seed=body.get("seed"),
        warnings=list(body.get("warnings") or []),
    )


def joined(sounds: list[AudioChunk]) -> AudioBuffer:
    """Pieces of one sound as a whole."""
    pcm = b"".join(chunk.pcm for chunk in sounds)
    return AudioBuffer(pcm, sounds[0].sample_rate, sounds[0].channels)


def image_of(result: GenerateResult) -> bytes:
    """The first image. Raises MStarError when there is none."""
    return _one(result.images, "image", 0, result)


def sound_of(result: GenerateResult) -> AudioBuffer:
    """The sound. Raises MStarError when there is none, as when a model ended before it had made any."""
    return _one([] if result.audio is None else [result.audio], "audio", 0, result)


def actions_of(result: GenerateResult) -> ActionChunk:
    """The first chunk of actions. Raises MStarError when there is none."""
    return _one(result.actions, "action", 0, result)


def latents_of(result: GenerateResult) -> LatentResult:
    """What a world model gave."""
    return LatentResult(result.tensors, result.scalars, result.video, result)


def _one(items: list[T], kind: str, index: int, result: GenerateResult) -> T:
    if not 0 <= index < len(items):
        title = f"the answer has {len(items)} outputs of the kind {kind}, not one at index {index}"
        raise _lacking(title, "output_modalities says what is made", result)
    return items[index]


def _lacking(title: str, hint: str, result: GenerateResult) -> MStarError:
    """The request ended well, but not with what is asked for; the server's warnings often tell why."""
    detail = "; ".join(result.warnings)
    return MStarError(title, detail, hint, status=200, code="no_output", request_id=result.request_id)


def _chunk(modality: str, entry: Mapping[str, Any]) -> Chunk:
    data = base64.b64decode(entry.get("data") or "")
    return chunk_of(Line(modality=modality, data=data, metadata=dict(entry.get("metadata") or {})))
