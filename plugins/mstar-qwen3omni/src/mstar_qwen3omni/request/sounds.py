"""Sounds as samples of the audio encoder, and their number of tokens (specification section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mstar_core.errors import BadMedia
from mstar_core.plugin.media import MediaLimits, read_sound
from mstar_qwen3omni.checkpoint.config import AudioSizes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Samples = npt.NDArray[np.float32]

RATE: Final = 16_000
HOP: Final = 160
"""Samples between two mel frames."""

WINDOW: Final = 400
"""Samples of one mel frame: the shortest sound."""

HALVINGS: Final = 3
"""Convolutions of stride 2."""


def mel_frames(samples: int) -> int:
    """Return the number of mel frames of a sound at 16 kHz."""
    return samples // HOP


def sound_tokens(frames: int, sizes: AudioSizes) -> int:
    """Return the number of tokens of mel frames: those of whole chunks and of the rest, each halved three times."""
    whole, rest = divmod(frames, sizes.chunk)
    return whole * _halved(sizes.chunk) + _halved(rest)


def read_samples(data: bytes, limits: MediaLimits) -> Samples:
    """Decode a sound of any rate and number of channels: float32 [1, samples] at 16 kHz. Raises TooLarge, BadMedia."""
    samples = read_sound(data, RATE, limits)
    if len(samples) < WINDOW:
        raise BadMedia(
            f"the sound has {len(samples)} samples at {RATE} Hz",
            f"at least {WINDOW} are needed",
            "send at least 25 ms of sound",
            field="files",
        )
    return samples[None]


def _halved(frames: int) -> int:
    for _ in range(HALVINGS):
        frames = -(-frames // 2)
    return frames
