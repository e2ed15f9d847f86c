"""Results of whole responses, and the parse of a response into them. Used by both clients."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mstar_core.client.audio import AudioBuffer
from mstar_core.client.errors import ClientError
from mstar_core.client.events import (
    ActionChunk,
    AudioChunk,
    ErrorEvent,
    ImageChunk,
    OutputChunk,
    ScalarChunk,
    TensorChunk,
    TextChunk,
    VideoChunk,
    chunk_of,
)
from mstar_core.client.reader import FRAMES, StreamReader
from mstar_core.client.streams import error_of_event

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole answer. text: empty if there is none. images: PNG files. audio: None if no audio was requested.

    raw: the server's JSON, payloads in base64; for numbers, which arrive as frames, as bytes. seed: repeats the answer.
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
        """Write one image in the format of the ending: .png, .jpg or .webp. An existing file is replaced.

        Raises ClientError if the index does not exist, UsageError for another ending.
        """
        from mstar_core.client.file_formats import image_file  # here, for the import of the client

        target = Path(path)
        target.write_bytes(image_file(_output(self.images, "image", index, self), target))
        return target

    def save_audio(self, path: str | os.PathLike[str]) -> Path:
        """Write the audio in the format of the ending: .wav, .pcm, .mp3, .flac, .opus or .ogg.

        An existing file is replaced. Raises ClientError if there is no audio, UsageError for another ending.
        """
        from mstar_core.client.file_formats import sound_file  # here, for the import of the client

        target = Path(path)
        target.write_bytes(sound_file(audio_of(self), target))
        return target


@dataclass(frozen=True, slots=True)
class LatentResult:
    """The answer of a world model: tensors (latents, energies, planned actions), scalars, and latents sent as video."""

    tensors: list[TensorChunk]
    scalars: list[ScalarChunk]
    video: list[VideoChunk]
    result: GenerateResult = field(repr=False)

    def tensor(self, name: str) -> TensorChunk:
        """Return the tensor of that name; of a rollout, which sends one per step, the last. Raises ClientError."""
        matches = [tensor for tensor in self.tensors if tensor.name == name]
        if not matches:
            have = ", ".join(dict.fromkeys(tensor.name for tensor in self.tensors)) or "none"
            raise _no_output(f"the answer has no tensor {name!r}", f"its tensors: {have}", self.result)
        return matches[-1]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model. id: the deployment's name. root: its weights. parameters: JSON schema of request parameters."""

    id: str
    root: str = ""
    aliases: list[str] = field(default_factory=list)
    input_modalities: list[str] = field(default_factory=list)
    output_modalities: list[str] = field(default_factory=list)
    endpoints: list[str] = field(default_factory=list)
    capabilities: list[str] = field(default_factory=list)
    max_model_len: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict, repr=False)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class ModelSample:
    """Inputs that fit the served model: `client.generate(**sample.arguments)`.

    files: name and content of each, in order. kinds: their modalities. params: parameters of the model.
    """

    name: str
    title: str
    output_modalities: tuple[str, ...]
    text: str | None = None
    files: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    kinds: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `generate`."""
        names = {"image": "images", "audio": "audio", "video": "video", "tensor": "tensors"}
        media: dict[str, Any] = {}
        for kind, file in zip(self.kinds, self.files, strict=True):
            media.setdefault(names[kind], []).append(file)
        return {"text": self.text, "output_modalities": self.output_modalities, **media, **self.params}


def json_object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a response. Raises ClientError for any other body, such as a proxy's page."""
    try:
        content = response.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        kind = response.headers.get("Content-Type") or "no content type"
        raise ClientError(
            "the response is not from a deployment",
            f"{kind}: {response.text[:80]!r}",
            "check the address",
            status=response.status_code,
            code="malformed",
        )
    return content


