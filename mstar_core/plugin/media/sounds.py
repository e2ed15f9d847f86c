"""Audio reader: checks the length, decodes and resamples. soundfile reads most formats, PyAV the others."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mstar_core.errors import BadMedia, MstarError
from mstar_core.plugin.media.containers import open_container, seconds_of
from mstar_core.plugin.media.limits import FIELD, MediaLimits, check_decoded, too_large, undecodable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Samples = npt.NDArray[np.float32]

SAMPLE_BYTES = 4
BLOCK = 1 << 16
"""Samples per read."""


def sound_bytes(data: bytes, limits: MediaLimits) -> int:
    """Return the decoded size by the header. Raises TooLarge, BadMedia."""
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            seconds, rate, channels = file.frames / file.samplerate, file.samplerate, file.channels
    except soundfile.LibsndfileError:
        seconds, rate, channels = _container_facts(data)
    _check_length(seconds, limits)
    return int(seconds * rate) * int(channels) * SAMPLE_BYTES


def sound_seconds(data: bytes) -> float:
    """Return the length of a sound by its header. Raises BadMedia."""
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            return float(file.frames / file.samplerate)
    except soundfile.LibsndfileError:
        return _container_facts(data)[0]


def read_sound(data: bytes, rate: int, limits: MediaLimits) -> Samples:
    """Decode audio, or the first audio track of a video, mixed to one channel.

    rate: requested samples per second. Returns float32 [n] in [-1, 1]. Raises TooLarge, BadMedia (also
    `media_has_no_audio`).
    """
    import numpy as np

    try:
        found = _by_soundfile(data, limits)
        samples, have = found if found is not None else _by_container(data, limits)
        if not np.isfinite(samples).all():
            raise undecodable("sound", "it contains values that are not finite")
        return resampled(samples, have, rate).astype(np.float32, copy=False)
    except MstarError:
        raise
    except Exception as error:
        raise undecodable("sound", error) from error


def resampled(samples: Samples, have: int, want: int) -> Samples:
    """Resample float32 [n] from `have` to `want` samples per second with soxr's high quality."""
    import soxr

    if have == want or not len(samples):
        return samples
    made: Samples = soxr.resample(samples, have, want, quality="HQ")
    return made


def _by_soundfile(data: bytes, limits: MediaLimits) -> tuple[Samples, int] | None:
    import numpy as np
    import soundfile

    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError:
        return None
    with file:
        blocks = file.blocks(BLOCK, dtype="float32")
        mixed = (block if block.ndim == 1 else block.mean(axis=1) for block in blocks)
        parts = list(_counted(mixed, file.samplerate, limits))
        return np.concatenate(parts) if parts else np.zeros(0, np.float32), file.samplerate


def _by_container(data: bytes, limits: MediaLimits) -> tuple[Samples, int]:
    import av
    import numpy as np

    with open_container(data) as container:
        stream = _track(container)
        rate = int(stream.rate)
        mono = av.AudioResampler(format="flt", layout="mono", rate=rate)
        parts = list(_counted(_decoded(container, stream, mono), rate, limits))
        samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        length = seconds_of(container, stream)  # AAC pads its last frame; the container has the true length
        return (samples[: round(length * rate)] if length is not None else samples), rate


def _decoded(container: Any, stream: Any, mono: Any) -> Iterator[Samples]:
    for frame in container.decode(stream):
        for part in mono.resample(frame):
            yield part.to_ndarray().reshape(-1)
    for part in mono.resample(None):
        yield part.to_ndarray().reshape(-1)


def _counted(parts: Iterator[Samples], rate: int, limits: MediaLimits) -> Iterator[Samples]:
    # Headers may be wrong, so decoded samples are counted too.
    total = 0
    for part in parts:
        total += len(part)
        _check_length(total / rate, limits)
        check_decoded(total * SAMPLE_BYTES, limits)
        yield part


def _container_facts(data: bytes) -> tuple[float, int, int]:
    try:
        with open_container(data) as container:
            stream = _track(container)
            return seconds_of(container, stream) or 0.0, int(stream.rate or 0), int(stream.channels or 1)
    except MstarError:
        raise
    except Exception as error:
        raise undecodable("sound", error) from error


def _track(container: Any) -> Any:
    if not container.streams.audio:
        raise BadMedia(
            "the file has no audio track", hint="send a file with audio", field=FIELD, code="media_has_no_audio"
        )
    return container.streams.audio[0]


def _check_length(seconds: float, limits: MediaLimits) -> None:
    if seconds > limits.audio_s:
        raise too_large(f"the sound takes {seconds:g} s", f"{limits.audio_s:g} s")
