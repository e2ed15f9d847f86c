"""Loader of the decoders of media. A pool process calls it when it starts, so that no first request waits for it."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable
from typing import Final

from mstar_core.plugin.media.images import encode_image, read_image
from mstar_core.plugin.media.limits import MediaLimits
from mstar_core.plugin.media.sounds import read_sound

SIDE: Final = 64
RATES: Final = (24_000, 16_000)
"""Samples per second of the sound that is written and of the one that is read, so that the resampler is loaded too."""


def load_decoders(modalities: Iterable[str]) -> None:
    """Import the decoders of these modalities and decode a small file of each. Others are ignored."""
    for modality in modalities:
        match modality:
            case "image":
                _decode_image()
            case "audio":
                _decode_sound()
            case "video":
                importlib.import_module("av")


def _decode_image() -> None:
    import numpy as np
    from PIL import Image

    image = read_image(encode_image(Image.new("RGB", (SIDE, SIDE))), MediaLimits())
    np.asarray(image.resize((SIDE // 2, SIDE // 2), Image.Resampling.BICUBIC))


def _decode_sound() -> None:
    import numpy as np
    import soundfile

    written, read = RATES
    file = io.BytesIO()
    soundfile.write(file, np.zeros(written // 10, dtype=np.float32), written, format="WAV")
    read_sound(file.getvalue(), read, MediaLimits())
