"""Sample requests of a miniature: one for each sample of the spec, with generated texts and small media files."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mstar_core.api.parse.params import count_order
from mstar_core.client.audio import AudioBuffer
from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.plugin.conformance import CheckSkipped
from mstar_core.plugin.params import param_specs
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.spec import ModelSpec, Sample
from mstar_core.workloads.media import png

TEXTS: Final = (
    "hello there",
    "a",
    "The quick brown fox jumps over the lazy dog, and then it does so once more.",
    "Größe 5 µm, 你好!",
)
"""Texts of different lengths, some with multi-byte characters."""

LENGTH: Final = 36
"""Output limit in ids: enough for several windows of a stream, few enough to cancel at each."""

LENGTH_PARAM: Final = "max_output_tokens"
IMAGE_SIDE: Final = 32
AUDIO_RATE: Final = 16000
FRAME_RATE: Final = 8
SOUND_S: Final = 0.5
CLIP_S: Final = 2.0


def asks_of(spec: ModelSpec) -> tuple[SampleRequest, ...]:
    """Make one request for each sample. Raises CheckSkipped for an input kind that has no generator."""
    return tuple(_ask(spec, sample, index) for index, sample in enumerate(spec.samples))


def mixed(spec: ModelSpec, count: int) -> tuple[SampleRequest, ...]:
    """Make requests of mixed samples, lengths and seeds."""
    base = asks_of(spec)
    texts = [TEXTS[index % len(TEXTS)] for index in range(count)]
    return tuple(
        replace(ask, text=ask.text if ask.text is None else texts[index], seed=100 + index, name=f"request {index}")
        for index, ask in enumerate(base[index % len(base)] for index in range(count))
    )


def of_lengths(ask: SampleRequest, count: int) -> tuple[SampleRequest, ...]:
    """Repeat a request, with texts of mixed lengths if it has a text."""
    return tuple(
        ask if ask.text is None else replace(ask, text=TEXTS[index % len(TEXTS)], seed=index) for index in range(count)
    )


def greedy(spec: ModelSpec, ask: SampleRequest) -> SampleRequest:
    """Return the request with greedy decoding if the model has a temperature."""
    names = {item.name for item in param_specs(spec.params) if item.name.endswith("temperature")}
    return replace(ask, params={**ask.params, **dict.fromkeys(names, 0.0)})


def _ask(spec: ModelSpec, sample: Sample, index: int) -> SampleRequest:
    kinds = spec.sample_inputs(sample)
    files = [kind for kind in kinds if kind != "text"]
    media = tuple(_file(kind, number, sample.seconds) for number, kind in enumerate(files))
    return SampleRequest(
        text=TEXTS[index % len(TEXTS)] if "text" in kinds else None,
        media=media,
        order=[(kind, 0 if kind == "text" else number) for kind, number in count_order(kinds)],  # one text, repeated
        params=_limited(spec, {**sample.params, **sample.tiny}),
        outputs=tuple(sorted(sample.outputs)),
        name=f"sample {sample.name!r}",
    )


def _limited(spec: ModelSpec, params: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in param_specs(spec.params)}
    return {**({LENGTH_PARAM: LENGTH} if LENGTH_PARAM in names else {}), **params}


def _file(kind: str, number: int, seconds: float | None) -> MediaPart:
    match kind:
        case "image":
            return MediaPart(modality=kind, data=ramp(number), name=f"{number}.png")
        case "audio":
            return MediaPart(modality=kind, data=wav(number, seconds or SOUND_S), name=f"{number}.wav")
        case "video":
            return MediaPart(modality=kind, data=mp4(number, seconds or CLIP_S), name=f"{number}.mp4")
        case _:
            raise CheckSkipped(f"the checks cannot generate an input of kind {kind}")


def ramp(number: int) -> bytes:
    """Encode a small picture of a colour ramp that depends on `number`."""
    import numpy as np

    across, down = np.meshgrid(np.arange(IMAGE_SIDE), np.arange(IMAGE_SIDE))
    return png((np.stack([8 * across, 8 * down, 0 * down + 60 * number], axis=-1) % 256).astype(np.uint8))


def wav(number: int, seconds: float = SOUND_S) -> bytes:
    """Encode a tone whose pitch depends on `number`."""
    count, pitch = round(AUDIO_RATE * seconds), 220.0 * (number + 1)
    samples = [int(8000 * math.sin(2 * math.pi * pitch * i / AUDIO_RATE)) for i in range(count)]
    return AudioBuffer(struct.pack(f"<{count}h", *samples), AUDIO_RATE).wav_bytes()


def mp4(number: int, seconds: float = CLIP_S) -> bytes:
    """Encode a moving ramp whose colour depends on `number`, with one second of a tone."""
    import av
    import numpy as np

    file = io.BytesIO()
    across, down = np.meshgrid(np.arange(IMAGE_SIDE), np.arange(IMAGE_SIDE))
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=FRAME_RATE)
        stream.width, stream.height, stream.pix_fmt = IMAGE_SIDE, IMAGE_SIDE, "yuv420p"
        sound = out.add_stream("aac", rate=AUDIO_RATE, layout="mono")
        wave_form = np.sin(0.1 * np.arange(AUDIO_RATE), dtype=np.float32)[None]
        tone = av.AudioFrame.from_ndarray(wave_form, format="fltp", layout="mono")
        tone.sample_rate = AUDIO_RATE
        for index in range(round(FRAME_RATE * seconds)):
            pixels = np.stack([8 * (across + index), 8 * down, 0 * down + 60 * number], axis=-1) % 256
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels.astype(np.uint8)), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        out.mux(sound.encode(tone))
        out.mux(sound.encode(None))
    return file.getvalue()
