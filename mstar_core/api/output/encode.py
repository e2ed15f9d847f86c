"""Encoding of worker outputs into chunks of bytes and metadata. One encoder per request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from prometheus_client import Histogram

from mstar_core.api.metrics import Metrics
from mstar_core.api.output.numbers import NumberForm, packed, widened
from mstar_core.api.output.queue import Array, OutputItem
from mstar_core.api.output.stop_strings import StopStrings
from mstar_core.plugin.processor import Detokenizer
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import Audio

AT_ONCE_BYTES: Final = 1 << 20
COPIED_BYTES: Final = 4 << 20
"""Size up to which numbers are copied on the event loop: a copy takes less time than waking a thread."""

PCM16: Final = np.dtype("<i2")
RAW: Final = NumberForm()

Postprocess = Callable[[Array, str], Awaitable[tuple[bytes, dict[str, Any]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChunk:
    """Encoded part of an output. metadata: depends on the modality, see docs/http-api.md."""

    modality: str
    data: bytes
    metadata: dict[str, Any] = field(default_factory=dict)


def _steps(item: OutputItem) -> int:
    """Return the number of steps of actions [..., steps, values]."""
    return item.array.shape[-2] if item.array.ndim > 1 else 1


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
    ) -> None:
        self.samples = 0
        self.text_tokens = 0
        self.images = 0
        self.action_steps = 0
        self.frames = 0
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
            now = self._clock()
            self._note(item.modality, now)
            if item.modality == "audio" and item.array.dtype == PCM16:
                made = [self._sound(item.array.tobytes(), {}, now)]
            else:
                made = await self._made(item)
            facts = self._facts.get(item.modality)
            chunks += made if not facts else [replace(each, metadata={**each.metadata, **facts}) for each in made]
        return chunks

    async def _made(self, item: OutputItem) -> list[EncodedChunk]:
        match item.modality:
            case "audio":
                return [self._sound(*await self._postprocess(widened(item), "audio"), self._clock())]
            case "text":
                return self._text(item)
            case "action" | "scalar" | "tensor":
                self.action_steps += _steps(item) if item.modality == "action" else 0
                return [await self._packed(item)]
            case _:
                data, metadata = await self._postprocess(widened(item), item.modality)
                self.images += item.modality == "image"
                self.frames += int(metadata.get("frames") or 0) if item.modality == "video" else 0
                return [EncodedChunk(modality=item.modality, data=data, metadata={**item.meta, **metadata})]

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop string has ended the text."""
        return self._stops is not None and self._stops.is_matched

    def flush(self) -> list[EncodedChunk]:
        """Return the text still held back by the detokenizer and by stop strings."""
        rest = self._detokenizer.flush() if self._detokenizer is not None else ""
        if self._stops is not None:
            rest = self._stops.push(rest) + self._stops.flush()
        return [EncodedChunk(modality="text", data=rest.encode())] if rest else []

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
        pieces = [self._detokenizer.push([value]) for value in ids]
        return [EncodedChunk(modality="text", data=piece.encode()) for piece in pieces if piece]

    def _stopped_text(self, ids: list[int], stops: StopStrings, detokenizer: Detokenizer) -> list[EncodedChunk]:
        # One id at a time: only tokens up to the one that completes the stop string are counted.
        pieces = []
        for value in ids:
            if stops.is_matched:
                break
            self.text_tokens += 1
            pieces.append(stops.push(detokenizer.push([value])))
        return [EncodedChunk(modality="text", data=piece.encode()) for piece in pieces if piece]

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