def result_of(response: httpx.Response) -> GenerateResult:
    """Return the result of a whole response of /generate, JSON or frames. Raises ClientError."""
    if not (response.headers.get("Content-Type") or "").startswith(FRAMES):
        return result_of_json(json_object(response))
    reader = StreamReader(response.headers.get("X-Request-ID"), FRAMES)
    chunks: list[OutputChunk] = []
    outputs: dict[str, list[dict[str, Any]]] = {}
    for event in (*reader.push(response.content), *reader.end()):
        if isinstance(event, ErrorEvent):
            raise error_of_event(event)
        chunks.append(event)
        outputs.setdefault(event.modality, []).append({"data": event.data, "metadata": dict(event.metadata)})
    facts = {
        "request_id": reader.request_id,
        "finish_reason": reader.finish_reason,
        "usage": reader.usage,
        "seed": reader.seed,
        "warnings": reader.warnings,
        "outputs": outputs,
    }
    return _result(chunks, facts)


def result_of_json(body: Mapping[str, Any]) -> GenerateResult:
    """Return the result that a JSON response holds."""
    chunks = [
        chunk_of(modality, base64.b64decode(entry.get("data") or ""), dict(entry.get("metadata") or {}))
        for modality, entries in (body.get("outputs") or {}).items()
        for entry in entries
    ]
    return _result(chunks, body)


def samples_of(body: Mapping[str, Any]) -> list[ModelSample]:
    """Return the samples of a response of /v1/samples."""
    return [
        ModelSample(
            name=sample["name"],
            title=sample["title"],
            output_modalities=tuple(sample["output_modalities"]),
            text=sample["text"],
            files=tuple((file["name"], base64.b64decode(file["data"])) for file in sample["files"]),
            kinds=tuple(file["kind"] for file in sample["files"]),
            params=sample["params"],
        )
        for sample in body["data"]
    ]


def models_of(body: Mapping[str, Any]) -> list[ModelInfo]:
    """Return the models of a response of /v1/models."""
    known = {field.name for field in fields(ModelInfo)} - {"raw"}
    return [
        ModelInfo(raw=card, **{name: card[name] for name in known & card.keys() if card[name] is not None})
        for card in body.get("data") or []
    ]


def _result(chunks: Sequence[OutputChunk], body: Mapping[str, Any]) -> GenerateResult:
    sounds = [chunk for chunk in chunks if isinstance(chunk, AudioChunk)]
    return GenerateResult(
        request_id=str(body.get("request_id") or ""),
        text="".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)),
        images=[chunk.data for chunk in chunks if isinstance(chunk, ImageChunk)],
        audio=_joined(sounds) if sounds else None,
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


def _joined(sounds: list[AudioChunk]) -> AudioBuffer:
    pcm = b"".join(chunk.pcm for chunk in sounds)
    return AudioBuffer(pcm, sounds[0].sample_rate, sounds[0].channels)


def image_of(result: GenerateResult) -> bytes:
    """Return the first image. Raises ClientError if there is none."""
    return _output(result.images, "image", 0, result)


def audio_of(result: GenerateResult) -> AudioBuffer:
    """Return the audio. Raises ClientError if there is none, as when a model ended before its first samples."""
    return _output([] if result.audio is None else [result.audio], "audio", 0, result)


def actions_of(result: GenerateResult) -> ActionChunk:
    """Return the first chunk of actions. Raises ClientError if there is none."""
    return _output(result.actions, "action", 0, result)


def latents_of(result: GenerateResult) -> LatentResult:
    """Return the answer of a world model."""
    return LatentResult(result.tensors, result.scalars, result.video, result)


def _output(items: list[T], kind: str, index: int, result: GenerateResult) -> T:
    if not 0 <= index < len(items):
        outputs = "1 output" if len(items) == 1 else f"{len(items)} outputs"
        title = f"the answer has {outputs} of the kind {kind}, none at index {index}"
        raise _no_output(title, "output_modalities sets the kinds of output", result)
    return items[index]


def _no_output(title: str, hint: str, result: GenerateResult) -> ClientError:
    """Return the error for a successful request without the expected output; the server's warnings may say why."""
    detail = "; ".join(result.warnings)
    return ClientError(title, detail, hint, status=200, code="no_output", request_id=result.request_id)
