"""Encoding of worker outputs into chunks of bytes and metadata: text, audio, numbers, files. Used by the service."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, cast, get_args

import msgspec
import numpy as np
from prometheus_client import Histogram

from mstar_core.api.api_metrics import Metrics
from mstar_core.api.output.token_scores import TokenScore, TokenScores
from mstar_core.api.output.units import Array, OutputItem
from mstar_core.codec import BFLOAT16, npy_header, safetensors_header, widen_bfloat16
from mstar_core.errors import RequestError
from mstar_core.plugin.chat.parser import begun
from mstar_core.plugin.processor import Detokenizer
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import LOGPROBS, PROGRESS, Audio

Form = Literal["raw", "npy", "safetensors", "json"]
FORMS: Final[tuple[str, ...]] = get_args(Form)
FLOATS: Final = ("float32", "float16", "bfloat16")

MOST_JSON: Final = 65_536
"""Largest output, in numbers, that is encoded as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberForm:
    """Number format of a request. dtype: type for floating-point outputs; None: unchanged. Integers keep their type."""

    form: Form = "raw"
    dtype: str | None = None

    @classmethod
    def of(cls, params: object) -> NumberForm:
        """Read the parameters `output_format` and `output_dtype`, if the model has them."""
        form, dtype = getattr(params, "output_format", None), getattr(params, "output_dtype", None)
        return cls(form=cast("Form", form) if form in FORMS else "raw", dtype=dtype if dtype in FLOATS else None)

    def changes(self, item: OutputItem) -> bool:
        """Return whether encoding converts the numbers or writes them as text, rather than copying them."""
        dtype = item.dtype or item.array.dtype.name
        is_float = item.dtype == BFLOAT16 or item.array.dtype.kind == "f"
        return self.form == "json" or (is_float and self.dtype not in (None, dtype))


def packed(item: OutputItem, form: NumberForm) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of a numeric output and its metadata: shape, dtype, name, format, and the item's own.

    Little endian, C order. Raises RequestError if the format does not support the output.
    """
    array, dtype = _converted(item, form.dtype)
    facts = {"shape": list(array.shape), "dtype": dtype, "name": item.port, "format": form.form}
    match form.form:
        case "raw":
            data = array.tobytes()
        case "npy":
            data = _header(form.form, dtype, lambda: npy_header(array.shape, dtype)) + array.tobytes()
        case "safetensors":
            notes = {str(key): note if isinstance(note, str) else json.dumps(note) for key, note in item.meta.items()}
            entry = (item.port, dtype, array.shape, array.nbytes)
            data = _header(form.form, dtype, lambda: safetensors_header([entry], notes)) + array.tobytes()
        case "json":
            data = _json(array, dtype, item.port)
    return data, {**item.meta, **facts}


def widened(item: OutputItem) -> Array:
    """Return an output's array; bfloat16 as float32, because NumPy has no bfloat16."""
    wide: Array = widen_bfloat16(item.array) if item.dtype == BFLOAT16 else item.array
    return wide


def _converted(item: OutputItem, target: str | None) -> tuple[Array, str]:
    is_half = item.dtype == BFLOAT16
    source = BFLOAT16 if is_half else item.array.dtype.name
    array = np.asarray(item.array, order="C")  # ascontiguousarray would turn a scalar into [1]
    is_float = is_half or array.dtype.kind == "f"
    if target is None or not is_float or target == source:
        return array.astype(array.dtype.newbyteorder("<"), copy=False), source
    wide = widen_bfloat16(array) if is_half else array.astype("<f4", copy=False)
    if target == BFLOAT16:
        return _narrowed(wide), BFLOAT16
    return wide.astype(np.dtype(target).newbyteorder("<"), copy=False), target


def _narrowed(wide: Array) -> Array:
    """Return float32 as bfloat16 bits, rounded to nearest, ties to even. NaN stays NaN."""
    bits = np.asarray(wide, order="C").view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    narrow: Array = np.where(np.isnan(wide), np.uint16(0x7FC0), rounded).astype("<u2")
    return narrow


def _header(form: Form, dtype: str, make: Callable[[], bytes]) -> bytes:
    try:
        return make()
    except ValueError as error:
        raise RequestError(
            f"{form} does not support {dtype}",
            hint="use output_format raw, or another output_dtype",
            field="output_format",
            value=form,
            allowed="raw, safetensors" if dtype == BFLOAT16 else "raw",
        ) from error


def _json(array: Array, dtype: str, port: str) -> bytes:
    if math.prod(array.shape) > MOST_JSON:
        raise RequestError(
            f"{port} has {math.prod(array.shape)} numbers, but JSON output is limited to {MOST_JSON}",
            hint="use output_format raw, npy or safetensors",
            field="output_format",
            value="json",
            allowed="raw, npy, safetensors",
        )
    return msgspec.json.encode((widen_bfloat16(array) if dtype == BFLOAT16 else array).tolist())


class StopStrings:
    """Matcher that holds text back while it may be the start of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_matched = False
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that can be sent now. After a match it is empty."""
        if self.is_matched:
            return ""
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.is_matched = True
            self._held = ""
            _, at = min(
                matches
            )  # the match that is complete first, so that the result does not depend on chunk borders
            return text[:at]
        keep = max((begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text held back, at the end of the output."""
        text, self._held = self._held, ""
        return text


AT_ONCE_BYTES: Final = 1 << 20
COPIED_BYTES: Final = 4 << 20
"""Size up to which numbers are copied on the event loop: a copy takes less time than waking a thread."""

PCM16: Final = np.dtype("<i2")
RAW: Final = NumberForm()

Postprocess = Callable[[Array, str], Awaitable[tuple[bytes, dict[str, Any]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChunk:
    """Encoded part of an output. metadata: depends on the modality, see docs/http-api.md.

    tokens: ids of text since the last chunk of text, those that complete no character included. scores: of its tokens,
    for requests for log-probabilities.
    """

    modality: str
    data: bytes
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    scores: Sequence[TokenScore] = ()


def _steps(item: OutputItem) -> int:
    """Return the number of steps of actions [..., steps, values]."""
    return item.array.shape[-2] if item.array.ndim > 1 else 1


FILM_AXES: Final = 4
FPS: Final = 24
"""Axes of the frames of a video, and their rate if a model does not say it."""


class OutputEncoder:
    """Encodes outputs and counts what was produced. facts: extra metadata of the processor, by modality.

    PCM16 and numbers are encoded here, the latter in the format `numbers`. Token ids go through `detokenizer`, and all
    other outputs through the processor's `postprocess`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        postprocess: Postprocess,
        detokenizer: Detokenizer | None,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        stops: StopStrings | None = None,
        numbers: NumberForm = RAW,
        facts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        scores: TokenScores | None = None,
    ) -> None:
        """scores: of a request for log-probabilities; taken with the text."""
        self.samples = 0
        self.text_tokens = 0
        self._unsent_tokens = 0
        self.images = 0
        self.action_steps = 0
        self.frames = 0
        self.video_seconds = 0.0
        self.first_at: float | None = None
        self.first_sound_at: float | None = None
        audio = spec.output("audio")
        self.rate = audio.rate if isinstance(audio, Audio) else 0
        self.channels = audio.channels if isinstance(audio, Audio) else 1
        self._postprocess = postprocess
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._clock = clock
        self._stops = stops
        self._numbers = numbers
        self._facts = facts
        self._scores = scores
        self._last: dict[str, float] = {}
        self._gaps: dict[str, Histogram] = {}  # by modality; a lookup costs as much as the observation
        self._started_playing = 0.0

    @property
    def audio_seconds(self) -> float:
        """Return the duration of the encoded audio."""
        return self.samples / self.rate if self.rate else 0.0

    async def chunks(self, items: Sequence[OutputItem]) -> list[EncodedChunk]:
        """Return the chunks of some items; text that does not complete a character gives none."""
        chunks: list[EncodedChunk] = []
        for item in items:
            if item.modality == PROGRESS:
                step, steps = (int(value) for value in item.array.reshape(-1))
                chunks.append(EncodedChunk(modality=PROGRESS, data=b"", metadata={"step": step, "steps": steps}))
                continue
            if item.modality == LOGPROBS:
                if self._scores is not None:
                    self._scores.add(item.array)
                continue
            now = self._clock()
            self._note(item.modality, now)
            if item.modality == "audio" and item.array.dtype == PCM16:
                encoded = [self._sound(item.array.tobytes(), {}, now)]
            else:
                encoded = await self._encoded(item)
            facts = self._facts.get(item.modality)
            chunks += (
                encoded if not facts else [replace(chunk, metadata={**chunk.metadata, **facts}) for chunk in encoded]
            )
        return chunks

    async def _encoded(self, item: OutputItem) -> list[EncodedChunk]:
        match item.modality:
            case "audio":
                return [self._sound(*await self._postprocess(widened(item), "audio"), self._clock())]
            case "text":
                return self._text(item)
            case "action" | "scalar" | "tensor" | "embedding":
                self.action_steps += _steps(item) if item.modality == "action" else 0
                return [await self._packed(item)]
            case _:
                data, metadata = await self._postprocess(widened(item), item.modality)
                self.images += item.modality == "image"
                if item.modality == "video":
                    self._note_video(item, metadata)
                return [EncodedChunk(modality=item.modality, data=data, metadata={**item.meta, **metadata})]

    def _note_video(self, item: OutputItem, metadata: Mapping[str, Any]) -> None:
        frames = int(metadata.get("frames") or (item.array.shape[0] if item.array.ndim == FILM_AXES else 0))
        fps = metadata.get("fps") or self._facts.get("video", {}).get("fps") or FPS
        self.frames += frames
        self.video_seconds += frames / float(fps)

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop string has ended the text."""
        return self._stops is not None and self._stops.is_matched

    def flush(self) -> list[EncodedChunk]:
        """Return the text still held back by the detokenizer and by stop strings."""
        rest = self._detokenizer.flush() if self._detokenizer is not None else ""
        if self._stops is not None:
            rest = self._stops.push(rest) + self._stops.flush()
        chunks = self._texts([rest], tokens=0)
        if self._scores is not None and not self.is_stopped and (left := self._scores.rest()):
            chunks.append(EncodedChunk(modality="text", data=b"", scores=left))
        return chunks

    async def _packed(self, item: OutputItem) -> EncodedChunk:
        most = AT_ONCE_BYTES if self._numbers.changes(item) else COPIED_BYTES
        if item.array.nbytes > most:  # other requests are served meanwhile
            data, metadata = await asyncio.to_thread(packed, item, self._numbers)
        else:
            data, metadata = packed(item, self._numbers)
        return EncodedChunk(modality=item.modality, data=data, metadata=metadata)

    def _sound(self, data: bytes, extra: Mapping[str, Any], now: float) -> EncodedChunk:
        samples = len(data) // (2 * self.channels)
        metadata = {
            **extra,
            "sample_rate": self.rate,
            "num_channels": self.channels,
            "samples": samples,
            "offset_samples": self.samples,
        }
        self._note_playback(now)
        self.samples += samples
        self._metrics.audio_seconds.inc(samples / self.rate if self.rate else 0)
        return EncodedChunk(modality="audio", data=data, metadata=metadata)

    def _text(self, item: OutputItem) -> list[EncodedChunk]:
        ids = [int(value) for value in item.array.reshape(-1).tolist()]
        if self._stops is not None and self._detokenizer is not None:
            return self._stopped_text(ids, self._stops, self._detokenizer)
        self.text_tokens += len(ids)
        if self._detokenizer is None:
            return [EncodedChunk(modality="text", data=bytes(item.array.tobytes()))] if item.array.dtype == "u1" else []
        return self._texts([self._written(value, self._detokenizer) for value in ids])

    def _stopped_text(self, ids: list[int], stops: StopStrings, detokenizer: Detokenizer) -> list[EncodedChunk]:
        # One id at a time: only tokens up to the one that completes the stop string are counted.
        pieces = []
        for value in ids:
            if stops.is_matched:
                break
            self.text_tokens += 1
            pieces.append(stops.push(self._written(value, detokenizer)))
        return self._texts(pieces)

    def _written(self, value: int, detokenizer: Detokenizer) -> str:
        text = detokenizer.push([value])
        if self._scores is not None:
            self._scores.wrote(value, text)
        return text

    def _texts(self, pieces: Sequence[str], *, tokens: int = 1) -> list[EncodedChunk]:
        """Return the chunks of pieces of text. tokens: ids of each piece."""
        chunks = []
        for piece in pieces:
            self._unsent_tokens += tokens
            if piece:
                scores = () if self._scores is None else self._scores.sent(piece)
                chunk = EncodedChunk(modality="text", data=piece.encode(), tokens=self._unsent_tokens, scores=scores)
                chunks.append(chunk)
                self._unsent_tokens = 0
        return chunks

    def _note(self, modality: str, now: float) -> None:
        before = self._last.get(modality)
        if before is None:
            self._gaps[modality] = self._metrics.chunk_gap_s.labels(modality)
        else:
            self._gaps[modality].observe(now - before)
        self._last[modality] = now
        if self.first_at is None:
            self.first_at = now
        if modality == "audio" and self.first_sound_at is None:
            self.first_sound_at = now

    def _note_playback(self, now: float) -> None:
        if not self.samples:
            self._started_playing = now
        elif self.rate:
            self._metrics.stream_gap_s.observe(max(0.0, now - self._started_playing - self.samples / self.rate))
